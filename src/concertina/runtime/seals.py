"""Whether a meeting can still take place when members on other hosts are lost. Pure.

On one machine everybody sees the same posts. Over a network a survivor may have received the last words of a lost
worker while another has not. So before anything is concluded from a loss, the survivors *seal* the lost: each stops
taking anything more from them and says how far it has seen them come. Who has been seen farthest has come that far, and
whoever has seen less takes the rest from the one who has seen it. Only when every member outside the lost has sealed
all of them is it certain what they have posted.

Why all survivors come to the same answer: what one has sealed changes only by taking over what another has seen, so the
farthest sight of a lost worker, over those who are left, is the same for everybody who judges. If the one that saw
farthest is lost too before it could pass that on, nobody knows of those words any more, and the meeting that they were
for does not take place.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Verdict:
    """What to do in a meeting that does not come about by itself. Neither: wait on."""

    missing: tuple[int, ...] = ()  # ranks that will never come to it: give it up
    fetch: tuple[int, int] | None = None  # a lost rank of which another rank has seen more: take it from there


def judge(
    count: int,
    lost: Collection[int],
    counts: Sequence[int],
    stopped: Collection[int],
    seals: Sequence[Mapping[int, int]],
) -> Verdict:
    """One member's view of meeting number `count`.

    `lost` are the ranks that it knows to be lost; `counts` the meetings that it has seen every rank come to; `stopped`
    the ranks that come to no more; `seals[r]` how far rank r had seen each lost rank come when it sealed it.
    """
    alive = [rank for rank in range(len(counts)) if rank not in lost]
    given_up = tuple(rank for rank in alive if rank in stopped and counts[rank] < count)
    if given_up:
        return Verdict(missing=given_up)
    if any(x not in seals[rank] for rank in alive for x in lost):
        return Verdict()
    for x in sorted(lost):
        farthest = max(alive, key=lambda rank: seals[rank][x])
        if seals[farthest][x] > counts[x]:
            return Verdict(fetch=(x, farthest))
    return Verdict(missing=tuple(x for x in sorted(lost) if counts[x] < count))
