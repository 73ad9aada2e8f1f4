"""What users ask of a running cluster: what becomes of it, and a sentence for the answer. Pure.

Everything here may be done twice without harm, except what changes the record `cluster`; that record says which asks
were done, in the same write.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from concertina.cluster.evict import Holder, lend, take_back
from concertina.cluster.records import Ask, ClusterState, JobRequest, JobState, NodeState, Op, Reply, User
from concertina.cluster.settle import change
from concertina.cluster.slots import all_slots, counted, listed, usable
from concertina.core.job import JobPhase

REMEMBERED = 256  # asks that were done, by id


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """What an ask is judged by."""

    now: float
    cluster: ClusterState
    nodes: tuple[NodeState, ...]
    requests: Mapping[str, JobRequest]
    states: Mapping[str, JobState]  # of jobs that have not ended
    ended: Mapping[str, JobPhase]
    users: Mapping[str, User]
    holders: tuple[Holder, ...] = ()
    busy: Collection[str] = ()  # slots that may have a process
    largest: int = 1 << 30  # share that the policy can give to one job


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What an ask changes, and the answer to it."""

    reply: Reply
    state: JobState | None = None
    cluster: ClusterState | None = None


def answer(ask: Ask, standing: Standing) -> Outcome:
    if ask.id in standing.cluster.asks_done:
        return _accept(ask, "it was done already")
    match ask.op:
        case Op.CANCEL | Op.RESIZE:
            return _about_job(ask, standing)
        case Op.DRAIN | Op.UNDRAIN:
            return _drain(ask, standing)
        case Op.RECLAIM:
            return _reclaim(ask, standing)
        case Op.RETURN:
            return _return(ask, standing)
        case Op.PRUNE:
            cluster = replace(
                standing.cluster, prune_before_s=max(standing.cluster.prune_before_s, standing.now - ask.number)
            )
            return _done(ask, "their records, logs and checkpoints are removed, a few at a time", cluster)
        case Op.DOWN:
            cluster = replace(standing.cluster, going_down=True, down_s=standing.now)
            return _done(ask, "all jobs are suspended, their state kept; then the cluster ends", cluster)


def _accept(ask: Ask, reason: str, state: JobState | None = None) -> Outcome:
    return Outcome(reply=Reply(id=ask.id, accepted=True, reason=reason), state=state)


def _refuse(ask: Ask, reason: str) -> Outcome:
    return Outcome(reply=Reply(id=ask.id, accepted=False, reason=reason))


def _done(ask: Ask, reason: str, cluster: ClusterState) -> Outcome:
    done = (*cluster.asks_done, ask.id)[-REMEMBERED:]
    return Outcome(reply=Reply(id=ask.id, accepted=True, reason=reason), cluster=replace(cluster, asks_done=done))


def _about_job(ask: Ask, standing: Standing) -> Outcome:
    request, state = standing.requests.get(ask.target), standing.states.get(ask.target)
    if request is None:
        return _refuse(ask, f"there is no job {ask.target!r}; `concertina jobs` lists them")
    user = standing.users.get(ask.user)
    if user is not None and not user.admin and ask.user != request.user:
        return _refuse(ask, f"job {ask.target} belongs to {request.user}, not to {ask.user}")
    if state is None or state.phase.is_end:
        if ask.op is Op.CANCEL and state is not None and state.phase is JobPhase.CANCELLED:
            return _accept(ask, f"job {ask.target} is cancelled")
        phase = state.phase if state is not None else standing.ended.get(ask.target)
        return _refuse(ask, f"job {ask.target} has ended already ({phase.value if phase else 'ended'})")
    if ask.op is Op.CANCEL:
        why = f"{ask.user or 'somebody'} cancelled it"
        return _accept(
            ask, f"job {ask.target} is cancelled", change(state, standing.now, why, phase=JobPhase.CANCELLED)
        )
    return _resize(ask, standing, request, state)


