"""A cluster made of numbers around the controller's pure turn: a store, keepers with processes, and bad luck.

Keepers follow the contract of `cluster/records.py` and nothing more: they read orders late, start and end processes one
by one, write what they see late, and are killed at any moment. Controllers are killed between any two writes. What may
never be is checked after every move.
"""

import random
from dataclasses import dataclass, field, replace

from concertina.cluster import keys
from concertina.cluster.records import (
    ENDED,
    Activity,
    Ask,
    ClusterState,
    Curve,
    JobRequest,
    JobSeen,
    JobState,
    Keeper,
    NodePhase,
    NodeState,
    Op,
)
from concertina.cluster.slots import keeper_is_over
from concertina.cluster.turn import decide
from concertina.cluster.turn_types import Facts, Memory
from concertina.cluster.views import live_policy, written_notes
from concertina.cluster.writes import Written
from concertina.core.job import JobPhase, check_move

SPEED = {1: 1.0, 2: 1.8, 3: 2.5, 4: 3.1, 8: 5.0}


@dataclass
class Process:
    """A keeper and its workers."""

    job: str
    attempt: int
    state: JobState  # as read
    alive: bool = True
    workers: set[str] = field(default_factory=set)  # slots with a process; they outlive a killed keeper for a while
    step: int = 0
    activity: Activity = Activity.STARTING
    unwritten: bool = True
    left: bool = False  # it has said its last word


