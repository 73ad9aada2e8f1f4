"""When a leader may act: decisions only, the time is an argument. Sockets, stores and clocks are in `election.py`.

A lease lives at the store for `ttl` seconds from when the store heard of it. The leader does not know when that was,
only when it *sent* the request, which was earlier. Counting from there, and stopping a margin before the end, it gives
up before anybody else can be given its place, even if its clock is slower than the store's by a few parts in a hundred.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from concertina.core.errors import StoreRequestError

MARGIN = 0.1  # of the lease's time that its holder does without; a clock may be this much slower than the store's
RENEWALS = 3  # that fit into the time a leader has, so that one may fail


@dataclass(frozen=True, slots=True, kw_only=True)
class Tenure:
    """What a leader knows about its own time."""

    fence: int
    ttl: float  # seconds, as granted
    sent: float  # local time when the last successful grant or renewal was sent
    over: str = ""  # why it is over, once it is: for good

    @property
    def until(self) -> float:
        """Local time from which on this leader may not act."""
        return self.sent + self.ttl * (1 - MARGIN)


def check_name(name: str) -> None:
    """One segment, so that one election's keys are never below another's."""
    if not name or "/" in name or not name.isprintable():
        raise StoreRequestError(f"election {name!r}: needed a name of printable characters without '/', as in 'job-7'")


def leader_key(name: str) -> str:
    """Whoever this key names is the leader."""
    return f"leaders/{name}"


def at(tenure: Tenure, now: float) -> Tenure:
    """The tenure as it is at this time: over, if nobody renewed it. Time that has run out does not come back."""
    if tenure.over or now < tenure.until:
        return tenure
    late = now - tenure.sent
    return replace(tenure, over=f"not renewed for {late:.2f} s with a lease of {tenure.ttl:g} s")


def renewed(tenure: Tenure, *, sent: float, now: float) -> Tenure:
    """After the store said yes to a renewal sent at `sent`. An answer that comes too late saves nobody."""
    tenure = at(tenure, now)
    return tenure if tenure.over else replace(tenure, sent=sent)


def ended(tenure: Tenure, why: str) -> Tenure:
    """The first reason stays."""
    return tenure if tenure.over else replace(tenure, over=why)


def next_renewal(tenure: Tenure) -> float:
    """Local time at which to renew."""
    return tenure.sent + (tenure.until - tenure.sent) / RENEWALS


def obeys(highest_seen: int, fence: int) -> bool:
    """Whether to obey a command with this fencing number, having seen the others: never an older leader's."""
    return fence >= highest_seen
