"""The records of live jobs as policies see them: a `Snapshot` built from what was granted. Pure."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from concertina.cluster.curves import PROBE, PROBE_STEPS, LiveCurves, corrected
from concertina.cluster.records import Curve, JobRequest, JobSeen, JobState, NodePhase, NodeState
from concertina.cluster.slots import by_node, by_type, in_order
from concertina.core.cluster import Cluster, Node, Snapshot
from concertina.core.job import JobPhase, JobSpec, JobView, Reserved
from concertina.policies.admission import on_terms
from concertina.policies.base import Policy
from concertina.policies.filling import ChangeCost
from concertina.policies.registry import policy_named

SPARE_SECONDS = 10.0  # before a deadline at least: workers may once be started anew at the worst moment
CHANGE_SECONDS = 5.0  # that a change of workers counts as: next to nothing, and something for what nobody foresees
START_SECONDS = 5.0  # from slots to the first step, where no start was measured yet
MOST_START_SECONDS = 120.0  # that a start counts as, whatever was measured
ASSUMED_SECONDS = 600.0  # of work on one worker, where nobody knows how much there is
_EPOCH_SECONDS = re.compile(r"\b(\d{10}) s\b")


@dataclass(frozen=True, slots=True, kw_only=True)
class Live:
    """A job that has not ended, as the controller knows it."""

    request: JobRequest
    state: JobState
    seen: JobSeen | None = None

    @property
    def id(self) -> str:
        return self.request.id

    @property
    def fewest(self) -> int:
        """Workers without which it can not run."""
        return self.state.pinned or max(self.request.min_workers, 1)

    @property
    def most(self) -> int:
        return self.state.pinned or max(self.request.most, self.fewest)

    @property
    def strict(self) -> bool:
        return self.request.deadline_s is not None and not self.request.soft


def live_policy(name: str) -> Policy:
    """The policy of that name on the terms of a live cluster."""
    return at_cost(policy_named(name), START_SECONDS)


def at_cost(policy: Policy, start_s: float) -> Policy:
    """A policy with promises that count what a start costs here."""
    cost = ChangeCost(flat_s=CHANGE_SECONDS, doubling_s=0.0, start_s=max(start_s - CHANGE_SECONDS, 0.0))
    return on_terms(policy, spare_s=max(SPARE_SECONDS, start_s), cost=cost)


def start_seconds(starts: Sequence[float]) -> float:
    """What a start costs, by those that were measured: three of four take no longer."""
    if not starts:
        return START_SECONDS
    ordered = sorted(starts)
    return float(min(max(ordered[len(ordered) * 3 // 4], START_SECONDS), MOST_START_SECONDS))


def cluster_of(nodes: Iterable[NodeState]) -> tuple[Cluster | None, frozenset[str]]:
    """What there is to share out, and the nodes of it that are down. None: no node at all.

    Slots lent to somebody else are not there; a node with none left is down.
    """
    found: list[Node] = []
    down: set[str] = set()
    for node in nodes:
        left = node.slots - len(node.lent)
        if node.slots < 1:
            continue
        found.append(Node(id=node.id, device_type=node.device_type, slots=left or node.slots))
        if node.phase is not NodePhase.UP or left < 1:
            down.add(node.id)
    return (Cluster(nodes=tuple(found)) if found else None), frozenset(down)


def total_slots(nodes: Iterable[NodeState]) -> int:
    """Of the whole cluster, down and lent ones included: what a job may ask for does not change by the minute."""
    return sum(node.slots for node in nodes)


def curves_of(jobs: Iterable[Live], stored: Mapping[str, Curve], slots: int) -> LiveCurves:
    own = {job.id: (job.state.speeds_type, job.state.speeds) for job in jobs if job.state.speeds}
    return LiveCurves(stored, own, max(slots, 1))


def spec_of(job: Live, stored: Mapping[str, Curve], slots: int, *, gang: bool = False) -> JobSpec:
    """What the user asked for, in the policies' words; `slots` are those of the whole cluster.

    An elastic job asks for its fewest workers: that is its fair share, and what promises to others must leave it. A
    policy that gives all or nothing (`gang`) is asked for the most. Raises InvalidJobError if that makes no sense.
    """
    request, state = job.request, job.state
    if state.profiling:
        return _probe(job)
    return JobSpec(
        id=request.id,
        name=request.name,
        user=request.user,
        submit_s=request.submitted_s,
        gpus=max(min(job.most, slots), job.fewest) if gang else job.fewest,
        model=state.curve,
        work=max(_work(job, stored), 1e-6),
        deadline_s=request.deadline_s,
        soft=request.soft and request.deadline_s is not None,
        min_workers=job.fewest,
        max_workers=job.most,
    )


def _probe(job: Live) -> JobSpec:
    """A job that is only measured: the smallest there is, so that the policy makes room for it as soon as it can."""
    return JobSpec(
        id=job.id,
        name=job.request.name,
        user=job.request.user,
        submit_s=job.request.submitted_s,
        gpus=job.fewest,
        model=PROBE,
        work=PROBE_STEPS,
        min_workers=job.fewest,
        max_workers=job.fewest,
    )


def _work(job: Live, stored: Mapping[str, Curve]) -> float:
    """Steps in all. Of a job that has not been admitted only those to come: so is admission's sum.

    Where nobody knows: as many again as were made, and ten minutes' worth at least.
    """
    state = job.state
    behind = state.done if state.phase is JobPhase.SUBMITTED else 0.0
    if state.work is not None:
        return state.work - behind
    curve = stored.get(state.curve)
    speeds = corrected(curve.on(state.speeds_type) if curve else {}, state.speeds)
    least = ASSUMED_SECONDS * (speeds[min(speeds)] if speeds else 1.0)
    return max(2 * state.done, state.done + least) - behind


@dataclass(frozen=True, slots=True, kw_only=True)
class Notes:
    """What the policy wants to find again: newer than what is written in the jobs' states."""

    levels: Mapping[str, tuple[int, float]]
    reserved: Mapping[str, Reserved]

    def of(self, job_id: str) -> tuple[int, float, Reserved]:
        level, stamp = self.levels.get(job_id, (0, 0.0))
        return level, stamp, self.reserved.get(job_id, ())


