"""Something to be done by the controller: written into the store, answered from there, within a bounded time."""

import asyncio
import hashlib
import secrets
from dataclasses import replace

from concertina.cluster import keys
from concertina.cluster.codec import dump
from concertina.cluster.records import Ask, Op, Reply
from concertina.server.auth import Caller
from concertina.server.errors import ApiError, no_controller
from concertina.server.events import Hub
from concertina.server.parts import Parts

LATE_SECONDS = 0.5  # for an answer that was on its way when the ask was taken back


class Asker:
    """Lives in the event loop."""

    def __init__(self, parts: Parts, hub: Hub) -> None:
        self._parts, self._hub = parts, hub

    async def ask(self, op: Op, caller: Caller, *, target: str = "", number: int = 0, once: str = "") -> Reply:
        """What came of it. With `once`, the same for whoever asks again with the same words: it is done one time.
        Raises ApiError 503 when nobody decides, 409 when it was refused."""
        if not self._hub.led:
            raise no_controller()
        ask = Ask(id="", op=op, user=caller.name, target=target, number=number, at_s=self._parts.clock())
        ask = replace(ask, id=_id_of(ask, once) if once else secrets.token_hex(8))
        key, store = keys.ASKS + ask.id, self._parts.store
        if self._parts.mirror.reply(ask.id) is None:
            await asyncio.to_thread(store.put, key, dump(ask))
        reply = await self._reply(ask.id, self._parts.answer_s)
        if reply is None:
            taken_back = await asyncio.to_thread(store.delete, key)
            reply = await self._reply(ask.id, LATE_SECONDS)
            if reply is None:
                # One in office may have read it before it was taken back, and be busy with it.
                raise no_controller() if taken_back and not self._hub.led else _no_answer()
        if not reply.accepted:
            raise ApiError(409, "refused", reply.reason, "")
        return reply

    async def _reply(self, ask_id: str, limit_s: float) -> Reply | None:
        """Answers vanish after a while: it is kept when it is first seen."""
        found: list[Reply] = []

        def there() -> bool:
            reply = self._parts.mirror.reply(ask_id)
            found.extend([reply] if reply else [])
            return bool(found)

        await self._hub.until(there, limit_s)
        return found[0] if found else None


def _id_of(ask: Ask, once: str) -> str:
    words = "\0".join((ask.user, ask.op.value, ask.target, str(ask.number), once))
    return hashlib.sha256(words.encode()).hexdigest()[:32]


def _no_answer() -> ApiError:
    return ApiError(
        503,
        "no_answer",
        "the controller's answer did not come in time; it may have done what was asked, or be about to",
        "look whether it was carried out before you ask again",
    )
