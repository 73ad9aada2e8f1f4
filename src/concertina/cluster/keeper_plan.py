"""What a keeper does next, so that its job comes to train on exactly the slots that it was granted. Pure.

One thing at a time: `plan` is asked again several times a second with what has become of it. The job's master is asked
to remove workers or to have another number of them, which it does without stopping the others. A slot that was taken
away is free after `vacate_s` in any case: whoever is still there is killed, which costs a job with other workers the
step in flight, and one without the steps since its last checkpoint; that is why the latter is asked for one first.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

LEAD_S = 1.0  # so long before they would be killed, workers that all have to go are asked for a checkpoint
PATIENT_S = 10.0  # with so much time, others come before a worker leaves
AGAIN_S = 3.0  # what has not come about is asked for again
LINGER_S = 30.0  # a worker that the job goes on without may take so long to end
SUSPEND_S = 20.0  # nobody waits for the slots: so long may a checkpoint take


@dataclass(frozen=True, slots=True, kw_only=True)
class Seated:
    """A worker on its slot, from when it is asked for until it is gone."""

    worker: int
    slot: str
    member: bool = True  # it trains with the others, or will from the start
    leaving: bool = False  # it was asked to leave, or the others go on without it
    left: float | None = None  # since when they do
    started: bool = True  # there is a process
    killed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """What a keeper knows of its job. Times by one clock, in seconds."""

    now: float
    slots: tuple[str, ...]  # granted; none: suspend
    ended: bool = False  # nothing more is wanted of the job
    asked_to_end: float | None = None  # since when the keeper itself is asked to suspend
    vacate_s: float = 2.0
    workers: tuple[Seated, ...] = ()
    members: int = 0  # of the generation in force, whether they have a place or not
    unseated: tuple[int, ...] = ()  # workers that the master wants and that have no place, of this generation
    taken: Mapping[str, float] = field(default_factory=dict)  # slot with a worker -> since when it is not granted
    target: int = 0  # workers that the master was last told to have
    waits: bool = False  # a request of ours is not answered yet
    asked: float = 0.0  # when the last was made
    changes: bool = False  # the master is making a change
    finishes: bool = False  # the last step is made: it ends by itself
    interrupted: float | None = None  # since when all workers are asked to stop


@dataclass(frozen=True, slots=True, kw_only=True)
class Nothing:
    """It is as it should be, or soon will be."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Remove:
    """Ask these members to leave; `replaced`: when others have come."""

    workers: tuple[int, ...]
    replaced: bool
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Resize:
    """Ask for so many workers."""

    workers: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Interrupt:
    """All workers write a checkpoint at the next step boundary, and end."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Kill:
    """End these at once."""

    workers: tuple[int, ...]
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Refuse:
    """There will be no place for these."""

    workers: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop:
    """End the job at once."""


Decision = Nothing | Remove | Resize | Interrupt | Kill | Refuse | Stop


def plan(s: Situation) -> Decision:
    """The next thing to do."""
    if s.ended:
        return Stop()
    if not s.slots or s.asked_to_end is not None or s.interrupted is not None:
        return _suspend(s)
    overdue = [w for w in _off(s) if s.now >= s.taken.get(w.slot, s.now) + s.vacate_s]
    stuck = [w for w in s.workers if w.left is not None and s.now >= w.left + LINGER_S]
    return (
        _kill(overdue, f"its slot was taken away and not free {s.vacate_s:g} s later")
        or _kill(stuck, f"the job went on without it {LINGER_S:g} s ago")
        or _save(s)
        or (Nothing() if s.waits or s.finishes else _ask(s))
    )


def is_settled(s: Situation) -> bool:
    """Whether the job trains on exactly the slots that it was granted."""
    places = sorted(w.slot for w in s.workers if w.member and w.started)
    everybody = len(places) == len(s.workers) == s.members
    return everybody and not s.unseated and not s.changes and places == sorted(s.slots)


def _suspend(s: Situation) -> Decision:
    if s.interrupted is None:
        return Interrupt(reason="it has no slots any more" if not s.slots else "asked to suspend")
    until = s.interrupted + SUSPEND_S
    if s.taken:  # somebody may wait for them
        until = min(until, min(s.taken.values()) + s.vacate_s)
    late = _kill(s.workers, "it was asked to stop and has not") if s.now >= until else None
    return late or Nothing()


def _off(s: Situation) -> list[Seated]:
    """Who is where nobody of this job belongs any more."""
    return [w for w in s.workers if w.slot not in s.slots]


def _kill(workers: tuple[Seated, ...] | list[Seated], reason: str) -> Kill | None:
    whom = tuple(w.worker for w in workers if w.started and not w.killed)
    return Kill(workers=whom, reason=reason) if whom else None


def _save(s: Situation) -> Interrupt | None:
    """All who have the job's state are about to be killed."""
    members = [w for w in s.workers if w.member]
    if not members or any(w.slot in s.slots for w in members):
        return None
    first = min(s.taken.get(w.slot, s.now) for w in members)
    if s.now < first + s.vacate_s - LEAD_S:
        return None
    return Interrupt(reason="all its slots were taken away: a checkpoint, to go on from on the others")


def _ask(s: Situation) -> Decision:
    go = [w for w in _off(s) if w.member and not w.leaving]
    if go:
        return _remove(s, go)
    if s.target != len(s.slots):
        return Resize(workers=len(s.slots))
    if s.members > len(s.slots) and s.unseated:  # all start together, and more than have a place by now
        return Refuse(workers=s.unseated)
    idle = _kill([w for w in _off(s) if not w.member and not w.leaving], "its slot was taken away before it could join")
    if idle:
        return idle
    if not is_settled(s) and not s.changes and s.now >= s.asked + AGAIN_S:
        return Resize(workers=len(s.slots))
    return Nothing()


def _remove(s: Situation, go: list[Seated]) -> Remove:
    """With time, and always when nobody else has the state, others come first; else they leave, then others come."""
    stay = [w for w in s.workers if w.member and w not in go and w.slot in s.slots]
    if stay and s.vacate_s < PATIENT_S:
        return _leave(go)
    alone = all(w in go for w in s.workers if w.member)
    in_exchange = min(len(go), max(1 if alone else 0, len(s.slots) - (s.target - len(go))))
    if in_exchange > 0:
        return _leave(go[:in_exchange], replaced=True)
    return _leave(go)


def _leave(go: list[Seated], replaced: bool = False) -> Remove:
    reason = "its slot was taken away" if len(go) == 1 else "its slots were taken away"
    return Remove(workers=tuple(w.worker for w in go), replaced=replaced, reason=reason)