def written_notes(states: Iterable[JobState]) -> Notes:
    states = list(states)
    return Notes(
        levels={state.id: (state.level, state.stamp) for state in states},
        reserved={state.id: state.reserved for state in states if state.reserved},
    )


def view_of(
    job: Live, spec: JobSpec, type_of: Mapping[str, str], notes: Notes, start_s: float = START_SECONDS
) -> JobView:
    """`start_s`: what a start is believed to take; a job that has not come to its first step has that before it."""
    state = job.state
    level, stamp, reserved = notes.of(job.id)
    slots: Sequence[str] = state.slots
    if state.profiling:  # what it has beyond its fewest is only borrowed while nobody else wants it
        slots = in_order(slots)[: job.fewest]
    submitted = state.phase is JobPhase.SUBMITTED
    phase = JobPhase.RUNNING if slots else JobPhase.WAITING
    return JobView(
        spec=spec,
        phase=JobPhase.SUBMITTED if submitted and not state.profiling else phase,
        workers=by_type(slots, type_of),
        placement=by_node(slots),
        work_done=0.0 if submitted else state.done,
        service_s=state.service_s,
        executed_s=state.executed_s,
        waiting_since_s=None if slots else state.waiting_since_s or job.request.submitted_s,
        first_start_s=state.first_start_s,
        resumes_s=state.started_s + start_s if slots and not state.trains_s else None,
        promised_s=state.promised_s,
        level=level,
        stamp=stamp,
        reserved=reserved,
    )


def snapshot_of(
    jobs: Sequence[Live],
    specs: Mapping[str, JobSpec],
    nodes: Sequence[NodeState],
    notes: Notes,
    now: float,
    start_s: float = START_SECONDS,
) -> Snapshot | None:
    """All that a round may know; None: there is no node. Jobs in order of submission."""
    cluster, down = cluster_of(nodes)
    if cluster is None:
        return None
    type_of = {node.id: node.device_type for node in nodes}
    views = tuple(view_of(job, specs[job.id], type_of, notes, start_s) for job in jobs)
    return Snapshot(now=now, cluster=cluster, jobs=views, down=down)


def readable(sentence: str) -> str:
    """A policy's sentence with moments as people write them instead of seconds since 1970."""
    return _EPOCH_SECONDS.sub(lambda found: moment(float(found[1])), sentence)


def moment(at_s: float) -> str:
    """By this machine's clock."""
    return f"{datetime.fromtimestamp(at_s):%Y-%m-%d %H:%M:%S}"
