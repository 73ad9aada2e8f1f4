"""When will it end, and what if: the future drawn several times."""

from __future__ import annotations

import math
import random
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace

from concertina.core.cluster import Snapshot
from concertina.core.job import JobPhase, JobSpec, JobView
from concertina.core.plan import Admitted, Rejected
from concertina.policies.admission import rule_of
from concertina.policies.round import surviving
from concertina.policies.table import Table
from concertina.questions.answers import Band, Delay, Eta, Quote
from concertina.questions.arrivals import arrivals
from concertina.questions.basis import Basis, QuestionError, check_job
from concertina.questions.forward import Course, FirstRound, Forward, Pace
from concertina.simulator.engine import Setting
from concertina.simulator.noise import Noise
from concertina.simulator.recorder import Record

CHANGE_US = 30.0
"""What a change costs the engine, in microseconds of one core."""
ROW_US = {
    "fifo": 0.1, "backfill": 0.2, "yarn-cs": 0.1, "srtf": 0.2, "las": 0.2, "tiresias": 0.2, "themis": 0.2, "edf": 0.2,
    "tiresias-gittins": 0.7, "greedy": 0.5, "chronus": 2.5, "optimus": 2.5, "gandiva": 6.0,
}  # fmt: skip
"""What a job costs a policy in each round, as measured by `benchmarks/questions.py cost`."""
DEAR_US = 45.0
"""The same for all others, which look ahead."""
RUNS_AT_LEAST = 4
"""Runs that the budget should allow; what a single one may cost follows."""
FEWEST_ROUNDS = 8
"""However many jobs there are."""
MOST_ROUNDS = 60
"""More are worth no more, once not every event has one."""
PRESENT = 1 / 6
"""Part of the jobs that a round meets on average, if rounds are few: most come when few jobs are left."""
FEWEST_FUTURES = 2
PER_ARRIVAL = 8.0
"""Times that the policy looks at all jobs for each newcomer: admission, and the rounds it causes."""
FURTHER = 2.0
"""Newcomers are drawn for this many times as long as the job would take without them."""
TRIES = 4
"""How often admission is asked for a deadline it would promise: a hint of its own may be off by rounding."""
NOTABLE = 0.01
"""A delay below this part of the time left is no delay."""


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """A snapshot made ready to be run forward many times."""

    snapshot: Snapshot
    basis: Basis
    pace: Pace | None
    run_ms: float
    """What a run should cost at most, as counted."""
    first: FirstRound = field(default_factory=FirstRound)

    def run(self, *, draw: int | None, until: Collection[str], come: Sequence[JobSpec] = ()) -> Course:
        """One run; `draw` numbers the luck it has, None: none at all."""
        basis = self.basis
        # with few rounds, where on the nodes a job would lie is not known well enough to be worth its time
        tracked = self.pace is None and all(view.placement or not view.workers for view in self.snapshot.jobs)
        setting = Setting(
            cluster=self.snapshot.cluster,
            policy=basis.policy,
            curves=basis.curves,
            overhead=basis.overhead,
            noise=Noise() if draw is None else basis.noise,
            seed=basis.seed * 1_000_003 + (draw or 0),
            gap_s=basis.gap_s,
            placement=basis.placement if tracked else "count",
            record=Record(),
        )
        first = None if self.pace is None else self.first
        most = self.run_ms * 1000.0 / row_us(basis)
        return Forward(
            self.snapshot, setting, arrivals=come, until=until, pace=self.pace, first=first, most=most
        ).forward()

    def cost_ms(self, course: Course) -> float:
        """What a run cost, as counted."""
        return (course.rows * row_us(self.basis) + course.changes * CHANGE_US) / 1000.0

    def futures(self, plain: Course, until: Collection[str], left_ms: float) -> list[Course]:
        """The plain course, or as many with luck and newcomers as may be drawn; both where these are few."""
        basis, now = self.basis, self.snapshot.now
        if not basis.past and basis.noise == Noise():
            return [plain]
        last = max((plain.ends.get(name, now) for name in until or plain.ends), default=now)
        window_s = max(basis.window_s, last - now)
        most = int(self.run_ms * 1000.0 / (len(self.snapshot.jobs) * row_us(basis) * PER_ARRIVAL + CHANGE_US))
        found = [] if self.pace is None else [plain]
        for draw in range(basis.runs - len(found)):
            if left_ms <= 0 and len(found) >= FEWEST_FUTURES:
                break
            chance = random.Random(f"{basis.seed}/arrivals/{draw}")
            come = arrivals(basis.past, now, window_s, now + FURTHER * (last - now), most, chance)
            found.append(self.run(draw=draw, until=until, come=come))
            left_ms -= self.cost_ms(found[-1])
        return found or [plain]


def row_us(basis: Basis) -> float:
    """What a job costs the policy in a round."""
    return ROW_US.get(basis.policy.name, DEAR_US)


def world_of(snapshot: Snapshot, basis: Basis, run_ms: float) -> World:
    """A world whose runs cost about `run_ms` at most: with every round if possible, with fewer if not."""
    jobs = len(snapshot.jobs)
    if jobs**2 * row_us(basis) / 1000.0 <= run_ms:
        return World(snapshot=snapshot, basis=basis, pace=None, run_ms=run_ms)
    rounds = int(run_ms * 1000.0 / (jobs * PRESENT * row_us(basis)))
    rounds = min(max(rounds, FEWEST_ROUNDS), MOST_ROUNDS)
    pace = Pace(rounds=rounds, span_s=drain_s(snapshot, basis))
    return World(snapshot=snapshot, basis=basis, pace=pace, run_ms=run_ms)


