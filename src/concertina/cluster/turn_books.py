"""The books of one turn: jobs as they are decided on, one after the other. Local to the turn; pure from outside."""

from collections.abc import Iterable
from dataclasses import replace

from concertina.cluster.curves import corrected, points
from concertina.cluster.evict import Holder
from concertina.cluster.records import ClusterState, Curve, JobState, NodePhase, NodeState, Reply
from concertina.cluster.settle import PATIENT_SECONDS, change
from concertina.cluster.slots import index_of, node_of, occupied
from concertina.cluster.turn_types import Facts, Line, Memory
from concertina.cluster.views import Live
from concertina.core.job import JobPhase

STARTS = 16  # of which it is remembered how long they took


class Books:
    def __init__(self, memory: Memory, facts: Facts) -> None:
        self.before, self.facts, self.now = memory, facts, facts.now
        self.cluster = memory.cluster
        self.states: dict[str, JobState] = dict(memory.live)
        self.curves: dict[str, Curve] = dict(facts.curves)
        self.stored: dict[str, Curve] = {}  # curves to be stored
        self.nodes = nodes_now(facts.nodes, memory.cluster)
        self.dirty = memory.dirty  # a round is due
        self.lines: list[Line] = []
        self.replies: list[Reply] = []

    # -- reading -----------------------------------------------------------------------------------------------------

    def live(self, job_id: str) -> Live:
        return Live(request=self.facts.requests[job_id], state=self.states[job_id], seen=self.facts.seen.get(job_id))

    def jobs(self) -> list[Live]:
        """Those that have not ended, in order of submission."""
        return self._in_order(state for state in self.states.values() if not state.phase.is_end)

    def submitted(self) -> list[Live]:
        """Those that admission has not looked at."""
        return self._in_order(state for state in self.states.values() if state.phase is JobPhase.SUBMITTED)

    def _in_order(self, states: Iterable[JobState]) -> list[Live]:
        requests, seen = self.facts.requests, self.facts.seen
        found = [Live(request=requests[s.id], state=s, seen=seen.get(s.id) if s.attempt else None) for s in states]
        found.sort(key=lambda job: (job.request.submitted_s, job.request.id))
        return found

    def occupied(self, job_id: str) -> frozenset[str]:
        state = self.states[job_id]
        if not state.attempt:
            return frozenset()
        return occupied(state, self.facts.seen.get(job_id), gone=job_id in self.facts.gone)

    def busy(self) -> frozenset[str]:
        """Slots that are granted or may have a process."""
        found: set[str] = set()
        for job_id, state in self.states.items():
            if state.slots or state.attempt:
                found |= {*state.slots, *self.occupied(job_id)}
        return frozenset(found)

    def holders(self, *, weighed: bool = True) -> list[Holder]:
        """Who has slots; with what it would cost to take them away, where that is asked for."""
        return [
            Holder(
                id=job.id,
                slots=job.state.slots,
                fewest=job.fewest,
                promised=job.state.promised_s is not None,
                slack_s=slack_s(job, self.curves.get(job.state.curve), self.now) if weighed else 0.0,
                loss_s=unsaved_s(job) if weighed else 0.0,
            )
            for job in self._in_order(state for state in self.states.values() if state.slots)
        ]

    # -- writing -----------------------------------------------------------------------------------------------------

    def keep(self, state: JobState) -> None:
        """Another state of a job, for whatever reason but progress: a round is due."""
        old = self.states.get(state.id)
        if state is old or state == old:
            return
        self.states[state.id] = state
        self.dirty = True
        if old is None or (old.slots, old.phase) != (state.slots, state.phase):
            self.lines.append(
                Line(event=state.phase.value, job=state.id, reason=state.reason, workers=len(state.slots))
            )

    def note(self, state: JobState) -> None:
        """Another state that is no reason for a round."""
        self.states[state.id] = state

    def give(self, job_id: str, slots: tuple[str, ...], reason: str, vacate_s: float = PATIENT_SECONDS) -> None:
        """Let a job have exactly these slots."""
        state = self.states[job_id]
        phase = JobPhase.RUNNING if slots else JobPhase.WAITING
        if state.phase is JobPhase.SUBMITTED:  # it is measured, and admitted later
            phase = JobPhase.SUBMITTED
        self.keep(change(state, self.now, reason, slots=slots, phase=phase, vacate_s=vacate_s))

    def refuse(self, state: JobState, reason: str) -> None:
        self.keep(change(state, self.now, reason, phase=JobPhase.REJECTED))

    def started(self, seconds: float) -> None:
        """So long it took a job from its slots to its first step."""
        self.cluster = replace(self.cluster, starts=(*self.cluster.starts, round(seconds, 2))[-STARTS:])

    def learn(self, curve: Curve) -> None:
        self.curves[curve.key] = self.stored[curve.key] = curve

    def tell(self, event: str, job: str = "", reason: str = "") -> None:
        self.lines.append(Line(event=event, job=job, reason=reason))


def nodes_now(nodes: tuple[NodeState, ...], cluster: ClusterState) -> tuple[NodeState, ...]:
    """The nodes as the backend sees them, with what users asked of them."""
    lent: dict[str, list[int]] = {}
    for slot in cluster.lent:
        lent.setdefault(node_of(slot), []).append(index_of(slot))
    found = []
    for node in nodes:
        if node.phase is NodePhase.UP and node.id in cluster.drained:
            node = replace(node, phase=NodePhase.DRAINED, reason="drained on request")
        taken = [index for index in lent.get(node.id, ()) if index < node.slots]
        found.append(replace(node, lent=tuple(sorted(taken))))
    return tuple(found)


def slack_s(job: Live, kind: Curve | None, now: float) -> float:
    """How much earlier than promised a job would be done with the slots it has; below zero: later."""
    state = job.state
    if state.promised_s is None or state.work is None:
        return 0.0
    speeds = points(corrected(kind.on(state.speeds_type) if kind else {}, state.speeds), len(state.slots))
    speed = speeds.get(len(state.slots), 0.0)
    return state.promised_s - now - max(state.work - state.done, 0.0) / speed if speed else 0.0


def unsaved_s(job: Live) -> float:
    """Work since the last checkpoint, in seconds: what it would lose if it did not get to write another."""
    seen = job.seen
    if seen is None or not seen.speeds:
        return 0.0
    speed = seen.speeds.get(seen.workers) or max(seen.speeds.values())
    return max(seen.step - seen.checkpoint_step, 0) / max(speed, 1e-9)
