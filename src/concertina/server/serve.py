"""Runs the application on a socket that is bound: uvicorn in the calling thread, an end that waits for nobody."""

import asyncio
import socket
import sys

import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.h11_impl import H11Protocol

from concertina.server.context import Context

SWITCH_SECONDS = 0.0005
MOST_CONNECTIONS = 1000
QUIET_SECONDS = 30.0  # that a connection may be without a whole request, or take nothing of an answer
STOP_SECONDS = 3  # that answers in progress may take


class Server:
    """`run` blocks until `stop`, from any thread, or until SIGINT or SIGTERM when it runs in the main thread."""

    def __init__(self, app: FastAPI, sock: socket.socket) -> None:
        config = uvicorn.Config(
            app,
            http=_Impatient,
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            ws="none",
            lifespan="on",
            timeout_keep_alive=int(QUIET_SECONDS),
            limit_concurrency=MOST_CONNECTIONS,
            timeout_graceful_shutdown=STOP_SECONDS,
            h11_max_incomplete_event_size=64 * 1024,
        )
        self._server, self._sock = _Uvicorn(config, app.state.context), sock

    def run(self) -> None:
        # The controller computes in the same process. Whenever the loop has sent something, it would wait this long
        # to be let in again; with fifty watchers that adds up.
        before = sys.getswitchinterval()
        sys.setswitchinterval(SWITCH_SECONDS)
        try:
            self._server.run(sockets=[self._sock])
        finally:
            sys.setswitchinterval(before)
            self._sock.close()

    def stop(self) -> None:
        self._server.should_exit = True


class _Impatient(H11Protocol):
    """Ends connections on which no request comes, or whose answer nobody reads. uvicorn waits for the first request,
    for the rest of each and for readers for ever: whoever opened as many as it takes would keep everybody else out,
    without any token."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        # The kernel sees who still reads, if slowly, and who does not; and to close would wait for the reader, too.
        deaf_ms = int(QUIET_SECONDS * 1000)
        transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, deaf_ms)
        self._quiet_since = self.loop.time()
        self._look = self.loop.call_later(QUIET_SECONDS, self._end_if_quiet)

    def on_response_complete(self) -> None:
        self._quiet_since = self.loop.time()
        super().on_response_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        self._look.cancel()
        super().connection_lost(exc)

    def _end_if_quiet(self) -> None:
        answers = self.cycle is not None and not self.cycle.response_complete
        left = QUIET_SECONDS if answers else self._quiet_since + QUIET_SECONDS - self.loop.time()
        if left > 0:
            self._look = self.loop.call_later(left, self._end_if_quiet)
        else:
            self.transport.close()


class _Uvicorn(uvicorn.Server):
    """Ends event streams before it waits for connections to end: they would never end by themselves."""

    def __init__(self, config: uvicorn.Config, context: Context) -> None:
        super().__init__(config)
        self._context = context

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._context.hub.close()
        await super().shutdown(sockets)
