"""The cluster's one process, put together: the store, its mirror, the controller and the interface.

Constructing opens nothing; `start` does, and `close` ends what was started, in the opposite order.
"""

import errno
import fcntl
import json
import logging
import os
import socket
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import IO, TYPE_CHECKING

from concertina.cli.client import Client
from concertina.cli.places import ServerRecord, read_server, remove_server, write_server
from concertina.core.errors import ClusterUnreachable, UsageError

if TYPE_CHECKING:
    from concertina.cluster.backend import ClusterBackend
    from concertina.cluster.controller import Controller
    from concertina.cluster.mirror import Mirror
    from concertina.store.protocol import Store

READY_SECONDS = 30.0
CLOSE_SECONDS = 10.0
OFFICE_SECONDS = 5.0
LOG_BYTES = 16 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class UpSettings:
    """What `concertina up` was asked for."""

    state: Path
    store: str  # address
    host: str
    port: int  # 0: any that is free
    slots: int = 0  # 0: what this machine has
    policy: str = "concertina"
    backend: str = "local"
    keep_jobs: int = 1000  # that have ended; 0: all
    token_needed: bool = False


def prepare_state(state: Path) -> None:
    """The folder, for its owner only: scripts' output and checkpoints are nobody else's business."""
    try:
        state.mkdir(parents=True, exist_ok=True, mode=0o700)
        probe = state / f".probe-{os.getpid()}"
        probe.write_bytes(b"")
        probe.unlink()
    except OSError as error:
        reason = os.strerror(error.errno or errno.EIO).lower()
        raise UsageError(f"the state folder {state} can not be used ({reason}); name another with --state") from None


def take_state(state: Path) -> IO[str]:
    """The lock that says a cluster is up in this folder; held as long as the file is open."""
    file = (state / "up.lock").open("a+")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.close()
        there = read_server(state)
        where = f" at {there.url} (process {there.pid})" if there is not None else ""
        raise UsageError(
            f"a cluster is already up{where} with its state in {state}; end it with `concertina down`, "
            "or start another with --state and --port"
        ) from None
    return file


def listen(host: str, port: int) -> socket.socket:
    """A socket that is bound, so that a port that is taken is told before anything is started."""
    try:
        family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        sock = socket.socket(family, kind, proto)
    except OSError as error:
        raise UsageError(f"--host {host}: {error.strerror or error}; try 127.0.0.1") from None
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind(address)
        sock.listen(1024)
    except OSError as error:
        sock.close()
        raise UsageError(_cannot_listen(host, port, error)) from None
    return sock