def _resize(ask: Ask, standing: Standing, request: JobRequest, state: JobState) -> Outcome:
    number = ask.number
    if number == 0:
        free = replace(
            state, pinned=0, reason="it has as many workers as the policy likes" if state.pinned else state.reason
        )
        return _accept(ask, f"job {ask.target} has as many workers as the policy likes", free)
    there = len(usable(standing.nodes))
    if number < 0:
        return _refuse(ask, f"{number} workers: needed 1 or more, or 0 for as many as the policy likes")
    wanted = counted(number, "worker")
    if number > request.virtual:
        return _refuse(ask, f"{wanted}: job {ask.target} has {request.virtual} virtual workers, so at most that many")
    if number > there:
        return _refuse(ask, f"{wanted}: the cluster has {counted(there)} to give, so at most that many")
    if number > standing.largest:
        return _refuse(ask, f"{wanted}: with these slots the policy gives a job {standing.largest} at most")
    if number < request.min_workers:
        return _refuse(ask, f"{wanted}: job {ask.target} was submitted with at least {request.min_workers}")
    note = ""
    if state.promised_s is not None:
        note = "; its deadline was promised for as many as the policy likes and may now be missed"
    reason = pinned_to(number) if len(state.slots) == number else state.reason  # the round that changes it says why
    return _accept(ask, f"job {ask.target} gets {number} workers{note}", replace(state, pinned=number, reason=reason))


def pinned_to(number: int) -> str:
    """The reason of a job that has the workers its user asked for."""
    return f"pinned to {counted(number, 'worker')}"


def _drain(ask: Ask, standing: Standing) -> Outcome:
    cluster, node = standing.cluster, ask.target
    if node not in {known.id for known in standing.nodes}:
        names = listed([known.id for known in standing.nodes], most=8)
        return _refuse(ask, f"there is no node {node!r}; there are {names or 'none'}")
    if ask.op is Op.DRAIN:
        drained = tuple(dict.fromkeys((*cluster.drained, node)))
        return _done(ask, f"node {node} is drained: its jobs move away", replace(cluster, drained=drained))
    if node not in cluster.drained:
        return _refuse(ask, f"node {node} is not drained")
    drained = tuple(name for name in cluster.drained if name != node)
    return _done(ask, f"node {node} is used again", replace(cluster, drained=drained))


def _reclaim(ask: Ask, standing: Standing) -> Outcome:
    cluster = standing.cluster
    there = usable(standing.nodes)
    if ask.number < 1:
        return _refuse(ask, f"reclaim {ask.number}: needed 1 slot or more")
    if ask.number > len(there):
        lent = f", {len(cluster.lent)} are lent already" if cluster.lent else ""
        total = len(all_slots(standing.nodes))
        return _refuse(ask, f"reclaim {ask.number}: only {len(there)} of {counted(total)} can be taken back{lent}")
    taken = lend(ask.number, there, standing.holders, standing.busy)
    why = f"{counted(len(taken))} taken back: {listed(taken, most=8)}{_hit(taken, standing)}"
    return _done(ask, why, replace(cluster, lent=(*cluster.lent, *taken)))


def _hit(taken: tuple[str, ...], standing: Standing) -> str:
    """Which jobs feel it."""
    lost = {holder.id: sum(slot in taken for slot in holder.slots) for holder in standing.holders}
    named = [f"{counted(count)} of {job}" for job, count in lost.items() if count]
    return f" ({listed(named)})" if named else " (free already)"


def _return(ask: Ask, standing: Standing) -> Outcome:
    cluster = standing.cluster
    if ask.number < 0:
        return _refuse(ask, f"return {ask.number}: needed 1 slot or more, or 0 for all")
    if not cluster.lent:
        return _refuse(ask, "no slot is lent to anybody")
    if ask.number > len(cluster.lent):
        return _refuse(ask, f"return {ask.number}: only {counted(len(cluster.lent))} lent")
    lent = take_back(ask.number, cluster.lent)
    return _done(ask, f"{counted(len(cluster.lent) - len(lent))} back in use", replace(cluster, lent=lent))
