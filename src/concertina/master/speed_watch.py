"""What signs of life say about workers: who is slow, who stands still, who is silent, who is cut off from others.

Pure; the time is an argument.

Nothing here is kept for a successor: a new master measures anew. A finding is an event for the machine.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from concertina.core.virtual_plan import deal, step_time
from concertina.master.cut_links import Complaint, cut_off
from concertina.master.machine_types import SlowFound, State, StuckFound, UnevenFound

ENOUGH = 4  # steps of a generation that must have been measured
LASTING = 4  # steps that an imbalance must last before virtual workers are dealt anew
PATIENCE = 10  # steps that a worker may stay slow after that (EDL 5.4)
GAIN = 1.3  # how much longer than possible a step must take; below, dealing anew would follow noise
SAVED_S = 0.02  # seconds per step that it must save at least
STALL_STEPS = 20  # usual steps that others must have waited for one worker, besides the seconds
FRESH_SECONDS = 2.0  # what a worker said of others longer ago is no longer relied on
PREPARE_SECONDS = 1800.0  # that a newcomer may take from its start to its loop: until then no other change can be made
LEAST_CUT_SECONDS = 4.0  # that a link must have been down, however little silence is borne

Finding = UnevenFound | SlowFound | StuckFound


@dataclass(frozen=True, slots=True, kw_only=True)
class Sign:
    """A sign of life."""

    generation: int = -1  # that the worker trains in
    step: int = 0
    pace: float = 0.0  # seconds per step
    turn_s: float = 0.0  # seconds that one virtual worker's turn takes here, without waiting for others
    turns: int = 0  # steps of this generation that this was measured over
    met: int = 0  # meetings of this generation that the worker has come to
    in_round: bool = False  # between the beginning of a step and the meeting that makes it count
    waits_s: float = 0.0  # seconds for which it has waited for others
    cut: tuple[tuple[int, float], ...] = ()  # workers on other hosts that it cannot reach, and for how many seconds

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> "Sign":
        cut = tuple((int(worker), float(seconds)) for worker, seconds in raw.get("cut", ()))
        return cls(**{**raw, "cut": cut})


@dataclass(slots=True)
class _Seen:
    sign: Sign
    heard_at: float
    moved_at: float
    signed_at: float


@dataclass(slots=True)
class SpeedWatch:
    """Keeps the newest sign of each worker and draws conclusions."""

    silence_s: float
    stall_s: float
    arrive_s: float
    _seen: dict[int, _Seen] = field(default_factory=dict)
    _uneven_since: int = -1  # step; -1: not uneven
    _slow_since: dict[int, int] = field(default_factory=dict)
    _generation: int = -1
    _reported: set[int] = field(default_factory=set)  # stuck

    def heard(self, worker: int, now: float, sign: Sign | None = None) -> None:
        seen = self._seen.get(worker)
        if seen is None:
            self._seen[worker] = _Seen(sign or Sign(), now, now, now)
            return
        seen.heard_at = now
        if sign is not None:
            if (sign.generation, sign.met) != (seen.sign.generation, seen.sign.met):
                seen.moved_at = now
            seen.sign, seen.signed_at = sign, now

    def forget(self, worker: int) -> None:
        self._seen.pop(worker, None)

    def findings(self, state: State, now: float) -> list[Finding]:
        if state.generation != self._generation:
            self._generation, self._uneven_since, self._slow_since = state.generation, -1, {}
        found: list[Finding] = [f for f in self._stuck(state, now) if f.worker not in self._reported]
        found = found or list(self._cut_off(state, now))
        self._reported |= {f.worker for f in found if isinstance(f, StuckFound)}
        return found or self._uneven(state)

    # -- standing still ----------------------------------------------------------------------------------------------

    def _stuck(self, state: State, now: float) -> list[StuckFound]:
        found = []
        for n, worker in state.workers.items():
            seen = self._seen.setdefault(n, _Seen(Sign(), now, now, now))
            silent = now - seen.heard_at
            if silent > (self.silence_s if worker.desk else self.arrive_s):
                found.append(StuckFound(n, f"worker {n} gave no sign of life for {silent:.1f} s"))
            elif n in _awaited(state) and now - seen.moved_at > PREPARE_SECONDS:
                took = f"{now - seen.moved_at:.0f} s after its start"
                found.append(StuckFound(n, f"worker {n} had not reached its training loop {took}"))
        return found + self._stalled(state, now)

    def _stalled(self, state: State, now: float) -> list[StuckFound]:
        """Others have come to a meeting that one, in the middle of a step, does not come to."""
        here = {n: s for n in state.members if (s := self._seen.get(n)) and s.sign.generation == state.generation}
        farthest = max((seen.sign.met for seen in here.values()), default=0)
        patience = max(self.stall_s, STALL_STEPS * state.pace)
        return [
            StuckFound(n, f"worker {n} has stood still in a step for {now - seen.moved_at:.1f} s while others waited")
            for n, seen in here.items()
            if seen.sign.in_round and seen.sign.met < farthest and now - seen.moved_at > patience
        ]

    def _cut_off(self, state: State, now: float) -> list[StuckFound]:
        """Between workers that we all hear, a link is down; whoever is silent is another matter."""
        told = {
            n: Complaint(waits_s=seen.sign.waits_s, cut=dict(seen.sign.cut))
            for n, seen in self._seen.items()
            if n in state.workers and n not in self._reported and now - seen.signed_at <= FRESH_SECONDS
        }
        return cut_off(state, told, max(self.silence_s, LEAST_CUT_SECONDS))

    # -- uneven speeds -----------------------------------------------------------------------------------------------

    def _uneven(self, state: State) -> list[Finding]:
        times = self._times(state)
        if times is None or state.pending is not None:
            self._uneven_since, self._slow_since = -1, {}
            return []
        step = max(self._seen[n].sign.step for n in state.members)
        shares = [len(block) for block in state.shares]
        takes = max(k * times[n] for k, n in zip(shares, state.members, strict=True))
        speeds = {n: 1 / times[n] for n in state.members}
        if _worth_it(takes, _best(state.virtual, speeds)):
            self._uneven_since = step if self._uneven_since < 0 else self._uneven_since
            lasts = step - self._uneven_since >= LASTING
            return [UnevenFound(state.generation, speeds, _how_uneven(times))] if lasts else []
        self._uneven_since = -1
        return self._slow(state, times, takes, step)

    def _times(self, state: State) -> dict[int, float] | None:
        """Seconds per turn of all members, if all have been measured in the generation in force."""
        signs = {n: self._seen[n].sign for n in state.members if n in self._seen}
        enough = [s.generation == state.generation and s.turns >= ENOUGH and s.turn_s > 0 for s in signs.values()]
        if len(signs) < max(2, len(state.members)) or not all(enough):
            return None
        return {n: sign.turn_s for n, sign in signs.items()}

    def _slow(self, state: State, times: Mapping[int, float], takes: float, step: int) -> list[Finding]:
        """Virtual workers are dealt as well as can be; would steps be shorter without the slowest worker?"""
        slowest = max(times, key=lambda n: times[n])
        others = {n: 1 / t for n, t in times.items() if n != slowest}
        if len(others) < max(1, state.minimum) or not _worth_it(takes, _best(state.virtual, others)):
            self._slow_since = {}
            return []
        self._slow_since = {slowest: self._slow_since.get(slowest, step)}
        if step - self._slow_since[slowest] < PATIENCE:
            return []
        return [SlowFound(slowest, f"{_how_uneven(times)}, and steps are shorter without it")]


def _best(virtual: int, speeds: Mapping[int, float]) -> float:
    known = list(speeds.values())
    return step_time(deal(virtual, known), known)


def _worth_it(takes: float, could_take: float) -> bool:
    return takes > GAIN * could_take and takes - could_take > SAVED_S


def _how_uneven(times: Mapping[int, float]) -> str:
    slowest, fastest = max(times, key=lambda n: times[n]), min(times, key=lambda n: times[n])
    return f"worker {slowest} takes {times[slowest] / times[fastest]:.1f} times as long as worker {fastest}"


def _awaited(state: State) -> tuple[int, ...]:
    """Newcomers that a change cannot go on without. One that is lost is part of it until the others have said so."""
    joiners = () if state.pending is None else state.pending.joiners
    return tuple(n for n in joiners if n in state.workers and not state.workers[n].ready)