def _cannot_listen(host: str, port: int, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"port {port} of {host} is taken by another program; try --port {port + 1}"
    if error.errno == errno.EACCES:
        return f"this user may not listen on port {port}; use one from 1024 up, such as --port 8400"
    if error.errno == errno.EADDRNOTAVAIL:
        return f"--host {host} is no address of this machine; try 127.0.0.1, or 0.0.0.0 for all it has"
    return f"can not listen on {host}:{port}: {error.strerror}"


def url_of(host: str, port: int) -> str:
    shown = (
        "127.0.0.1" if host in ("0.0.0.0", "") else "[::1]" if host == "::" else f"[{host}]" if ":" in host else host
    )
    return f"http://{shown}:{port}"


def log_into(path: Path) -> Callable[[], None]:
    """What goes wrong in the server goes into a file of bounded size, not on the terminal; the result ends that."""
    handler = RotatingFileHandler(path, maxBytes=LOG_BYTES, backupCount=1)
    handler.setFormatter(JsonLines())
    loggers = [logging.getLogger(name) for name in ("concertina", "uvicorn", "asyncio")]
    for logger in loggers:
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
        logger.propagate = False

    def end() -> None:
        for logger in loggers:
            logger.removeHandler(handler)
        handler.close()

    return end


class JsonLines(logging.Formatter):
    """One object a line, with its traceback."""

    def format(self, record: logging.LogRecord) -> str:
        line = {"time": round(record.created, 3), "level": record.levelname.lower(), "message": record.getMessage()}
        if record.exc_info:
            line["trace"] = self.formatException(record.exc_info)
        return json.dumps(line)


def open_backend(settings: UpSettings) -> "ClusterBackend":
    from concertina.cluster.backend import LocalCluster

    if settings.backend == "ray":
        try:
            from concertina.cluster.ray_cluster import RayCluster
        except ModuleNotFoundError as missing:
            raise UsageError(
                f"--backend ray needs the package {missing.name!r}, which is not installed: "
                "pip install 'concertina[ray]'"
            ) from None
        return RayCluster(settings.store, settings.state)
    return LocalCluster.open(settings.store, settings.state, settings.slots)


class Serving:
    """A cluster that is up."""

    def __init__(self, settings: UpSettings) -> None:
        self.settings = settings
        self.url = ""
        self.store: Store
        self.mirror: Mirror
        self.controller: Controller
        self._stack = ExitStack()

    def start(self) -> None:
        try:
            self._start()
        except BaseException:
            self._stack.close()
            raise

    def _start(self) -> None:
        from concertina.cluster.mirror import Mirror
        from concertina.store.address import open_store

        settings, stack = self.settings, self._stack
        prepare_state(settings.state)
        stack.callback(log_into(settings.state / "server.log"))
        if settings.store.startswith("sqlite"):  # with a store for several machines, a standby may share the folder
            stack.enter_context(take_state(settings.state))
        sock = stack.enter_context(listen(settings.host, settings.port))
        self.url = url_of(settings.host, sock.getsockname()[1])
        self.store = open_store(settings.store)
        stack.callback(self.store.close)
        self.mirror = Mirror(self.store)
        self.mirror.start()
        stack.callback(self.mirror.close)
        self._start_controller()
        self._start_interface(sock)
        write_server(settings.state, ServerRecord(url=self.url, pid=os.getpid()))
        stack.callback(remove_server, settings.state)

    def _start_controller(self) -> None:
        from concertina.cluster.controller import STORE_SECONDS, Controller
        from concertina.store.address import open_store

        settings = self.settings
        self.controller = Controller(
            lambda: open_store(settings.store, timeout_s=STORE_SECONDS),
            self.mirror,
            open_backend(settings),
            policy=settings.policy,
            log=settings.state / "controller.log",
            keep_jobs=settings.keep_jobs,
        )
        self._stack.callback(self.controller.close)
        self.controller.start()
        # With a store for several machines another may be in office, and we wait: that is no reason not to be up.
        self.controller.in_office.wait(OFFICE_SECONDS)

    def _start_interface(self, sock: socket.socket) -> None:
        from concertina.cli.look_ahead import LookAhead
        from concertina.server.app import create_app
        from concertina.server.parts import Parts
        from concertina.server.serve import Server

        settings = self.settings
        parts = Parts(
            store=self.store,
            mirror=self.mirror,
            state=settings.state,
            host=settings.host,
            token_needed=settings.token_needed,
            oracle=LookAhead(self.mirror),
            access_log=settings.state / "access.log",
        )
        server = Server(create_app(parts), sock)
        thread = threading.Thread(target=server.run, name="concertina-interface", daemon=True)
        thread.start()

        def stop() -> None:
            server.stop()
            thread.join(timeout=CLOSE_SECONDS)

        self._stack.callback(stop)
        self._wait_until_it_answers(thread)

    def _wait_until_it_answers(self, thread: threading.Thread) -> None:
        ends = time.monotonic() + READY_SECONDS
        with Client(self.url) as client:
            while not client.answers():
                if not thread.is_alive() or time.monotonic() > ends:
                    raise ClusterUnreachable(f"the interface did not answer within {READY_SECONDS:.0f} s of its start")
                time.sleep(0.05)

    def close(self) -> None:
        self._stack.close()