class World:
    def __init__(self, seed: int, nodes: tuple[NodeState, ...], policy: str = "concertina") -> None:
        self.chance = random.Random(seed)
        self.now = 1_800_000_000.0
        self.nodes = nodes
        self.policy = live_policy(policy)
        self.requests: dict[str, JobRequest] = {}
        self.states: dict[str, JobState] = {}
        self.seen: dict[str, JobSeen] = {}
        self.curves: dict[str, Curve] = {}
        self.asks: dict[str, Ask] = {}
        self.answers: dict[str, object] = {}
        self.cluster = ClusterState(policy=policy, backend="pretend")
        self.processes: list[Process] = []
        self.checkpoints: dict[str, int] = {}
        self.locks: dict[str, Process] = {}
        self.memory: Memory | None = None  # of the controller in office; None: it has to be started
        self.written = Written()
        self.ended: dict[str, JobPhase] = {}
        self.killed_keepers: dict[str, int] = {}
        self.finished_work: dict[str, int] = {}
        self.turns = 0

    # -- users -------------------------------------------------------------------------------------------------------

    def submit(self, **given: object) -> str:
        name = f"j{len(self.requests)}"
        fields = {"virtual": 4, "steps": 40, "submitted_s": self.now, "name": name, "user": "u", "script": "s.py"}
        self.requests[name] = JobRequest(id=name, **{**fields, **given})  # type: ignore[arg-type]
        return name

    def ask(self, op: Op, target: str = "", number: int = 0) -> str:
        name = f"ask{len(self.asks) + len(self.answers)}-{self.chance.random()}"
        self.asks[name] = Ask(id=name, op=op, user="u", target=target, number=number, at_s=self.now)
        return name

    # -- the controller ----------------------------------------------------------------------------------------------

    def turn(self, crash_after: int | None = None) -> None:
        """One turn; `crash_after` so many writes the controller dies, and knows nothing the next time."""
        memory = self.memory or self._load()
        facts = self._look(memory)
        decision = decide(memory, facts, self.policy)
        assert self.cluster.error == "", self.cluster.error
        self.turns += 1
        todo = self.written.todo(decision, facts.asks, self.now)
        for number, write in enumerate(todo):
            if number == crash_after:
                self.memory = None
                return
            self._put(write.key, write.record)
            self.written.done(write, self.now)
        if crash_after is not None:
            self.memory = None
            return
        self.memory = decision.memory
        for job in decision.at_rest:
            self.ended[job] = self.states[job].phase
        for job in decision.start:
            self.start_keeper(job, self.states[job].attempt)
        for job in decision.end:
            for process in [p for p in self.processes if p.job == job]:
                self._bury(process)

    def _put(self, key: str, record: object) -> None:
        name = keys.job_of(key)
        if isinstance(record, JobState):
            before = self.states.get(name)
            if before is not None and before.phase is not record.phase:
                check_move(name, (before.phase,), record.phase)
            self.states[name] = record
        elif isinstance(record, ClusterState):
            self.cluster = record
        elif isinstance(record, Curve):
            self.curves[name] = record
        elif key.startswith(keys.ANSWERS):
            self.answers[name] = record
        elif key.startswith(keys.ASKS):
            self.asks.pop(name, None)

    def _load(self) -> Memory:
        self.ended = {
            job: state.phase
            for job, state in self.states.items()
            if state.phase.is_end and keeper_is_over(state, self.seen.get(job), gone=False)
        }
        live = {job: state for job, state in self.states.items() if job not in self.ended}
        self.written = Written(states=dict(live), cluster=self.cluster)
        notes = written_notes(live.values())
        return Memory(cluster=self.cluster, live=live, notes=notes.levels, reserved=notes.reserved)

    def _look(self, memory: Memory) -> Facts:
        fresh = [r for name, r in self.requests.items() if name not in memory.live and name not in self.ended]
        return Facts(
            now=self.now,
            nodes=self.nodes,
            requests=self.requests,
            fresh=tuple(fresh),
            kinds={r.id: f"kind-{r.args}" for r in fresh},
            seen=self.seen,
            registered=frozenset(p.job for p in self.processes if p.alive),
            gone=frozenset(job for job, state in memory.live.items() if state.attempt and self._is_gone(job, state)),
            curves=self.curves,
            asks=tuple(self.asks.values()),
            ended=self.ended,
            admit_most=self.chance.choice([1, 3, 50]),
        )

    def _is_gone(self, job: str, state: JobState) -> bool:
        return not any(p.job == job for p in self.processes) and self.now > state.attempt_s + 1.0

    # -- keepers -----------------------------------------------------------------------------------------------------

    def start_keeper(self, job: str, attempt: int) -> None:
        self.processes.append(Process(job=job, attempt=attempt, state=self.states[job]))

    def keeper_moves(self, process: Process) -> None:
        """One small thing that a keeper may do next, whichever."""
        if not process.alive:
            if process.workers and self.chance.random() < 0.5:
                process.workers.pop()  # the kernel takes them one by one
            elif not process.workers:
                self._bury(process)
            return
        holder = self.locks.get(process.job)
        if holder is not None and holder is not process:
            if self.states[process.job].attempt > process.attempt:
                self._bury(process)
            return  # it waits for the lock
        if holder is None:
            if self.states[process.job].attempt != process.attempt:
                self._bury(process)
                return
            self.locks[process.job] = process
            process.step = self.checkpoints.get(process.job, 0)
            process.state = self.states[process.job]
        move = self.chance.choice([self._read, self._workers, self._workers, self._train, self._write, self._write])
        move(process)

    def _read(self, process: Process) -> None:
        state = self.states[process.job]
        if state.attempt > process.attempt:
            process.workers.clear()
            self._bury(process)
            return
        process.state, process.unwritten = state, True

    def _workers(self, process: Process) -> None:
        state = process.state
        wanted = set() if state.phase.is_end else set(state.slots)
        too_many, missing = process.workers - wanted, wanted - process.workers
        if too_many:
            process.workers.discard(self.chance.choice(sorted(too_many)))
        elif missing and not process.left:
            process.workers.add(self.chance.choice(sorted(missing)))
        process.unwritten = True
        if wanted:
            process.activity = Activity.TRAINING if process.workers == wanted else Activity.CHANGING
        elif not process.workers:
            ended = state.phase.is_end
            process.activity = Activity.CANCELLED if ended else Activity.SUSPENDED
            self.checkpoints[process.job] = process.step
            self._leave(process)

    def _train(self, process: Process) -> None:
        if not process.workers or process.activity is not Activity.TRAINING:
            return
        request = self.requests[process.job]
        process.step = min(process.step + self.chance.randint(1, 6), request.steps)
        process.unwritten = True
        if self.chance.random() < 0.2:
            self.checkpoints[process.job] = process.step
        if process.step >= request.steps:
            process.workers.clear()
            process.activity = Activity.FINISHED
            self.finished_work[process.job] = self.finished_work.get(process.job, 0) + 1
            self._leave(process)

    def _leave(self, process: Process) -> None:
        self._write(process)
        process.left = True
        self._bury(process)

    def _write(self, process: Process) -> None:
        old = self.seen.get(process.job)
        if old is not None and old.attempt > process.attempt:
            return
        count = len(process.workers)
        speeds = dict(old.speeds) if old else {}
        if process.activity is Activity.TRAINING and process.step > 2:
            speeds[count] = SPEED[count]
        self.seen[process.job] = JobSeen(
            id=process.job,
            attempt=process.attempt,
            heard=process.state.order,
            activity=process.activity,
            slots=tuple(sorted(process.workers)),
            workers=count,
            step=process.step,
            total_steps=self.requests[process.job].steps,
            speeds=speeds,
            at_s=self.now,
        )

    def kill_keeper(self, process: Process) -> None:
        process.alive = False
        self.killed_keepers[process.job] = self.killed_keepers.get(process.job, 0) + 1

    def _bury(self, process: Process) -> None:
        process.alive = False
        process.workers.clear()
        if self.locks.get(process.job) is process:
            del self.locks[process.job]
        self.processes.remove(process)

    # -- what may never be -------------------------------------------------------------------------------------------

    def check(self) -> None:
        users: dict[str, str] = {}
        for process in self.processes:
            for slot in process.workers:
                assert users.setdefault(slot, process.job) == process.job, f"{slot}: {users[slot]} and {process.job}"
        trains = [p.job for p in self.processes if p.workers]
        assert len(trains) == len(set(trains)), f"one job run twice: {trains}"
        granted: dict[str, str] = {}
        for job, state in self.states.items():
            for slot in state.slots:
                assert granted.setdefault(slot, job) == job, f"{slot} granted to {granted[slot]} and {job}"
            assert not (state.slots and state.phase.is_end)
            if state.slots:
                fewest = state.pinned or self.requests[job].min_workers
                assert len(state.slots) >= fewest or len(state.slots) >= self.requests[job].min_workers
        assert all(count == 1 for count in self.finished_work.values())

    def quiet(self) -> bool:
        return all(self.states.get(job) and self.states[job].phase.is_end for job in self.requests)


def node(name: str, slots: int, phase: NodePhase = NodePhase.UP) -> NodeState:
    return NodeState(id=name, device_type="cpu", slots=slots, phase=phase)


__all__ = ["ENDED", "Keeper", "Process", "World", "node", "replace"]
