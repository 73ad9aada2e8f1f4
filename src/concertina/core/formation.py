"""Who trains together in a generation, and which virtual workers each of them runs."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from concertina.core.placement import VirtualPlacement


@dataclass(frozen=True, slots=True, kw_only=True)
class Formation:
    """One generation, as its members are told of it."""

    generation: int
    members: tuple[int, ...]  # worker numbers, by rank
    placement: VirtualPlacement
    posts: tuple[str, ...] = ()  # where the members find each other's memory, by rank
    desks: tuple[str, ...] = ()
    joiners: tuple[int, ...] = ()
    leavers: tuple[int, ...] = ()  # members of the generation before that are not in this one
    sources: tuple[tuple[int, str], ...] = ()  # members of the generation before, with their desks: for the joiners
    hold_at: int = 0  # nobody goes beyond this step before the change to this generation; 0: when it is ready
    next_hold: int = 0  # nor beyond this one in this generation, since another change is planned there; 0: none
    parked: bool = False  # too few are left: wait for more before training on

    def to_json(self) -> dict[str, Any]:
        return {
            "generation": self.generation,
            "members": list(self.members),
            "placement": [list(block) for block in self.placement.workers],
            "posts": list(self.posts),
            "desks": list(self.desks),
            "joiners": list(self.joiners),
            "leavers": list(self.leavers),
            "sources": [list(source) for source in self.sources],
            "hold_at": self.hold_at,
            "next_hold": self.next_hold,
            "parked": self.parked,
        }

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> "Formation":
        return cls(
            generation=raw["generation"],
            members=tuple(raw["members"]),
            placement=VirtualPlacement(tuple(tuple(block) for block in raw["placement"])),
            posts=tuple(raw["posts"]),
            desks=tuple(raw["desks"]),
            joiners=tuple(raw["joiners"]),
            leavers=tuple(raw["leavers"]),
            sources=tuple((number, desk) for number, desk in raw["sources"]),
            hold_at=raw["hold_at"],
            next_hold=raw["next_hold"],
            parked=raw["parked"],
        )
