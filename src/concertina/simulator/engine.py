"""The clock and the events: arrivals, finishes, faults, wake-ups, and a round of the policy after each.

Work per event is a few array operations over the active jobs and a little Python for each job that changes.
Nothing here knows any policy by name.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from concertina.core.cluster import Cluster
from concertina.core.errors import SimulationError
from concertina.core.job import JobPhase, JobSpec
from concertina.core.plan import Rejected
from concertina.policies.admission import rule_of
from concertina.policies.base import Policy, Shares, explainer_of
from concertina.policies.placement import Spot
from concertina.policies.round import Change, changes
from concertina.policies.scaling_curve import Curves
from concertina.simulator.cluster import SimulatedCluster
from concertina.simulator.metrics import Result, Span
from concertina.simulator.noise import Fault, JobCancelled, JobCrashed, NodeLost, NodeReturned, Noise
from concertina.simulator.overhead import OverheadModel
from concertina.simulator.recorder import JobNotes, Record, Recorder


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """Everything a simulation depends on besides the jobs."""

    cluster: Cluster
    policy: Policy
    curves: Curves
    overhead: OverheadModel
    noise: Noise
    faults: Sequence[Fault] = ()
    seed: int = 0
    gap_s: float = 0.0
    """Least time between two rounds; what happens in between waits for the next round."""
    tick_s: float = 0.0
    """If not 0, rounds happen only at multiples of it."""
    placement: str = "best-fit"
    record: Record


class Simulation:
    """One run. `run` may be called once."""

    def __init__(self, jobs: Sequence[JobSpec], setting: Setting) -> None:
        self.setting = setting
        self.policy = setting.policy
        self.jobs = sorted(jobs, key=lambda job: job.submit_s)  # stable: ties keep the order of the trace
        self.cluster = SimulatedCluster(setting.cluster, placement=setting.placement)
        self.table = self.cluster.table
        self.table.now = self.jobs[0].submit_s if self.jobs else 0.0
        self.devices = setting.cluster.slots
        self.recorder = Recorder(setting.record, self.devices)
        self.recorder.now = self.table.now
        self.notes: list[JobNotes] = []
        self.work: list[float] = []
        self.stretch: list[int] = []
        """How often each job's devices changed: the number of its newest finish event."""
        self.finishes: list[tuple[float, int, int]] = []
        """Heap of (time, key, stretch); out of date where the stretch is not the newest."""
        self.faults = sorted(setting.faults, key=lambda fault: fault.time_s)
        self.users: dict[str, int] = {}
        self.admit = rule_of(self.policy)
        self.next_job = self.next_fault = 0
        self.wake_s: float | None = None
        self.due_s: float | None = None
        self.last_round_s = -float("inf")
        self.rounds = 0

    # -- the loop --------------------------------------------------------------------------------------------

    def run(self, clock: Callable[[], float], trace: str) -> Result:
        """Until nothing is left to happen. `clock` only measures how long decisions take."""
        begun = clock()
        self._play(clock)
        return self.recorder.result(
            trace=trace,
            policy=self.policy.name,
            cluster=self.setting.cluster,
            notes=self.notes,
            wall_s=clock() - begun,
        )

    def _play(self, clock: Callable[[], float]) -> None:
        while (now := self._next_time()) is not None:
            self.table.now = now
            self.recorder.advance(now)
            if self._happen(now) and self.due_s is None:
                self.due_s = self._due(now)
            if self.due_s is not None and self.due_s <= now:
                self._round(clock)
            self.recorder.point()
        self._close()

    def _due(self, now: float) -> float:
        """When the round for something that happens now may take place."""
        due = max(now, self.last_round_s + self.setting.gap_s)
        tick = self.setting.tick_s
        return math.ceil(due / tick) * tick if tick else due

    def _next_time(self) -> float | None:
        """The earliest thing that can happen; None: nothing that matters any more."""
        while self.finishes and self.stretch[self.finishes[0][1]] != self.finishes[0][2]:
            heapq.heappop(self.finishes)
        times = []
        if self.finishes:
            times.append(self.finishes[0][0])
        if self.next_job < len(self.jobs):
            times.append(self.jobs[self.next_job].submit_s)
        if not times and not len(self.table):
            return None
        if self.next_fault < len(self.faults):
            times.append(self.faults[self.next_fault].time_s)
        if self.due_s is not None:
            times.append(self.due_s)
        if self.wake_s is not None:
            times.append(self.wake_s)
        return max(min(times), self.table.now) if times else None

    def _happen(self, now: float) -> bool:
        """Let everything happen that is due; whether a round has to follow."""
        any_ = False
        while self.finishes and self.finishes[0][0] <= now:
            _, key, stretch = heapq.heappop(self.finishes)
            if self.stretch[key] == stretch:
                self._finish(key)
                any_ = True
        while self.next_fault < len(self.faults) and self.faults[self.next_fault].time_s <= now:
            self._fault(self.faults[self.next_fault])
            self.next_fault += 1
            any_ = True
        while self.next_job < len(self.jobs) and self.jobs[self.next_job].submit_s <= now:
            self._arrive(self.jobs[self.next_job])
            self.next_job += 1
            any_ = True
        if self.wake_s is not None and self.wake_s <= now:
            self.wake_s = None
            any_ = True
        return any_

    def _round(self, clock: Callable[[], float]) -> None:
        """Ask the policy and carry out what it wants."""
        self.due_s = None
        self.last_round_s = self.table.now
        started = clock()
        shares = self.policy.allocate(self.table)
        wanted = changes(self.table, shares)
        self.recorder.decision_s.append(clock() - started)
        self._note(shares)
        reasons = self._reasons(wanted)
        for change in wanted:
            if change.before:
                self._leave(change.row)
        for change, reason in zip(wanted, reasons, strict=True):
            self._enter(change, reason)
        if self.setting.overhead.everyone or self.setting.overhead.is_restart(self.rounds):
            self._charge_everyone({change.row for change in wanted})
        self._wake(shares)
        self.rounds += 1

    def _wake(self, shares: Shares) -> None:
        self.wake_s = shares.wake_s
        if self.wake_s is not None and self.wake_s <= self.table.now:
            raise SimulationError(
                f"{self.policy.name} wants to be woken at {self.wake_s}, which is not after {self.table.now}"
            )

    def _note(self, shares: Shares) -> None:
        n = len(self.table)
        if shares.level is not None:
            self.table.column("level")[:n] = shares.level
        if shares.stamp is not None:
            self.table.column("stamp")[:n] = shares.stamp
        if shares.reserved is not None:
            self.table.reserved = dict(shares.reserved)

    def _reasons(self, wanted: list[Change]) -> list[str]:
        """Why, asked before anything changes; only if somebody wants to know."""
        if not self.setting.record.decisions:
            return [""] * len(wanted)
        explain = explainer_of(self.policy, self.table)
        return [explain(c.row, c.before, c.after) for c in wanted]

    # -- jobs ------------------------------------------------------------------------------------------------

    def _arrive(self, spec: JobSpec) -> None:
        key = len(self.notes)
        curve, work = self.setting.curves.of(spec)
        note = JobNotes(spec, 0.0)
        self.notes.append(note)
        self.work.append(work)
        self.stretch.append(0)
        answer = self.admit(spec, curve, self.cluster.slots, self.table)
        if isinstance(answer, Rejected):
            note.phase, note.reason = JobPhase.REJECTED, answer.reason
            self.recorder.decide(spec.id, "reject", 0, 0, answer.reason)
            return
        note.phase = JobPhase.WAITING
        estimate = work * self.setting.noise.estimate_factor(self.setting.seed, spec.id)
        user = self.users.setdefault(spec.user, len(self.users))
        row = self.table.add(key, spec, curve, estimate=estimate, user=user)
        self.table.reserved.update(answer.reserved)
        note.alone_s = work / float(self.table.column("asked_speed")[row])
        note.contention_0 = self.recorder.contention_s
        self.recorder.waiting += 1
        self.recorder.demand += spec.gpus
        self.recorder.decide(spec.id, "admit", 0, 0, answer.reason)

    def _finish(self, key: int) -> None:
        row = self.cluster.row(key)
        self._leave(row)
        note = self.notes[key]
        lived = self.table.now - note.spec.submit_s
        if lived > 0 and note.alone_s > 0:
            crowd = (self.recorder.contention_s - note.contention_0) / lived
            note.fair_share = lived / (note.alone_s * crowd)
        self._end(key, row, JobPhase.FINISHED, "all its work is done")

    def _end(self, key: int, row: int, phase: JobPhase, reason: str) -> None:
        note = self.notes[key]
        note.phase, note.reason, note.end_s = phase, reason, self.table.now
        if self.recorder.record.decisions:
            self.recorder.decide(note.spec.id, phase.value, note.workers_last, 0, reason)
        note.queue_s += self.table.now - note.since_s
        self.recorder.waiting -= 1
        self.recorder.demand -= note.spec.gpus
        self.stretch[key] = -1
        self.table.remove(row)

    def _leave(self, row: int) -> None:
        """The job in this row gives its devices back (and may get others in the same moment)."""
        table, recorder = self.table, self.recorder
        key = table.keys[row]
        note = self.notes[key]
        self.cluster.settle(row)
        held = int(table.column("held")[row])
        note.device_s += held * (table.now - note.since_s)
        self._span(row, held, note.since_s, self.cluster.spots.get(key, ()))
        recorder.used -= held
        recorder.running -= 1
        recorder.waiting += 1
        recorder.efficiency -= self._efficiency(row)
        note.workers_last, note.speed_last = held, float(table.column("speed")[row])
        note.since_s = table.now
        self.stretch[key] += 1
        self.cluster.give_back(row)
        table.column("waiting_since")[row] = table.now

    def _enter(self, change: Change, reason: str) -> None:
        """Give a job the devices of `change` (none: it waits)."""
        table, recorder, row = self.table, self.recorder, change.row
        key = table.keys[row]
        note = self.notes[key]
        if not change.after:
            note.preemptions += 1
            note.phase = JobPhase.WAITING
            recorder.decide(note.spec.id, "stop", change.before, 0, reason)
            return
        self.cluster.settle(row)
        note.queue_s += table.now - note.since_s
        note.since_s = table.now
        first = note.start_s is None
        if first:
            note.start_s = table.now
        note.phase = JobPhase.RUNNING
        moves = self.cluster.take(change)
        pause = self.setting.overhead.pause(
            before=change.before,
            after=change.after,
            first=first,
            cluster=self.devices,
            round_number=self.rounds,
            kept=note.speed_last / (self.cluster.speed_of(row) or 1.0),
            rest=float(table.column("resume")[row]) - table.now,
        )
        self._go(row, pause)
        if change.before:
            note.rescales += 1
            recorder.rescales += 1
        recorder.decide(note.spec.id, "resize" if change.before else "launch", change.before, change.after, reason)
        for other, old, _ in moves:
            self._moved(other, old, note.spec.id)

    def _go(self, row: int, pause: float) -> None:
        """Let the job in this row run on what it holds, after a pause."""
        table, recorder = self.table, self.recorder
        key = table.keys[row]
        stretch = self.stretch[key] = self.stretch[key] + 1
        speed = self.cluster.speed_of(row)
        if speed <= 0:
            raise SimulationError(f"{self.policy.name} gave {table.specs[row].id} devices on which it can not run")
        speed *= self.setting.noise.speed_factor(self.setting.seed, table.specs[row].id, stretch)
        resume = table.now + pause
        c, at = table.raw, table.at(row)
        c["speed"][at], c["resume"][at] = speed, resume
        recorder.used += int(c["held"][at])
        recorder.running += 1
        recorder.waiting -= 1
        recorder.efficiency += self._efficiency(row)
        left = max(self.work[key] - float(c["done_0"][at]), 0.0)
        heapq.heappush(self.finishes, (resume + left / speed, key, stretch))

    def _moved(self, key: int, old: tuple[Spot, ...], who: str) -> None:
        """Another job was moved aside: it pays for that and may run at another speed."""
        row = self.cluster.row(key)
        note = self.notes[key]
        self.cluster.settle(row)
        held = int(self.table.column("held")[row])
        self.recorder.used -= held
        self.recorder.running -= 1
        self.recorder.waiting += 1
        self.recorder.efficiency -= self._efficiency(row)
        note.device_s += held * (self.table.now - note.since_s)
        self._span(row, held, note.since_s, old)
        note.since_s = self.table.now
        pause = self.setting.overhead.pause(
            before=held, after=held, first=False, cluster=self.devices, round_number=self.rounds
        )
        self._go(row, pause)
        note.rescales += 1
        self.recorder.rescales += 1
        self.recorder.decide(note.spec.id, "move", held, held, f"moves aside for {who}")

    def _charge_everyone(self, changed: set[int]) -> None:
        """Let this round cost the jobs that keep their devices as much as a change."""
        table, model = self.table, self.setting.overhead
        for row, held in enumerate(table.held.tolist()):
            if not held or row in changed:
                continue
            key = table.keys[row]
            self.cluster.settle(row)
            pause = model.pause(
                before=held,
                after=held,
                first=False,
                cluster=self.devices,
                round_number=self.rounds,
            )
            resume = max(float(table.column("resume")[row]), table.now + pause)
            table.column("resume")[row] = resume
            left = max(self.work[key] - float(table.column("done_0")[row]), 0.0)
            stretch = self.stretch[key] = self.stretch[key] + 1
            heapq.heappush(self.finishes, (resume + left / float(table.column("speed")[row]), key, stretch))

    def _efficiency(self, row: int) -> float:
        """Speed now over speed on one device of the same type; devices held where one is not enough."""
        table = self.table
        c, at = table.raw, table.at(row)
        one = table.curves[row].speed(table.types[int(c["kind"][at])], 1)
        return float(c["speed"][at]) / one if one > 0 else float(c["held"][at])

    def _span(self, row: int, held: int, since: float, spots: tuple[Spot, ...]) -> None:
        if self.recorder.record.spans and self.table.now > since:
            nodes = self.setting.cluster.nodes
            kinds = "+".join(self.table.types[kind] for kind, _ in self.cluster.workers_of(row))
            self.recorder.spans.append(
                Span(
                    job_id=self.table.specs[row].id,
                    start_s=since,
                    end_s=self.table.now,
                    workers=held,
                    device_type=kinds,
                    nodes=tuple((nodes[node].id, count) for node, count in spots),
                )
            )

    # -- faults ----------------------------------------------------------------------------------------------

    def _fault(self, fault: Fault) -> None:
        match fault:
            case NodeLost(node=name):
                self._lose(self._node(name))
            case NodeReturned(node=name):
                self._regain(self._node(name))
            case JobCrashed(job_id=job_id):
                self._cut(job_id, JobPhase.FAILED, "it crashed")
            case JobCancelled(job_id=job_id):
                self._cut(job_id, JobPhase.CANCELLED, "its user cancelled it")

    def _node(self, name: str) -> int:
        for index, node in enumerate(self.setting.cluster.nodes):
            if node.id == name:
                return index
        raise SimulationError(f"no node named {name!r} in the cluster")

    def _lose(self, node: int) -> None:
        if node in self.cluster.down:
            return
        if self.cluster.placer is None:
            raise SimulationError("node faults need placement best-fit or buddy, not count")
        for key in sorted(self.cluster.placer.on_node[node]):
            row = self.cluster.row(key)
            before = int(self.table.column("held")[row])
            speed = float(self.table.column("speed")[row])
            self._leave(row)
            self.cluster.forget(row, speed * self.setting.noise.lost_s)
            self.notes[key].preemptions += 1
            self.notes[key].phase = JobPhase.WAITING
            reason = f"node {self.setting.cluster.nodes[node].id} was lost"
            self.recorder.decide(self.notes[key].spec.id, "stop", before, 0, reason)
        self.cluster.lose(node)
        self.recorder.devices -= self.setting.cluster.nodes[node].slots

    def _regain(self, node: int) -> None:
        if node in self.cluster.down:
            self.cluster.regain(node)
            self.recorder.devices += self.setting.cluster.nodes[node].slots

    def _cut(self, job_id: str, phase: JobPhase, reason: str) -> None:
        for row, spec in enumerate(self.table.specs):
            if spec.id == job_id:
                if self.table.column("held")[row]:
                    self._leave(row)
                self._end(self.table.keys[row], row, phase, reason)
                return

    def _close(self) -> None:
        """Whoever is left has no way to go on: say since when it waits."""
        for row, key in enumerate(self.table.keys):
            note = self.notes[key]
            if note.phase is JobPhase.WAITING:
                note.queue_s += self.table.now - note.since_s
                note.reason = self.policy.explain(self.table, row, 0, 0)
