"""Messages that arrive once and in order, over a connection that may lose, repeat or break.

Each side numbers what it says to the other; the other takes the next number only, and says with everything it sends how
far it has come. What is not confirmed is said again. Pure: bytes, sockets and clocks are elsewhere. Its state is
plain data, so that whoever replaces one side can go on where it stopped.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

RESEND_SECONDS = 0.3
Body = Mapping[str, Any]


@dataclass(slots=True)
class Channel:
    """One side's view of a conversation with one other."""

    taken: int = 0  # number of the last message taken from the other
    next: int = 1
    unconfirmed: list[tuple[int, Body]] = field(default_factory=list)
    said_at: float = 0.0  # when these were last put on the wire

    def say(self, body: Body, now: float) -> dict[str, Any]:
        """The frame to send at once; it is kept until the other confirms it."""
        self.unconfirmed.append((self.next, body))
        self.next += 1
        self.said_at = now
        return self._frame(self.next - 1, body)

    def again(self, now: float) -> list[dict[str, Any]]:
        """Frames to send once more, if it is time."""
        if not self.unconfirmed or now - self.said_at < RESEND_SECONDS:
            return []
        self.said_at = now
        return [self._frame(number, body) for number, body in self.unconfirmed]

    def take(self, frame: Mapping[str, Any]) -> Body | None:
        """The message in a frame, if it is the next; None for one that was taken before or came too early."""
        confirmed = frame.get("taken", 0)
        self.unconfirmed = [(number, body) for number, body in self.unconfirmed if number > confirmed]
        if frame.get("number") != self.taken + 1:
            return None
        self.taken += 1
        body: Body = frame["body"]
        return body

    def nod(self) -> dict[str, Any]:
        """A frame without a message: how far we have come."""
        return {"taken": self.taken}

    def _frame(self, number: int, body: Body) -> dict[str, Any]:
        return {"number": number, "body": body, "taken": self.taken}

    def to_json(self) -> dict[str, Any]:
        return {"taken": self.taken, "next": self.next, "unconfirmed": [[n, dict(b)] for n, b in self.unconfirmed]}

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> "Channel":
        return cls(raw["taken"], raw["next"], [(n, b) for n, b in raw["unconfirmed"]])