def drain_s(snapshot: Snapshot, basis: Basis) -> float:
    """About how long the cluster is busy with what it has."""
    table = Table.from_snapshot(snapshot, basis.curves)
    left = table.time_left()
    whole = float((left * table.gpus).sum()) / max(sum(table.capacity), 1)
    return max(whole, float(left.max(initial=1.0)), 1.0)


def eta(snapshot: Snapshot, job_id: str, basis: Basis) -> Eta:
    """When this job is expected to get devices and to end."""
    check_job(snapshot, job_id)
    return _etas(snapshot, basis, [job_id])[job_id]


def etas(snapshot: Snapshot, basis: Basis) -> dict[str, Eta]:
    """The same for every job there is, from the same runs."""
    return _etas(snapshot, basis, [])


def _etas(snapshot: Snapshot, basis: Basis, until: Sequence[str]) -> dict[str, Eta]:
    world = world_of(snapshot, basis, basis.budget_ms / RUNS_AT_LEAST)
    plain = world.run(draw=None, until=until)
    courses = world.futures(plain, until, basis.budget_ms - world.cost_ms(plain))
    return {name: _eta(name, plain, courses) for name in until or [view.spec.id for view in snapshot.jobs]}


def _eta(name: str, plain: Course, courses: Sequence[Course]) -> Eta:
    start, end = (_band([getattr(course, what) for course in courses], name) for what in ("starts", "ends"))
    reason = plain.refused.get(name, "") or (
        "it does not end if nothing changes" if math.isinf(end.expected_s) else "by running the cluster forward"
    )
    return Eta(job_id=name, start=start, end=end, runs=len(courses), reason=reason)


def _band(times: Sequence[dict[str, float]], name: str) -> Band:
    return Band.of([found.get(name, math.inf) for found in times])


def quote(snapshot: Snapshot, spec: JobSpec, basis: Basis) -> Quote:
    """What would happen if this job were submitted now: taken or not, when it would end, who would end later."""
    if any(view.spec.id == spec.id for view in snapshot.jobs):
        raise QuestionError(f"a job {spec.id!r} is there already; ask with an id of its own")
    spec = replace(spec, submit_s=snapshot.now)
    answer, earliest = _promise(snapshot, spec, basis)
    offered = spec if isinstance(answer, Admitted) else _at(spec, earliest)
    if offered is None:
        return Quote(
            job_id=spec.id, taken=False, earliest_s=earliest, start=None, end=None, delays=(), runs=0,
            reason=answer.reason,
        )  # fmt: skip
    view = JobView(spec=offered, phase=JobPhase.WAITING, waiting_since_s=snapshot.now)
    world = world_of(replace(snapshot, jobs=(*snapshot.jobs, view)), basis, basis.budget_ms / RUNS_AT_LEAST)
    without = replace(world, snapshot=snapshot, first=FirstRound()).run(draw=None, until=())
    plain = world.run(draw=None, until=())
    left_ms = basis.budget_ms - world.cost_ms(without) - world.cost_ms(plain)
    courses = world.futures(plain, [spec.id], left_ms)
    found = _eta(spec.id, plain, courses)
    return Quote(
        job_id=spec.id,
        taken=isinstance(answer, Admitted),
        earliest_s=earliest,
        start=found.start,
        end=found.end,
        delays=_delays(snapshot, without, plain),
        runs=len(courses),
        reason=answer.reason,
    )


def _at(spec: JobSpec, deadline: float | None) -> JobSpec | None:
    return None if deadline is None else replace(spec, deadline_s=deadline, soft=False)


def _promise(snapshot: Snapshot, spec: JobSpec, basis: Basis) -> tuple[Admitted | Rejected, float | None]:
    """The answer of admission to this job as it is, and the earliest deadline that it would promise."""
    curve, _ = basis.curves.of(spec)
    admit = rule_of(basis.policy)
    slots = [snapshot.cluster.slots_of(kind) for kind in snapshot.cluster.types]
    table = Table.from_snapshot(surviving(_taken(snapshot), basis.policy, basis.curves), basis.curves)
    answer = admit(spec, curve, slots, table)
    hint = answer.earliest_s if isinstance(answer, Rejected) else None
    if hint is None and isinstance(answer, Rejected) and (spec.deadline_s is None or spec.soft):
        return answer, None  # it was not the deadline that it was refused for
    deadline = snapshot.now if hint is None else float(math.ceil(hint))
    for _ in range(TRIES):
        found = admit(replace(spec, deadline_s=deadline, soft=False), curve, slots, table)
        if isinstance(found, Admitted):
            return answer, found.promised_s
        if found.earliest_s is None:
            break
        deadline = float(math.ceil(max(found.earliest_s, deadline)))
    return answer, None


def _taken(snapshot: Snapshot) -> Snapshot:
    """Without the jobs that admission has not looked at: they stand behind."""
    return replace(snapshot, jobs=tuple(v for v in snapshot.jobs if v.phase is not JobPhase.SUBMITTED))


def _delays(snapshot: Snapshot, before: Course, after: Course) -> tuple[Delay, ...]:
    found = []
    for view in snapshot.jobs:
        name = view.spec.id
        if name in before.ends:
            delay = Delay(job_id=name, before_s=before.ends[name], after_s=after.ends.get(name, math.inf))
            if delay.by_s > max(1.0, NOTABLE * (delay.before_s - snapshot.now)):
                found.append(delay)
    return tuple(sorted(found, key=lambda delay: (-delay.by_s, delay.job_id)))
