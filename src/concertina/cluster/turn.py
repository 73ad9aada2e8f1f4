"""One turn of the controller: from what is so and what was decided to what is decided now. Pure.

asks -> progress -> ends -> evictions -> measuring -> a round of the policy -> grants -> keepers. A turn repeated on
a cluster where nothing happened decides nothing.
"""

from collections.abc import Callable
from dataclasses import replace

from concertina.cluster import asks, profiling, settle
from concertina.cluster.curves import adopted, corrected, merged, points
from concertina.cluster.evict import Holder, evict
from concertina.cluster.grants import Holding, Nodes, grant
from concertina.cluster.records import ClusterState, Curve, JobRequest, JobState, NodePhase, NodeState, Reply
from concertina.cluster.settle import Need, change
from concertina.cluster.slots import index_of, listed, node_of, occupied, usable
from concertina.cluster.turn_types import Decision, Facts, Line, Memory
from concertina.cluster.views import Live, curves_of, readable, snapshot_of, spec_of
from concertina.core.errors import ConcertinaError
from concertina.core.job import JobPhase
from concertina.core.plan import Admitted, Plan
from concertina.policies.base import Policy
from concertina.policies.round import run_round

ROUND_SECONDS = 10.0  # a round comes so often even if nothing happens
AGAIN_SECONDS = 2.0  # after one that could not decide


def decide(memory: Memory, facts: Facts, policy: Policy) -> Decision:
    return Turn(memory, facts, policy).take()


