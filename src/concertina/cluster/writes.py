"""What a turn's decision means for the store: which records, in which order. Pure; the clock is an argument.

The record of the cluster comes first, because it says which asks were done in the same write that does them. A state
is written before its keeper is started, an answer after everything that it tells of.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from concertina.cluster import keys
from concertina.cluster.records import Ask, ClusterState, Curve, JobState, NodeState, Reply
from concertina.cluster.turn_types import Decision, Memory

NOTES_SECONDS = 5.0  # how old what is written about progress and plans may be
STATUS_SECONDS = 2.0  # the same for the record of the cluster

Record = ClusterState | JobState | NodeState | Curve | Reply


@dataclass(frozen=True, slots=True, kw_only=True)
class Write:
    """One record to be written; None: to be deleted."""

    key: str
    record: Record | None
    leased: bool = False  # it may vanish after a while


@dataclass(slots=True)
class Written:
    """What the store holds of ours. Times by any clock that only rises."""

    states: dict[str, JobState] = field(default_factory=dict)
    states_s: dict[str, float] = field(default_factory=dict)
    nodes: dict[str, NodeState] = field(default_factory=dict)
    cluster: ClusterState | None = None
    cluster_s: float = 0.0

    def todo(self, decision: Decision, asks: Sequence[Ask], now: float) -> list[Write]:
        """All that differs and matters."""
        memory, found = decision.memory, []
        if _essence(memory.cluster) != _essence(self.cluster) or now - self.cluster_s > STATUS_SECONDS:
            found.append(Write(key=keys.CLUSTER, record=memory.cluster))
        found += [
            Write(key=keys.NODES + node.id, record=node) for node in decision.nodes if self.nodes.get(node.id) != node
        ]
        there = {node.id for node in decision.nodes}  # of the others an earlier controller has told
        found += [Write(key=keys.NODES + name, record=None) for name in self.nodes if there and name not in there]
        found += [Write(key=keys.CURVES + curve.key, record=curve) for curve in decision.curves]
        states = {**memory.live, **decision.states}
        matter = [state for job, state in states.items() if self._matters(job, state, now)]
        # Whoever gives slots up before whoever takes them: a controller that is killed in between leaves no slot
        # granted to two.
        matter.sort(key=self._takes)
        found += [Write(key=keys.STATES + state.id, record=_with_notes(state, memory)) for state in matter]
        found += [Write(key=keys.ANSWERS + reply.id, record=reply, leased=True) for reply in decision.replies]
        found += [Write(key=keys.ASKS + ask.id, record=None) for ask in asks]
        return found

    def _matters(self, job: str, state: JobState, now: float) -> bool:
        """What was decided, at once; what only tells progress and plans, every few seconds."""
        before = self.states.get(job)
        if before is state or before == state:
            return False
        if before is None or _decided(before) != _decided(state):
            return True
        return bool(state.slots) and now - self.states_s.get(job, 0.0) >= NOTES_SECONDS

    def _takes(self, state: JobState) -> bool:
        before = self.states.get(state.id)
        return bool(set(state.slots) - set(before.slots if before else ()))

    def done(self, write: Write, now: float) -> None:
        record = write.record
        if isinstance(record, ClusterState):
            self.cluster, self.cluster_s = record, now
        elif isinstance(record, NodeState):
            self.nodes[record.id] = record
        elif isinstance(record, JobState):
            self.states[record.id], self.states_s[record.id] = record, now
        elif write.key.startswith(keys.NODES):
            self.nodes.pop(keys.job_of(write.key), None)

    def forget(self, job: str) -> None:
        self.states.pop(job, None)
        self.states_s.pop(job, None)


def _with_notes(state: JobState, memory: Memory) -> JobState:
    """As it is to be kept: with what the policy noted about it last."""
    if state.phase.is_end:
        return state
    level, stamp = memory.notes.get(state.id, (0, 0.0))
    return replace(state, level=level, stamp=stamp, reserved=memory.reserved.get(state.id, ()))


def _essence(cluster: ClusterState | None) -> ClusterState | None:
    """Without what only counts."""
    return None if cluster is None else replace(cluster, rounds=0, round_ms=0.0, at_s=0.0)


def _decided(state: JobState) -> JobState:
    """Without what changes all the time and can be found out again."""
    return replace(state, done=0.0, service_s=0.0, executed_s=0.0, settled_s=0.0, level=0, stamp=0.0, reserved=())
