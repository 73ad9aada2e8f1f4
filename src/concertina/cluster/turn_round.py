"""The part of a turn that asks the policy: measure what is unknown, admit, share out, grant. Pure."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from concertina.cluster import profiling
from concertina.cluster.asks import pinned_to
from concertina.cluster.curves import NOTABLE, merged
from concertina.cluster.grants import Holding, Nodes, grant
from concertina.cluster.hold import Seat, held_until, steady
from concertina.cluster.records import Curve, JobState, NodeState
from concertina.cluster.settle import change, known_work
from concertina.cluster.slots import counted, listed, node_of, usable
from concertina.cluster.turn_books import Books
from concertina.cluster.views import (
    Live,
    Notes,
    at_cost,
    curves_of,
    moment,
    readable,
    snapshot_of,
    spec_of,
    start_seconds,
    total_slots,
)
from concertina.core.errors import ConcertinaError
from concertina.core.job import JobPhase, JobSpec, Reserved
from concertina.core.plan import Admitted, Plan
from concertina.policies.base import Policy
from concertina.policies.round import GANGS, run_round

MEASURED_FIRST = "it is measured before it is admitted"


class PolicyRound:
    """One round. `hold` does it all; afterwards the policy's notes are here."""

    def __init__(self, books: Books, policy: Policy) -> None:
        self.start_s = start_seconds(books.cluster.starts)
        self.books, self.policy = books, at_cost(policy, self.start_s)
        before = books.before
        self.notes: Mapping[str, tuple[int, float]] = before.notes
        self.reserved: Mapping[str, Reserved] = before.reserved
        self.specs: dict[str, tuple[JobState, JobSpec]] = {}
        self.slots = total_slots(books.nodes)
        self.gang = policy.admission in GANGS
        self.most = largest_share(books.nodes)
        self.admissions = self.promises = 0

    def hold(self) -> float | None:
        """When the policy wants to be asked again."""
        books = self.books
        self._refuse_giants()
        self._measure()
        ready = self._ready()
        books.dirty = False
        plan = self._plan(ready)
        if plan is None:
            return None
        self.notes = plan.notes
        self.reserved = self.reserved if plan.reserved is None else plan.reserved
        self._admit(plan)
        targets: dict[str, Nodes] = {job: nodes for job, nodes in plan.placement.nodes.items() if nodes}
        reasons = {action.job_id: readable(action.reason) for action in plan.actions}
        wake_s = self._hold_the_new(ready, targets, reasons, plan.wake_s)
        self._borrow([job for job in ready if job.state.profiling], targets, reasons)
        self._grant(targets, reasons)
        return wake_s

    def _hold_the_new(
        self, ready: list[Live], targets: dict[str, Nodes], reasons: dict[str, str], wake_s: float | None
    ) -> float | None:
        """Nobody is stopped for a job without a promise right after it was started. When to ask again."""
        states, start_s = self.books.states, self.start_s
        seats = [_seat(job, states[job.id], start_s) for job in ready if job.id in targets or job.state.slots]
        found = steady(targets, seats, usable(self.books.nodes), self.books.now)
        if not found.stay:
            return wake_s
        targets.clear()
        targets.update(found.targets)
        for job_id, until in found.stay.items():
            reasons[job_id] = f"it was started only just now: it keeps its slots until {moment(until)} at least"
            wake_s = until if wake_s is None else min(wake_s, until)
        for job_id, other in found.wait.items():
            reasons[job_id] = f"{other} was started only just now and keeps its slots for a while"
        return wake_s

    # -- jobs that nobody knows yet ----------------------------------------------------------------------------------

    def _refuse_giants(self) -> None:
        """Jobs that could not even be measured here."""
        for job in self.books.submitted() if self.books.nodes else ():
            if job.request.min_workers > self.most:
                needs = f"it needs at least {job.request.min_workers} workers"
                most = f"with {counted(self.slots)} a job gets {self.most} at most"
                self.books.refuse(job.state, f"{needs}; {most}")

    def _measure(self) -> None:
        """Who is measured, and whose measuring is over."""
        books = self.books
        submitted = books.submitted()
        chosen = profiling.measurers(submitted, books.curves)
        for job in submitted:
            state = job.state
            if state.curve in books.curves:
                if state.profiling or state.work is None:
                    books.keep(replace(state, profiling=False, work=self._work(job)))
            elif chosen[state.curve] == job.id:
                state = profiling.begun(job, books.now).state
                books.keep(state if state.profiling else replace(state, profiling=True, reason=MEASURED_FIRST))
            else:
                why = f"it waits until {chosen[state.curve]} has shown how fast this kind of job is"
                books.keep(replace(state, profiling=False, reason=why))
        for job in [job for job in books.submitted() if job.state.profiling and job.state.slots]:
            if profiling.walk(job, self._idle(job), books.now).over:
                self._measured(job)

    def _work(self, job: Live) -> float | None:
        known = self.books.curves.get(job.state.curve)
        total = (job.seen.total_steps if job.seen else 0) or (known.total_steps if known else 0)
        return known_work(job.request.steps, total)

    def _measured(self, job: Live) -> None:
        assert job.seen is not None
        why = "measured before it was admitted"
        seen = job.seen
        known = merged(None, job.state.curve, seen.speeds, seen.total_steps, why, seen.device_type)
        if known is not None:
            self.books.learn(known)
            self.books.keep(replace(job.state, profiling=False, work=self._work(job)))
            for twin in [t for t in self.books.submitted() if t.state.curve == known.key and t.state.work is None]:
                self.books.keep(replace(twin.state, work=self._work(twin)))  # it waited for just this
            self.books.tell("measured", job.id, _speeds(known))

    def _idle(self, job: Live) -> int:
        """Slots of its type of device that nobody has, and what measured jobs have borrowed of these."""
        books, types = self.books, self._types_of(job.state.slots)
        there = {node.id for node in books.nodes if node.device_type in types}
        free = [slot for slot in set(usable(books.nodes)) - books.busy() if node_of(slot) in there]
        measured = [other for other in books.submitted() if other.state.profiling]
        beside = [other for other in measured if self._types_of(other.state.slots) & types]
        return len(free) + sum(max(len(other.state.slots) - other.fewest, 0) for other in beside)

    def _types_of(self, slots: Iterable[str]) -> set[str]:
        nodes = {node_of(slot) for slot in slots}
        return {node.device_type for node in self.books.nodes if node.id in nodes}

    def _borrow(self, probes: list[Live], targets: dict[str, Nodes], reasons: dict[str, str]) -> None:
        """Let measured jobs grow over slots that the plan leaves idle."""
        type_of = {node.id: node.device_type for node in self.books.nodes}
        room: dict[str, int] = {}
        for slot in usable(self.books.nodes):
            room[node_of(slot)] = room.get(node_of(slot), 0) + 1
        for nodes in targets.values():
            for node, count in nodes:
                room[node] -= count
        for job in probes:
            if job.id not in targets or not job.state.slots:
                reasons[job.id] = MEASURED_FIRST
                continue
            wanted = dict(targets[job.id])
            types = {type_of[node] for node in wanted}  # a speed on two types at once says nothing about either
            alike = [node for node in room if type_of[node] in types]
            step = profiling.walk(job, sum(room[node] for node in alike), self.books.now)
            for node in sorted(alike, key=lambda name: (name not in wanted, -room[name], name)):
                more = max(min(step.workers - sum(wanted.values()), room[node]), 0)
                if more:
                    wanted[node], room[node] = wanted.get(node, 0) + more, room[node] - more
            targets[job.id] = tuple(sorted(wanted.items()))
            reasons[job.id] = step.reason or job.state.reason
            got = sum(wanted.values())
            if got < len(job.state.slots):
                reasons[job.id] = f"others want slots that were idle; it is measured on {counted(got, 'worker')}"

    # -- the policy --------------------------------------------------------------------------------------------------

    def _ready(self) -> list[Live]:
        """Jobs that the policy is shown."""
        books, facts, shown = self.books, self.books.facts, []
        for job in books.jobs():
            state = job.state
            new = state.phase is JobPhase.SUBMITTED and not state.profiling
            if new and (state.curve not in books.curves or self.admissions >= facts.admit_most):
                continue
            if new and job.strict and self.promises >= facts.promise_most:
                continue
            if why := self._specified(job) or (profiling.refusal(job) if new else ""):
                books.refuse(state, why)
                continue
            self.admissions += new
            self.promises += new and job.strict
            shown.append(job)
        return shown

    def _specified(self, job: Live) -> str:
        """Notes the job's specification; why there is none."""
        state = job.state
        known = self.books.before.specs.get(job.id)
        if known is not None and known[0] is state and state.work is not None:
            self.specs[job.id] = known
            return ""
        try:
            self.specs[job.id] = state, spec_of(job, self.books.curves, self.slots, gang=self.gang)
        except ConcertinaError as error:
            return str(error)
        return ""

    def _plan(self, ready: list[Live]) -> Plan | None:
        books = self.books
        specs = {job_id: spec for job_id, (_, spec) in self.specs.items()}
        try:
            notes = Notes(levels=self.notes, reserved=self.reserved)
            snapshot = snapshot_of(ready, specs, books.nodes, notes, books.now, self.start_s)
            if snapshot is None:
                return None
            plan = run_round(snapshot, self.policy, curves_of(ready, books.curves, self.slots))
        except Exception as error:  # whatever a policy does, the jobs go on with what they have
            told = f"{type(error).__name__}: {error}"
            books.tell("round failed", reason=told)
            books.cluster = replace(books.cluster, error=told)
            return None
        if books.cluster.error:
            books.cluster = replace(books.cluster, error="")
        return plan

    def _admit(self, plan: Plan) -> None:
        books = self.books
        for answer in plan.answers:
            state = books.states[answer.job_id]
            reason = readable(answer.reason)
            if isinstance(answer, Admitted):
                phase = JobPhase.RUNNING if state.slots else JobPhase.WAITING  # measured on its slots, it trains on
                state = change(state, books.now, reason, phase=phase)
                books.keep(replace(state, promised_s=answer.promised_s, admitted_s=books.now))
            else:
                state = change(state, books.now, reason, phase=JobPhase.REJECTED)
                books.keep(replace(state, earliest_s=answer.earliest_s))
        states = books.states.values()  # not all may have been looked at
        books.dirty = any(s.phase is JobPhase.SUBMITTED and s.curve in books.curves for s in states)

    def _grant(self, targets: dict[str, Nodes], reasons: dict[str, str]) -> None:
        books, requests = self.books, self.books.facts.requests
        concerned = [job for job, s in books.states.items() if job in targets or s.slots or s.attempt]
        holdings = {}
        for job_id in sorted(concerned, key=lambda job: (requests[job].submitted_s, job)):
            state, used = books.states[job_id], books.occupied(job_id)
            if job_id in targets or state.slots or used:
                fewest = 1 if state.phase.is_end else books.live(job_id).fewest
                holdings[job_id] = Holding(granted=state.slots, occupied=used, fewest=fewest)
        for job_id, slots in grant(targets, holdings, usable(books.nodes)).items():
            state = books.states[job_id]
            if state.phase.is_end:
                continue
            if slots != state.slots:
                reason = reasons.get(job_id) or self._usual(state, slots)
                if state.pinned and len(slots) == state.pinned != len(state.slots):
                    reason = pinned_to(state.pinned)
                books.give(job_id, slots, reason + self._slowness(state) * (len(slots) > len(state.slots)))
            elif not slots and job_id in targets:
                told = f"{reasons.get(job_id, state.reason)}; its slots are on their way{self._from(job_id)}"
                books.note(replace(state, reason=told))

    def _slowness(self, state: JobState) -> str:
        """That a job gets more because it proved slower than its kind, for its reason."""
        count, kind = len(state.slots), self.books.curves.get(state.curve)
        own, usual = state.speeds.get(count), kind.on(state.speeds_type).get(count) if kind else None
        if state.promised_s is None or not own or not usual or own > (1 - NOTABLE) * usual:
            return ""
        return f"; it makes {own:.3g} steps/s on {count} where {usual:.3g} were expected"

    def _usual(self, state: JobState, slots: tuple[str, ...]) -> str:
        return state.reason if slots else "the policy has no slots for it now"

    def _from(self, job_id: str) -> str:
        others = [other for other, s in self.books.states.items() if s.releasing and other != job_id]
        return f" from {listed(others)}" if others else ""


def _seat(job: Live, state: JobState, start_s: float) -> Seat:
    new = state.phase is not JobPhase.SUBMITTED and bool(state.slots)
    return Seat(
        id=job.id,
        slots=state.slots,
        fewest=job.fewest,
        promised=state.promised_s is not None or state.profiling,
        held_s=held_until(state.started_s, start_s) if new else None,
    )


def largest_share(nodes: Sequence[NodeState]) -> int:
    """The most slots that a job can ever be given: all of the type of device of which there are most."""
    kinds = {node.device_type for node in nodes}
    return max((sum(n.slots for n in nodes if n.device_type == kind) for kind in kinds), default=0)


def _speeds(curve: Curve) -> str:
    return ", ".join(f"{speed:.3g} steps/s on {count}" for count, speed in curve.speeds.items())