class Turn:
    """The books of one turn. Thrown away at its end."""

    def __init__(self, memory: Memory, facts: Facts, policy: Policy) -> None:
        self.before, self.facts, self.policy, self.now = memory, facts, policy, facts.now
        self.cluster = memory.cluster
        self.states: dict[str, JobState] = dict(memory.live)
        self.curves: dict[str, Curve] = dict(facts.curves)
        self.nodes = nodes_now(facts.nodes, memory.cluster)
        self.dirty = memory.dirty
        self.stored: dict[str, Curve] = {}
        self.lines: list[Line] = []
        self.replies: list[Reply] = []

    def take(self) -> Decision:
        self._take_in()
        self._answer()
        self._settle()
        self._evict()
        asked, wake_s = False, self.before.wake_s
        free = frozenset(usable(self.nodes)) - self._busy()
        if self.cluster.going_down:
            self._suspend_all()
        elif self._round_is_due(free):
            asked, wake_s = True, self._round()
        start, end = self._keepers()
        return self._decision(free, start, end, asked=asked, wake_s=wake_s)

    # -- jobs --------------------------------------------------------------------------------------------------------

    def live(self, job_id: str) -> Live:
        return Live(request=self.facts.requests[job_id], state=self.states[job_id], seen=self.facts.seen.get(job_id))

    def jobs(self) -> list[Live]:
        """Those that have not ended, in order of submission."""
        found = [self.live(job_id) for job_id, state in self.states.items() if not state.phase.is_end]
        return sorted(found, key=lambda job: (job.request.submitted_s, job.id))

    def keep(self, state: JobState) -> None:
        """Another state of a job, for whatever reason but progress: a round is due."""
        old = self.states.get(state.id)
        if state == old:
            return
        self.states[state.id] = state
        self.dirty = True
        if old is None or (old.slots, old.phase) != (state.slots, state.phase):
            self.lines.append(
                Line(event=state.phase.value, job=state.id, reason=state.reason, workers=len(state.slots))
            )

    def _busy(self) -> frozenset[str]:
        """Slots that are granted or may have a process."""
        found: set[str] = set()
        for job_id, state in self.states.items():
            found |= {*state.slots, *self._occupied(job_id)}
        return frozenset(found)

    def _occupied(self, job_id: str) -> frozenset[str]:
        state = self.states[job_id]
        if not state.attempt:
            return frozenset()
        return occupied(state, self.facts.seen.get(job_id), gone=job_id in self.facts.gone)

    def _holders(self) -> list[Holder]:
        return [
            Holder(
                id=job.id,
                slots=job.state.slots,
                fewest=job.fewest,
                promised=job.state.promised_s is not None,
                loss_s=_unsaved_s(job),
            )
            for job in self.jobs()
            if job.state.slots
        ]

    # -- the steps of a turn -----------------------------------------------------------------------------------------

    def _take_in(self) -> None:
        for request in self.facts.fresh:
            kind = self.facts.kinds.get(request.id, "")
            state = JobState(
                id=request.id,
                curve=kind,
                reason="it was not looked at yet",
                waiting_since_s=request.submitted_s,
            )
            self.keep(state)
            if why := _senseless(request, kind):
                self.keep(change(state, self.now, why, phase=JobPhase.REJECTED))

    def _answer(self) -> None:
        for ask in self.facts.asks:
            standing = asks.Standing(
                now=self.now,
                cluster=self.cluster,
                nodes=self.nodes,
                requests=self.facts.requests,
                states=self.states,
                ended=self.facts.ended,
                users=self.facts.users,
                holders=tuple(self._holders()),
                busy=self._busy(),
            )
            outcome = asks.answer(ask, standing)
            self.replies.append(outcome.reply)
            self.lines.append(Line(event=f"asked to {ask.op.value}", job=ask.target, reason=outcome.reply.reason))
            if outcome.state is not None:
                self.keep(outcome.state)
            if outcome.cluster is not None:
                self.cluster, self.dirty = outcome.cluster, True
                self.nodes = nodes_now(self.facts.nodes, self.cluster)

    def _settle(self) -> None:
        for job_id, state in list(self.states.items()):
            if not state.attempt:
                continue
            job = self.live(job_id)
            after = settle.settled(job, self.now, gone=job_id in self.facts.gone)
            if (after.slots, after.phase, after.releasing) != (state.slots, state.phase, state.releasing):
                self.keep(after)
                self._learn(replace(job, state=after))
            else:
                self.states[job_id] = after
            if not after.phase.is_end:
                self._correct(replace(job, state=after))

    def _learn(self, job: Live) -> None:
        """Keep what a job has shown about its kind, when something about it changes."""
        if job.seen is None or not job.seen.speeds or not job.state.curve or job.state.profiling:
            return
        old = self.curves.get(job.state.curve)
        known = merged(old, job.state.curve, job.seen.speeds, job.seen.total_steps, "measured while it ran")
        if known is not None:
            self.curves[known.key] = self.stored[known.key] = known

    def _correct(self, job: Live) -> None:
        """A job that is notably faster or slower than believed: believe what is seen, and decide anew."""
        state, seen, kind = job.state, job.seen, self.curves.get(job.state.curve)
        if seen is None or state.profiling or kind is None or seen.attempt != state.attempt:
            return
        top = max((*seen.speeds, *kind.speeds), default=1)
        believed = points(corrected(kind.speeds, state.speeds), top)
        speeds = adopted(believed, state.speeds, seen.speeds)
        if speeds == state.speeds:
            return
        count = len(state.slots)
        self.keep(replace(state, speeds=speeds))
        if count in speeds and count in believed:
            told = f"it makes {speeds[count]:.3g} steps/s on {count} where {believed[count]:.3g} were expected"
            self.lines.append(Line(event="corrected", job=job.id, reason=told))

    def _evict(self) -> None:
        nodes = {node.id: node for node in self.nodes}
        for eviction in evict(self._holders(), nodes):
            self._give(eviction.job, eviction.slots, eviction.reason, settle.HURRIED_SECONDS)
        lent = set(self.cluster.lent)
        for job_id, state in self.states.items():
            if state.vacate_s > settle.HURRIED_SECONDS and lent & {*state.releasing}:
                self.states[job_id] = replace(state, vacate_s=settle.HURRIED_SECONDS)

    def _give(self, job_id: str, slots: tuple[str, ...], reason: str, vacate_s: float = settle.PATIENT_SECONDS) -> None:
        """Let a job have exactly these slots."""
        state = self.states[job_id]
        phase = JobPhase.RUNNING if slots else JobPhase.WAITING
        if state.phase is JobPhase.SUBMITTED:  # it is measured, and admitted later
            phase = JobPhase.SUBMITTED
        self.keep(change(state, self.now, reason, slots=slots, phase=phase, vacate_s=vacate_s))

    def _suspend_all(self) -> None:
        for job in self.jobs():
            if job.state.slots:
                self._give(job.id, (), "the cluster goes down; its state is kept")

    # -- the policy --------------------------------------------------------------------------------------------------

    def _round_is_due(self, free: frozenset[str]) -> bool:
        before = self.before
        late = self.now - before.round_s >= (AGAIN_SECONDS if self.cluster.error else ROUND_SECONDS)
        woken = before.wake_s is not None and self.now >= before.wake_s
        there = frozenset(usable(self.nodes))
        measured = any(state.profiling and state.slots for state in self.states.values())
        return self.dirty or late or woken or there != before.usable or free != before.free or measured

    def _round(self) -> float | None:
        """Ask the policy, and grant what can be granted now. When it wants to be asked again."""
        self._measure()
        ready, probes = self._ready()
        self.dirty = False
        plan = self._plan(ready)
        if plan is None:
            return None
        self._admit(plan, {job.id for job in ready})
        self._note(plan)
        targets: dict[str, Nodes] = {job: nodes for job, nodes in plan.placement.nodes.items() if nodes}
        reasons = {action.job_id: readable(action.reason) for action in plan.actions}
        self._borrow(probes, targets, reasons)
        self._grant(targets, reasons)
        return plan.wake_s

    def _measure(self) -> None:
        """Who is measured, and whose measuring is over."""
        chosen = profiling.measurers(self.jobs(), self.curves)
        for job in self.jobs():
            state = job.state
            if state.phase is not JobPhase.SUBMITTED or state.curve in self.curves:
                if state.profiling:
                    self.keep(replace(state, profiling=False, work=self._work(job)))
                elif state.phase is JobPhase.SUBMITTED and state.work is None:
                    self.keep(replace(state, work=self._work(job)))
            elif chosen[state.curve] == job.id:
                self.keep(profiling.begun(job, self.now).state)
                if not state.profiling:
                    self.keep(
                        replace(self.states[job.id], profiling=True, reason="it is measured before it is admitted")
                    )
            else:
                why = f"it waits until {chosen[state.curve]} has shown how fast this kind of job is"
                self.keep(replace(state, profiling=False, reason=why))
        for job in [job for job in self.jobs() if job.state.profiling and job.state.slots]:
            if profiling.walk(job, self._idle_slots(), self.now).over:
                self._measured(job)

    def _work(self, job: Live) -> float | None:
        known = self.curves.get(job.state.curve)
        total = (job.seen.total_steps if job.seen else 0) or (known.total_steps if known else 0)
        return settle.known_work(job.request.steps, total)

    def _measured(self, job: Live) -> None:
        assert job.seen is not None
        why = "measured before it was admitted"
        known = merged(None, job.state.curve, job.seen.speeds, job.seen.total_steps, why)
        if known is not None:
            self.curves[known.key] = self.stored[known.key] = known
            self.keep(replace(job.state, profiling=False, work=self._work(job)))
            self.lines.append(Line(event="measured", job=job.id, reason=_speeds(known)))

    def _idle_slots(self) -> int:
        """Slots that nobody has, and what a measured job has borrowed beyond its fewest."""
        borrowed = sum(
            max(len(job.state.slots) - job.fewest, 0) for job in self.jobs() if job.state.profiling and job.state.slots
        )
        return len(set(usable(self.nodes)) - self._busy()) + borrowed

    def _ready(self) -> tuple[list[Live], list[Live]]:
        """Jobs that the policy is shown, and those of them that are being measured."""
        shown: list[Live] = []
        admitted = 0
        slots = sum(node.slots for node in self.nodes)
        for job in self.jobs():
            state = job.state
            if state.phase is JobPhase.SUBMITTED and not state.profiling:
                if state.curve not in self.curves or admitted >= self.facts.admit_most:
                    continue
                if why := profiling.refusal(job) or self._invalid(job, slots):
                    self.keep(change(state, self.now, why, phase=JobPhase.REJECTED))
                    continue
                admitted += 1
            shown.append(job)
        return shown, [job for job in shown if job.state.profiling]

    def _invalid(self, job: Live, slots: int) -> str:
        try:
            spec_of(job, self.curves, slots)
        except ConcertinaError as error:
            return str(error)
        return ""

    def _plan(self, ready: list[Live]) -> Plan | None:
        try:
            snapshot = snapshot_of(ready, self.nodes, self.curves, self.now)
            if snapshot is None:
                return None
            curves = curves_of(ready, self.curves, snapshot.cluster.slots)
            plan = run_round(snapshot, self.policy, curves)
        except Exception as error:  # whatever a policy does, the jobs go on with what they have
            told = f"{type(error).__name__}: {error}"
            self.lines.append(Line(event="round failed", reason=told))
            self.cluster = replace(self.cluster, error=told)
            return None
        if self.cluster.error:
            self.cluster = replace(self.cluster, error="")
        return plan

    def _admit(self, plan: Plan, shown: set[str]) -> None:
        for answer in plan.answers:
            state = self.states[answer.job_id]
            reason = readable(answer.reason)
            if isinstance(answer, Admitted):
                state = change(state, self.now, reason, phase=JobPhase.WAITING)
                self.keep(replace(state, promised_s=answer.promised_s, admitted_s=self.now))
            else:
                state = change(state, self.now, reason, phase=JobPhase.REJECTED)
                self.keep(replace(state, earliest_s=answer.earliest_s))
        waiting = any(s.phase is JobPhase.SUBMITTED and s.curve in self.curves for s in self.states.values())
        self.dirty = waiting  # not all were looked at

    def _note(self, plan: Plan) -> None:
        """What the policy wants to find again. No reason for another round."""
        for job_id, (level, stamp) in plan.notes.items():
            state = self.states[job_id]
            reserved = state.reserved if plan.reserved is None else plan.reserved.get(job_id, ())
            if (state.level, state.stamp, state.reserved) != (level, stamp, reserved):
                self.states[job_id] = replace(state, level=level, stamp=stamp, reserved=reserved)

    def _borrow(self, probes: list[Live], targets: dict[str, Nodes], reasons: dict[str, str]) -> None:
        """Let measured jobs grow over slots that the plan leaves idle."""
        room: dict[str, int] = {}
        for slot in usable(self.nodes):
            room[node_of(slot)] = room.get(node_of(slot), 0) + 1
        for nodes in targets.values():
            for node, count in nodes:
                room[node] -= count
        for job in probes:
            if job.id not in targets or not job.state.slots:
                reasons[job.id] = "it is measured before it is admitted"
                continue
            step = profiling.walk(job, sum(room.values()), self.now)
            wanted = dict(targets[job.id])
            for node in sorted(room, key=lambda name: (name not in wanted, -room[name], name)):
                more = max(min(step.workers - sum(wanted.values()), room[node]), 0)
                if more:
                    wanted[node], room[node] = wanted.get(node, 0) + more, room[node] - more
            targets[job.id] = tuple(sorted(wanted.items()))
            reasons[job.id] = step.reason or job.state.reason

    def _grant(self, targets: dict[str, Nodes], reasons: dict[str, str]) -> None:
        holdings = {}
        for job_id in sorted(self.states, key=self._turn_of):
            state, used = self.states[job_id], self._occupied(job_id)
            if job_id in targets or state.slots or used:
                fewest = 1 if state.phase.is_end else self.live(job_id).fewest
                holdings[job_id] = Holding(granted=state.slots, occupied=used, fewest=fewest)
        for job_id, slots in grant(targets, holdings, usable(self.nodes)).items():
            state = self.states[job_id]
            if state.phase.is_end:
                continue
            if slots != state.slots:
                self._give(job_id, slots, reasons.get(job_id) or self._usual(state, slots))
            elif not slots and job_id in targets:
                self._say(state, f"{reasons.get(job_id, state.reason)}; its slots are on their way{self._from(job_id)}")

    def _turn_of(self, job_id: str) -> tuple[float, str]:
        return self.facts.requests[job_id].submitted_s, job_id

    def _usual(self, state: JobState, slots: tuple[str, ...]) -> str:
        return state.reason if slots else "the policy has no slots for it now"

    def _say(self, state: JobState, reason: str) -> None:
        """Another reason alone is no reason for a round."""
        if reason != state.reason:
            self.states[state.id] = replace(state, reason=reason)

    def _from(self, job_id: str) -> str:
        others = [other for other, s in self.states.items() if s.releasing and other != job_id]
        return f" from {listed(others)}" if others else ""

    # -- keepers -----------------------------------------------------------------------------------------------------

    def _keepers(self) -> tuple[list[str], list[str]]:
        start: list[str] = []
        end: list[str] = []
        for job_id, state in list(self.states.items()):
            if not state.attempt and not state.slots:
                continue
            todo = settle.need(
                self.live(job_id),
                self.now,
                gone=job_id in self.facts.gone,
                registered=job_id in self.facts.registered,
            )
            if todo in (Need.START, Need.RESTART):
                act: Callable[[JobState, float], JobState] = settle.restarted if todo is Need.START else settle.vanished
                self.states[job_id] = act(state, self.now)
                start.append(job_id)
                self.lines.append(Line(event="keeper " + todo.value, job=job_id, reason=self.states[job_id].reason))
            elif todo is Need.FAIL:
                self.keep(settle.given_up(state, self.now))
            elif todo is Need.END:
                end.append(job_id)
                self.lines.append(Line(event="keeper end", job=job_id, reason="it does not end by itself"))
        return start, end

    def _decision(
        self, free: frozenset[str], start: list[str], end: list[str], *, asked: bool, wake_s: float | None
    ) -> Decision:
        at_rest = [job_id for job_id, state in self.states.items() if state.phase.is_end and not self._occupied(job_id)]
        changed = [job_id for job_id, state in self.states.items() if self.before.live.get(job_id) != state]
        live = {job_id: state for job_id, state in self.states.items() if job_id not in set(at_rest)}
        memory = Memory(
            cluster=self.cluster,
            live=live,
            usable=frozenset(usable(self.nodes)) if asked else self.before.usable,
            free=free if asked else self.before.free,
            dirty=self.dirty,
            round_s=self.now if asked else self.before.round_s,
            wake_s=wake_s,
        )
        return Decision(
            memory=memory,
            changed=tuple(changed),
            states={job_id: self.states[job_id] for job_id in changed},
            at_rest=tuple(at_rest),
            nodes=self.nodes,
            curves=tuple(self.stored.values()),
            replies=tuple(self.replies),
            start=tuple(start),
            end=tuple(end),
            lines=tuple(self.lines),
            round=asked,
        )


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


def _unsaved_s(job: Live) -> float:
    """Work that would be lost without a checkpoint, in seconds; a suspended job writes one, so about nothing."""
    seen = job.seen
    if seen is None or not seen.speeds:
        return 0.0
    speed = seen.speeds.get(seen.workers) or max(seen.speeds.values())
    return max(seen.step - seen.checkpoint_step, 0) / max(speed, 1e-9)


def _senseless(request: JobRequest, kind: str) -> str:
    """Why a request can not be carried out by any cluster; empty if it can."""
    if not kind:
        return f"its script {request.script} can not be read on this machine"
    if request.min_workers > request.most:
        return f"it asks for at least {request.min_workers} workers and for at most {request.most}"
    return ""


def _speeds(curve: Curve) -> str:
    return ", ".join(f"{speed:.3g} steps/s on {count}" for count, speed in curve.speeds.items())
