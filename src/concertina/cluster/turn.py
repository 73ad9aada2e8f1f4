"""One turn of the controller: from what is so and what was decided to what is decided now. Pure.

asks -> progress -> ends -> evictions -> measuring -> a round of the policy -> grants -> keepers. A turn repeated on
a cluster where nothing happened decides nothing.
"""

from dataclasses import replace

from concertina.cluster import asks, settle
from concertina.cluster.curves import adopted, corrected, merged, points
from concertina.cluster.evict import evict
from concertina.cluster.records import JobRequest, JobState
from concertina.cluster.settle import Need
from concertina.cluster.slots import usable
from concertina.cluster.turn_books import Books, nodes_now
from concertina.cluster.turn_round import PolicyRound, largest_share
from concertina.cluster.turn_types import Decision, Facts, Memory
from concertina.cluster.views import Live
from concertina.policies.base import Policy

ROUND_SECONDS = 10.0  # a round comes so often even if nothing happens
AGAIN_SECONDS = 2.0  # after one that could not decide


def decide(memory: Memory, facts: Facts, policy: Policy) -> Decision:
    books = Books(memory, facts)
    _take_in(books)
    _answer(books)
    _settle(books)
    _evict(books)
    free = frozenset(usable(books.nodes)) - books.busy()
    held: PolicyRound | None = None
    wake_s = memory.wake_s
    if books.cluster.going_down:
        _suspend_all(books)
    elif _round_is_due(books, free):
        held = PolicyRound(books, policy)
        wake_s = held.hold()
    start, end = _keepers(books)
    return _decision(books, free, start, end, held, wake_s)


def _take_in(books: Books) -> None:
    for request in books.facts.fresh:
        kind = books.facts.kinds.get(request.id, "")
        books.keep(
            JobState(
                id=request.id,
                curve=kind,
                reason="it was not looked at yet",
                waiting_since_s=request.submitted_s,
            )
        )
        if why := _senseless(request, kind):
            books.refuse(books.states[request.id], why)


def _senseless(request: JobRequest, kind: str) -> str:
    """Why a request can not be carried out by any cluster; empty if it can."""
    if not kind:
        return f"its script {request.script} can not be read on this machine"
    if request.min_workers > request.most:
        return f"it asks for at least {request.min_workers} workers and for at most {request.most}"
    return ""


def _answer(books: Books) -> None:
    for ask in books.facts.asks:
        standing = asks.Standing(
            now=books.now,
            cluster=books.cluster,
            nodes=books.nodes,
            requests=books.facts.requests,
            states=books.states,
            ended=books.facts.ended,
            users=books.facts.users,
            holders=tuple(books.holders()),
            busy=books.busy(),
            largest=largest_share(books.nodes),
        )
        outcome = asks.answer(ask, standing)
        books.replies.append(outcome.reply)
        books.tell(f"asked to {ask.op.value}", ask.target, outcome.reply.reason)
        if outcome.state is not None:
            books.keep(outcome.state)
        if outcome.cluster is not None:
            books.cluster, books.dirty = outcome.cluster, True
            books.nodes = nodes_now(books.facts.nodes, books.cluster)


def _settle(books: Books) -> None:
    for job_id, state in list(books.states.items()):
        if not state.attempt:
            continue
        job = books.live(job_id)
        after = settle.settled(job, books.now, gone=job_id in books.facts.gone)
        if after.trains_s and not state.trains_s:
            books.started(after.trains_s - after.started_s)
        job = replace(job, state=after)
        if (after.slots, after.phase, after.releasing) != (state.slots, state.phase, state.releasing):
            books.keep(after)
            _learn(books, job)
        elif after is not state:
            books.note(after)
        if not after.phase.is_end:
            _correct(books, job)


def _learn(books: Books, job: Live) -> None:
    """Keep what a job has shown about its kind, when something about it changes."""
    if job.seen is None or not job.seen.speeds or not job.state.curve or job.state.profiling:
        return
    old = books.curves.get(job.state.curve)
    seen, why = job.seen, "measured while it ran"
    known = merged(old, job.state.curve, seen.speeds, seen.total_steps, why, seen.device_type)
    if known is not None:
        books.learn(known)


