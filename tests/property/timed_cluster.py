"""The model of the live cluster by the second: keepers that do all they should, and starts that take their time.

No chance here: what a job loses, it loses by what the controller decides. The pattern of `benchmarks.live_trace
--reclaim` can be played on it: half of the slots taken back again and again while all are busy.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from tests.property.cluster_model import World, node

from concertina.cluster.records import Activity, Curve, JobSeen, JobState, Op

TICK_S = 0.2


@dataclass
class Kept:
    """A keeper and its workers."""

    job: str
    attempt: int
    began_s: float
    step: float
    count: int = 0  # workers that train
    wanted: int = 0  # and that are on their way
    ready_s: float = 0.0
    trains_s: float = 0.0
    leaves_s: float | None = None  # suspending; nothing is left then


@dataclass(frozen=True)
class Incoming:
    """A job of a trace."""

    name: str
    at_s: float
    kind: str
    steps: int
    deadline_s: float | None = None
    fewest: int = 1


@dataclass
class TimedCluster:
    """Jobs of known kinds on `slots` slots. Times in the trace begin at 0."""

    kinds: Mapping[str, Mapping[int, float]]
    slots: int = 4
    policy: str = "concertina"
    launch_s: float = 10.0
    grow_s: float = 2.0
    leave_s: float = 1.0
    world: World = field(init=False)
    begun_s: float = field(init=False)
    kept: dict[str, Kept] = field(default_factory=dict)
    starts: dict[str, int] = field(default_factory=dict)
    saved: dict[str, float] = field(default_factory=dict)
    unfair: list[str] = field(default_factory=list)  # slots given past a job whose promise is lost

    def __post_init__(self) -> None:
        self.world = _Timed(self, self.slots, self.policy)
        self.begun_s = self.world.now
        for kind, speeds in self.kinds.items():
            key = f"kind-{(kind,)}"
            self.world.curves[key] = Curve(key=key, speeds=dict(speeds), source="given")

    @property
    def now(self) -> float:
        return self.world.now - self.begun_s

    def submit(self, job: Incoming) -> None:
        due = None if job.deadline_s is None else self.begun_s + job.deadline_s
        name = self.world.submit(args=(job.kind,), steps=job.steps, deadline_s=due, min_workers=job.fewest)
        request = self.world.requests.pop(name)
        self.world.requests[job.name] = replace(request, id=job.name, name=job.name)

    # -- time ----------------------------------------------------------------------------------------------------

    def tick(self) -> None:
        before = dict(self.world.states)
        self.world.turn()
        self._look_who_was_passed_over(before)
        for kept in list(self.kept.values()):
            self._move(kept)
        self.world.now = round(self.world.now + TICK_S, 3)

    def start(self, job: str, attempt: int) -> None:
        self.starts[job] = self.starts.get(job, 0) + 1
        if job not in self.kept:
            self.kept[job] = Kept(job, attempt, self.world.now, self.saved.get(job, 0.0))

    def _move(self, kept: Kept) -> None:
        now, state = self.world.now, self.world.states[kept.job]
        if kept.leaves_s is not None:
            if now >= kept.leaves_s:
                self.saved[kept.job] = kept.step
                ended = Activity.CANCELLED if state.phase.is_end else Activity.SUSPENDED
                self._leave(kept, ended)
            return
        if kept.count:
            kept.step += TICK_S * self.kinds[self._kind(kept)][kept.count]
        if kept.step >= self.world.requests[kept.job].steps:
            kept.step = self.world.requests[kept.job].steps
            self._leave(kept, Activity.FINISHED)
            return
        wanted = len(state.slots)
        if not wanted or state.phase.is_end or state.attempt > kept.attempt:
            kept.leaves_s = now + self.leave_s
        elif wanted < kept.count:
            kept.count = kept.wanted = wanted
        elif wanted != kept.wanted:
            starts = kept.began_s + self.launch_s
            kept.wanted, kept.ready_s = wanted, now + self.grow_s if kept.count else max(starts, now)
        elif kept.count != wanted and now >= kept.ready_s:
            kept.count = wanted
            kept.trains_s = kept.trains_s or now
        self._say(kept, Activity.TRAINING if kept.count == wanted else Activity.CHANGING)

    def _kind(self, kept: Kept) -> str:
        return self.world.requests[kept.job].args[0]

    def _say(self, kept: Kept, activity: Activity) -> None:
        state = self.world.states[kept.job]
        known = self.kinds[self._kind(kept)]
        self.world.seen[kept.job] = JobSeen(
            id=kept.job,
            attempt=kept.attempt,
            order=state.order,
            heard=state.order,
            activity=activity if kept.count or activity is not Activity.CHANGING else Activity.STARTING,
            slots=state.slots,
            workers=kept.count,
            step=int(kept.step),
            trains_s=kept.trains_s,
            speeds={kept.count: known[kept.count]} if kept.count else {},
            at_s=self.world.now,
        )

    def _leave(self, kept: Kept, activity: Activity) -> None:
        self._say(kept, activity)
        self.world.seen[kept.job] = replace(self.world.seen[kept.job], activity=activity, slots=(), workers=0)
        del self.kept[kept.job]

    # -- what should not be --------------------------------------------------------------------------------------

    def _look_who_was_passed_over(self, before: Mapping[str, JobState]) -> None:
        """A job whose promise can not be kept any more has nothing, and one without a promise was given something."""
        states = self.world.states
        lost = [s.id for s in states.values() if not s.slots and self._is_lost(s)]
        for state in states.values() if lost else ():
            had = before[state.id].slots if state.id in before else ()
            if state.promised_s is None and len(state.slots) > len(had):
                self.unfair.append(f"{self.now:.1f}: {state.id} was given {state.slots}, {lost} wait")

    def _is_lost(self, state: JobState) -> bool:
        """Whether it was promised something, could start now, and would be late on all slots there are."""
        if state.promised_s is None or state.phase.is_end or state.releasing:
            return False
        best = max(self.kinds[self.world.requests[state.id].args[0]].values())
        return self.world.now + (self.world.requests[state.id].steps - state.done) / best > state.promised_s

    # -- a whole run ---------------------------------------------------------------------------------------------

    def play(self, jobs: list[Incoming], *, reclaims: int = 0, half: int = 2, limit_s: float = 3000.0) -> None:
        """`reclaims` times: all slots busy for 4 s, `half` of them lent for 4 s, as the benchmark does."""
        coming = sorted(jobs, key=lambda job: job.at_s)
        lent_at: float | None = None
        next_at = 4.0
        while self.now < limit_s:
            while coming and coming[0].at_s <= self.now:
                self.submit(coming.pop(0))
            if not coming and self.world.quiet():
                return
            busy = sum(len(seen.slots) for seen in self.world.seen.values())
            if lent_at is not None and self.now >= lent_at + 4.0:
                self.world.ask(Op.RETURN)
                lent_at, next_at = None, self.now + 4.0
            elif lent_at is None and reclaims and self.now >= next_at:
                if busy >= self.slots:
                    self.world.ask(Op.RECLAIM, "", half)
                    reclaims, lent_at = reclaims - 1, self.now
                else:
                    next_at = self.now + 4.0
            self.tick()
        raise AssertionError(f"not at an end after {limit_s} s")

    def late_by(self, job: str) -> float:
        """Seconds after its promise; below zero: in time."""
        state = self.world.states[job]
        assert state.ended_s is not None
        assert state.promised_s is not None
        return state.ended_s - state.promised_s

    def promised_at(self, at_s: float) -> bool:
        """Whether a job with a promise was given slots within the second that began then."""
        return any(
            state.promised_s is not None
            and any(line.workers and 0 <= line.at_s - at_s <= 1.0 for line in state.history)
            for state in self.world.states.values()
        )


class _Timed(World):
    """The store and the controller; keepers are ours."""

    def __init__(self, ours: TimedCluster, slots: int, policy: str) -> None:
        super().__init__(1, (node("n", slots),), policy)
        self._ours = ours

    def start_keeper(self, job: str, attempt: int) -> None:
        self._ours.start(job, attempt)

    def _is_gone(self, job: str, state: JobState) -> bool:
        return False
