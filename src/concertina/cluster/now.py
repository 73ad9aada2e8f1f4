"""The live cluster as a snapshot to ask questions about: why, when, what if. Reads the mirror, changes nothing."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from concertina.cluster.asks import pinned_to
from concertina.cluster.curves import LiveCurves, kind_of
from concertina.cluster.mirror import Job, Mirror
from concertina.cluster.records import Curve, JobRequest, JobState
from concertina.cluster.settle import known_work
from concertina.cluster.views import (
    ASSUMED_SECONDS,
    Live,
    at_cost,
    live_policy,
    readable,
    snapshot_of,
    spec_of,
    start_seconds,
    total_slots,
    written_notes,
)
from concertina.core.cluster import Snapshot
from concertina.core.job import JobSpec
from concertina.policies.round import GANGS
from concertina.questions import Basis, Eta, QuestionError, Quote, eta, quote, why
from concertina.simulator.overhead import OVERHEADS

DAY_SECONDS = 86_400.0
PAST = 500  # jobs submitted lately that the future is expected to resemble
ASSUMED = "?assumed"  # the kind of a job that nobody has measured, in a question


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """The cluster at one moment, ready for `concertina.questions`."""

    snapshot: Snapshot
    basis: Basis


def moment_now(mirror: Mirror, now: float, *, budget_ms: float = 300.0) -> Moment:
    """Raises QuestionError when there is nothing to ask about yet."""
    nodes, stored, cluster = mirror.nodes(), mirror.curves(), mirror.cluster
    if cluster is None or not nodes:
        raise QuestionError("the cluster has just been started and has no slots yet: ask again in a moment")
    jobs = mirror.jobs()
    live = [Live(request=j.request, state=j.state, seen=j.seen) for j in jobs if not j.state.phase.is_end]
    shown = [job for job in live if job.state.profiling or job.state.curve in stored]
    slots = total_slots(nodes)
    start_s = start_seconds(cluster.starts)
    policy = at_cost(live_policy(cluster.policy), start_s)
    specs = {job.id: spec_of(job, stored, slots, gang=policy.admission in GANGS) for job in shown}
    snapshot = snapshot_of(shown, specs, nodes, written_notes(job.state for job in shown), now, start_s)
    if snapshot is None:
        raise QuestionError("the cluster has no slots: ask again when a node is there")
    own = {job.id: (job.state.speeds_type, job.state.speeds) for job in shown if job.state.speeds}
    basis = Basis(
        policy=policy,
        curves=LiveCurves({**stored, ASSUMED: _assumed()}, own, slots),
        overhead=OVERHEADS["concertina"],
        past=past_of(jobs, stored, slots, now),
        budget_ms=budget_ms,
    )
    return Moment(snapshot=snapshot, basis=basis)


def past_of(jobs: Sequence[Job], stored: Mapping[str, Curve], slots: int, now: float) -> tuple[JobSpec, ...]:
    """What was asked for lately, refused and ended jobs included. Nothing in a cluster younger than a day: its first
    jobs say little about how many will come."""
    if not jobs or jobs[0].request.submitted_s > now - DAY_SECONDS:
        return ()
    found = []
    for job in jobs[-PAST:]:
        state = JobState(id=job.id, curve=job.state.curve, work=job.state.work)
        if state.curve in stored and not _makes_no_sense(job.request):
            found.append(spec_of(Live(request=job.request, state=state), stored, slots))
    return tuple(found)


def _makes_no_sense(request: JobRequest) -> bool:
    return request.min_workers > request.most


def _assumed() -> Curve:
    return Curve(key=ASSUMED, speeds={1: 1.0}, source="assumed")


def why_now(mirror: Mirror, job_id: str, now: float) -> tuple[str, Eta | None]:
    """Why a job is where it is, and when it is expected to end; None where that can not be told."""
    job = mirror.job(job_id)
    if job is None:
        raise QuestionError(f"there is no job {job_id!r}; `concertina jobs` lists them")
    state = job.state
    if state.phase.is_end:
        return f"it has ended ({state.phase.value}): {state.reason}", None
    here = moment_now(mirror, now)
    if state.profiling or not any(view.spec.id == job_id for view in here.snapshot.jobs):
        return state.reason, None
    found = eta(here.snapshot, job_id, here.basis)
    sentence = readable(why(here.snapshot, job_id, here.basis))
    if state.pinned:
        sentence = f"{pinned_to(state.pinned)}; {sentence}"
    return sentence, replace(found, reason=readable(found.reason))


def quote_now(mirror: Mirror, request: JobRequest, script: bytes, now: float) -> tuple[Quote, bool]:
    """What would happen if this were submitted now, and whether its kind has been measured: else it is a guess."""
    here = moment_now(mirror, now)
    kind = kind_of(request, script)
    stored = mirror.curves()
    known = stored.get(kind)
    work = known_work(request.steps, known.total_steps if known else 0)
    measured = known is not None and work is not None
    state = JobState(id=request.id, curve=kind if known else ASSUMED, work=work if known else ASSUMED_SECONDS)
    spec = spec_of(
        Live(request=request, state=state),
        stored,
        total_slots(mirror.nodes()),
        gang=here.basis.policy.admission in GANGS,
    )
    found = quote(here.snapshot, spec, here.basis)
    reason = readable(found.reason)
    if not measured:
        reason = f"a guess, nobody has measured this kind of job yet ({ASSUMED_SECONDS:.0f} s on one worker): {reason}"
    return replace(found, reason=reason), measured