def _correct(books: Books, job: Live) -> None:
    """A job that is notably faster or slower than believed: believe what is seen, and decide anew."""
    state, seen, kind = job.state, job.seen, books.curves.get(job.state.curve)
    if seen is None or state.profiling or kind is None or seen.attempt != state.attempt:
        return
    usual, own = kind.on(seen.device_type), state.speeds
    if seen.speeds and state.speeds_type != seen.device_type:
        own = {}  # it was seen on another type of device
    top = max((*seen.speeds, *usual), default=1)
    believed = points(corrected(usual, own), top)
    speeds = adopted(believed, own, seen.speeds)
    if speeds == state.speeds:
        return
    books.keep(replace(state, speeds=speeds, speeds_type=seen.device_type))
    count = len(state.slots)
    if count in speeds and count in believed:
        told = f"it makes {speeds[count]:.3g} steps/s on {count} where {believed[count]:.3g} were expected"
        books.tell("corrected", job.id, told)


def _evict(books: Books) -> None:
    nodes = {node.id: node for node in books.nodes}
    for eviction in evict(books.holders(weighed=False), nodes):
        books.give(eviction.job, eviction.slots, eviction.reason, settle.HURRIED_SECONDS)
    lent = set(books.cluster.lent)
    for state in list(books.states.values()) if lent else ():
        if state.vacate_s > settle.HURRIED_SECONDS and lent & {*state.releasing}:
            books.note(replace(state, vacate_s=settle.HURRIED_SECONDS))


def _suspend_all(books: Books) -> None:
    for job in books.jobs():
        if job.state.slots:
            books.give(job.id, (), "the cluster goes down; its state is kept")


def _round_is_due(books: Books, free: frozenset[str]) -> bool:
    before = books.before
    since = books.now - before.round_s
    late = not 0 <= since < (AGAIN_SECONDS if books.cluster.error else ROUND_SECONDS)  # or the clock was set back
    woken = before.wake_s is not None and books.now >= before.wake_s
    there = frozenset(usable(books.nodes))
    measured = any(state.profiling and state.slots for state in books.states.values())
    return books.dirty or late or woken or there != before.usable or free != before.free or measured


def _keepers(books: Books) -> tuple[list[str], list[str]]:
    """Jobs whose keeper is to be started, and those whose keeper is to be ended."""
    start: list[str] = []
    end: list[str] = []
    for job_id, state in list(books.states.items()):
        if not state.attempt and not state.slots:
            continue
        gone, registered = job_id in books.facts.gone, job_id in books.facts.registered
        missing_s = books.facts.missing_s.get(job_id, 0.0)
        todo = settle.need(books.live(job_id), books.now, gone=gone, registered=registered, missing_s=missing_s)
        if todo in (Need.START, Need.RESTART):
            books.note(_started_again(books, job_id, todo))
            start.append(job_id)
            books.tell(f"keeper {todo.value}", job_id, books.states[job_id].reason)
        elif todo is Need.FAIL:
            books.keep(settle.given_up(books.live(job_id), books.now))
        elif todo is Need.END:
            end.append(job_id)
            books.tell("keeper end", job_id, "it does not end by itself")
    return start, end


def _started_again(books: Books, job_id: str, todo: Need) -> JobState:
    state, why = books.states[job_id], books.facts.not_started.get(job_id)
    if todo is Need.START:
        return settle.restarted(state, books.now)
    if why is not None:
        return settle.not_started(state, books.now, why)
    return settle.vanished(books.live(job_id), books.now)


def _decision(
    books: Books,
    free: frozenset[str],
    start: list[str],
    end: list[str],
    held: PolicyRound | None,
    wake_s: float | None,
) -> Decision:
    before = books.before
    at_rest = {job for job, state in books.states.items() if state.phase.is_end and not books.occupied(job)}
    changed = {job: state for job, state in books.states.items() if before.live.get(job) is not state}
    memory = Memory(
        cluster=books.cluster,
        live={job: state for job, state in books.states.items() if job not in at_rest},
        notes=held.notes if held else before.notes,
        reserved=held.reserved if held else before.reserved,
        specs=held.specs if held else before.specs,
        usable=frozenset(usable(books.nodes)) if held else before.usable,
        free=free if held else before.free,
        dirty=books.dirty,
        round_s=books.now if held else before.round_s,
        wake_s=wake_s,
    )
    return Decision(
        memory=memory,
        states=changed,
        at_rest=tuple(at_rest),
        nodes=books.nodes,
        curves=tuple(books.stored.values()),
        replies=tuple(books.replies),
        start=tuple(start),
        end=tuple(end),
        lines=tuple(books.lines),
        round=held is not None,
        admissions=held.admissions if held else 0,
        promises=held.promises if held else 0,
    )
