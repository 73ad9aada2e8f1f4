"""A response that goes on: pieces are sent as they come, until the client leaves or the server ends."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from concertina.cluster.mirror import Job
from concertina.server.auth import Caller
from concertina.server.errors import ApiError
from concertina.server.events import BEAT, BEAT_SECONDS, Hub, frame
from concertina.server.files import events_path, parse, read_lines
from concertina.server.views import encode

SEND_SECONDS = 30.0  # a client that takes nothing for so long is gone
LOOK_SECONDS = 0.3  # between two looks at a job's events
LINES = 500
MOST_STREAMS = 500
MOST_EACH = 50  # of one user, so that nobody keeps the others out; admins may have all


class EventStream(Response):
    """Server-sent events from an iterator, to a caller as long as that one may have them. One task per client; what can
    not be sent in time ends the stream."""

    media_type = "text/event-stream"

    def __init__(self, pieces: AsyncIterator[bytes], hub: Hub, who: Caller, may_go_on: Callable[[], bool]) -> None:
        """Raises ApiError when there are too many: 503 in all, 429 of this user."""
        if hub.clients >= MOST_STREAMS:
            raise ApiError(503, "too_many", f"{MOST_STREAMS} clients watch already", "try again later")
        if not who.admin and hub.watching[who.name] >= MOST_EACH:
            raise ApiError(429, "too_many", f"{MOST_EACH} clients of {who.name} watch already", "end some of them")
        super().__init__(headers={"cache-control": "no-store", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._pieces, self._hub, self._who, self._may_go_on = pieces, hub, who, may_go_on

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        self._hub.watching[self._who.name] += 1
        sending = asyncio.create_task(self._send_all(send))
        leaving = asyncio.create_task(_gone(receive))
        try:
            await asyncio.wait({sending, leaving}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._hub.left(self._who.name)
            for task in (sending, leaving):
                task.cancel()
            await asyncio.gather(sending, leaving, return_exceptions=True)
        if not sending.cancelled() and (error := sending.exception()) and not isinstance(error, TimeoutError | OSError):
            raise error

    async def _send_all(self, send: Send) -> None:
        async with contextlib.aclosing(self._pieces) as pieces:  # type: ignore[type-var]
            async for piece in pieces:
                if not self._may_go_on():
                    break
                message = {"type": "http.response.body", "body": piece, "more_body": True}
                await asyncio.wait_for(send(message), SEND_SECONDS)
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def job_stream(
    hub: Hub, state: Path, find: Callable[[], Job | None], after: int, show: Callable[[Job], dict[str, Any]]
) -> AsyncIterator[bytes]:
    """A job's own events as they are written, and its whole state whenever that changes, until the job has ended."""
    job = find()
    assert job is not None
    path, shown, quiet = events_path(state, job.id), b"", 0.0
    loop = asyncio.get_running_loop()
    last = loop.time()
    yield b"retry: 2000\n\n"
    while not hub.closing.is_set():
        job = find() or job
        now_state = encode(show(job))
        out = [] if now_state == shown else [frame("state", now_state)]
        shown = now_state
        found = await asyncio.to_thread(read_lines, path, after, LINES)
        at = after
        for line in found.lines:
            at += len(line) + 1
            event = parse(line)
            if event is not None:
                out.append(frame("line", encode(event), at))
        after = found.next
        if out:
            yield b"".join(out)
            last = loop.time()
        elif loop.time() - last > BEAT_SECONDS:
            yield BEAT
            last = loop.time()
        if found.at_end:
            quiet = quiet + 1 if job.state.phase.is_end else 0
            if quiet > 2:  # its last lines may come a moment after its end
                yield frame("end", encode({name: show(job)[name] for name in ("phase", "reason")}))
                return
            await _nap(hub, LOOK_SECONDS)


async def _nap(hub: Hub, seconds: float) -> None:
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(hub.closing.wait(), seconds)
