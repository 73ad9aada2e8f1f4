"""Workers on the nodes of a Ray cluster. Ray knows the nodes, starts one actor on each and notices when one is gone.

The actor forks workers as on any machine (`ray_node.py`); the job's master is here, beside whoever drives the job. A
node that Ray takes for dead, and a worker that was killed and of which nothing is heard, count as gone: whether their
processes are is not for us to see, and the others do not wait for them (`runtime/seals.py`). A node that comes back is
a new one for Ray, and can be used at once.

Scripts, checkpoints and concertina itself must be found under the same paths on all nodes.
"""

import contextlib
import logging
import os
import queue
import select
import signal
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from concertina.backends.base import HERE
from concertina.backends.local import LocalBackend
from concertina.backends.ray_node import RayNode
from concertina.core.errors import UsageError
from concertina.core.seats import Host

POLL_SECONDS = 1.0  # that a node may keep a question for events
LOOK_SECONDS = 0.5  # between two looks at Ray's list of nodes
GONE_SECONDS = 6.0  # after a worker was killed, until it counts as gone whatever its node says
SILENT_SECONDS = 5.0  # a node that keeps a question for so long may be cut off: nothing new is started there
SHUN_SECONDS = 20.0  # nor where an actor died, until Ray has made up its mind about the node
AGAIN_SECONDS = 0.3
LEAVE_SECONDS = 10.0
COMMANDS, EVENTS = "commands", "events"  # an actor's threads


@dataclass(slots=True)
class _Node:
    """One node of which this job has made use."""

    host: Host
    actor: Any  # a handle on a RayNode
    workers: dict[int, int] = field(default_factory=dict)  # worker -> pid; 0: asked for
    offset: float = float("inf")  # what to add to its clock to have ours
    question: Any = None  # for events, under way
    asked_at: float = 0.0
    answered: bool = False  # at all: a new actor takes its time
    taken: int = 0  # events


class RayBackend:
    """Starts, signals and listens to the workers of one job on a Ray cluster."""

    def __init__(self, log_dir: Path, threads: int, address: str = "auto", hold: Sequence[int] = ()) -> None:
        """The descriptors in `hold` stay open in everything that is started on this machine."""
        self._log_dir, self._threads = log_dir.absolute(), threads
        self._own_connection = connect(address)
        self.address: str = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
        self._here = LocalBackend.open(log_dir, threads, hold)
        self._nodes: dict[str, _Node] = {}
        self._shunned: dict[str, float] = {}  # nodes on which something died, until when
        self._killed: dict[int, float] = {}  # worker -> when it counts as gone
        self._lock = threading.RLock()
        self._told: queue.SimpleQueue[dict[str, object]] = queue.SimpleQueue()
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_read, False)
        os.set_blocking(self._wake_write, False)
        self._ends = threading.Event()
        self._hosts = ray_nodes(threads)
        self._listener = threading.Thread(target=self._listen, name="concertina-ray", daemon=True)
        self._listener.start()

    # -- nodes -------------------------------------------------------------------------------------------------------

    def hosts(self) -> Sequence[Host]:
        """Nodes that workers can be started on at the moment. Whoever does not answer now may be dead already."""
        now = time.monotonic()
        with self._lock:
            silent = {name for name, node in self._nodes.items() if self._is_silent(node, now)}
            shunned = {name for name, until in self._shunned.items() if now < until}
        return [host for host in self._hosts if host.name not in silent | shunned]

    def _is_silent(self, node: _Node, now: float) -> bool:
        return node.answered and node.question is not None and now - node.asked_at > SILENT_SECONDS

    def host_of(self, node: str) -> str:
        known = next((host.address for host in self._hosts if node in (host.name, host.address)), "")
        return known or (self.address if node == HERE else node)

    def _node(self, name: str) -> _Node | None:
        """By Ray's name or by address, with an actor on it; None if there is no such node any more."""
        with self._lock:
            host = next((host for host in self._hosts if name in (host.name, host.address)), None)
            name = host.name if host is not None else name
            known = self._nodes.get(name)
            if known is not None or host is None:
                return known
            where = NodeAffinitySchedulingStrategy(node_id=name, soft=False)
            # Ray hides all GPUs from an actor that asks for none; which worker uses which is ours to say.
            shown = {"env_vars": {"RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}}
            options = {"num_cpus": 0, "scheduling_strategy": where, "runtime_env": shown}
            remote: Any = ray.remote  # its types do not know of groups
            made = remote(concurrency_groups={COMMANDS: 1, EVENTS: 1})(RayNode)  # commands come in order
            actor = made.options(**options).remote(str(self._log_dir), self._threads)
            self._nodes[name] = _Node(host, actor)
            return self._nodes[name]

    # -- what a job asks for -----------------------------------------------------------------------------------------

    def start_worker(
        self, worker: int, script: Path, args: Sequence[str], env: Mapping[str, str], log: Path, node: str = HERE
    ) -> None:
        if node == HERE:
            self._here.start_worker(worker, script, args, env, log)
            return
        with self._lock:
            there = self._node(node)
            if there is None:
                self._tell({"event": "worker_exited", "worker": worker, "pid": 0, "code": -int(signal.SIGKILL)})
                return
            there.workers[worker] = 0
            there.actor.start.options(concurrency_group=COMMANDS).remote(
                worker, str(script), list(args), dict(env), str(log.absolute()), os.getcwd()
            )

    def start_master(self, env: Mapping[str, str], log: Path) -> None:
        self._here.start_master(env, log)

    def pid_of(self, worker: int) -> int | None:
        with self._lock:
            found = next((node.workers[worker] for node in self._nodes.values() if worker in node.workers), 0)
        return found or self._here.pid_of(worker)

    def signal_workers(self, number: signal.Signals, workers: Sequence[int] | None = None) -> None:
        self._here.signal_workers(number, workers)
        with self._lock:
            for node in self._nodes.values():
                meant = [n for n in node.workers if workers is None or n in workers]
                if not meant:
                    continue
                node.actor.signal.options(concurrency_group=COMMANDS).remote(int(number), meant)
                if number == signal.SIGKILL:
                    for worker in meant:
                        self._killed.setdefault(worker, time.monotonic() + GONE_SECONDS)

    def events(self, timeout: float, also: int | None = None) -> list[dict[str, object]]:
        waits = [self._wake_read, self._here.events_fd, *([] if also is None else [also])]
        readable, _, _ = select.select(waits, [], [], timeout)
        if also in readable:
            os.read(also, 4096)
        with contextlib.suppress(BlockingIOError):
            os.read(self._wake_read, 4096)
        found = self._here.events(0.0)
        while True:
            try:
                found.append(self._told.get_nowait())
            except queue.Empty:
                return found

    def end_workers(self) -> None:
        self.signal_workers(signal.SIGKILL)
        self._here.end_workers()
        until = time.monotonic() + LEAVE_SECONDS
        while any(node.workers for node in self._nodes.values()) and time.monotonic() < until:
            self.events(0.1)

    def close(self) -> None:
        self._ends.set()
        self._listener.join(LEAVE_SECONDS)
        closing: list[Any] = [
            node.actor.close.options(concurrency_group=COMMANDS).remote() for node in self._nodes.values()
        ]
        if closing:
            ray.wait(closing, num_returns=len(closing), timeout=LEAVE_SECONDS)
        for node in self._nodes.values():
            with contextlib.suppress(RayError):
                ray.kill(node.actor)
        self._nodes.clear()
        self._here.close()
        if self._own_connection:
            disconnect()
        for fd in (self._wake_read, self._wake_write):
            os.close(fd)

    # -- listening to the nodes, in a thread -------------------------------------------------------------------------

    def _listen(self) -> None:
        looked_at = 0.0
        while not self._ends.is_set():
            now = time.monotonic()
            if now - looked_at > LOOK_SECONDS:
                looked_at = now
                self._look_at_nodes()
                self._give_up_on_killed(now)
            with self._lock:
                nodes = dict(self._nodes)
            for node in nodes.values():
                if node.question is None and now >= node.asked_at:
                    node.question, node.asked_at = (
                        node.actor.events.options(concurrency_group=EVENTS).remote(node.taken, POLL_SECONDS),
                        now,
                    )
            questions = {node.question: name for name, node in nodes.items() if node.question is not None}
            if not questions:
                self._ends.wait(0.05)
                continue
            answered, _ = ray.wait(list(questions), timeout=0.1)
            for question in answered:
                self._take_answer(questions[question], question)

    def _look_at_nodes(self) -> None:
        try:
            self._hosts = ray_nodes(self._threads)
        except OSError:
            return  # Ray's head does not answer: what we know is as good as any guess
        alive = {host.name for host in self._hosts}
        for name in [name for name in self._nodes if name not in alive]:
            self._lose(name)

    def _take_answer(self, name: str, question: Any) -> None:
        node = self._nodes.get(name)
        if node is None:
            return
        node.question = None
        try:
            clock, found = ray.get(question)
        except ActorUnavailableError:
            node.asked_at = time.monotonic() + AGAIN_SECONDS  # Ray will say whether it is dead
            return
        except RayError:
            self._lose(name)  # its actor, or the nursery there, has died
            return
        node.answered = True
        node.taken += len(found)
        node.offset = min(node.offset, time.monotonic() - clock)
        for event in found:
            self._follow(node, event)

    def _follow(self, node: _Node, event: dict[str, Any]) -> None:
        kind, worker = event["event"], event.get("worker")
        if isinstance(event.get("at"), float):
            event["at"] += node.offset
        with self._lock:
            if worker not in node.workers:
                return  # it counts as gone, or is the nursery itself
            if kind == "worker_started":
                node.workers[worker] = event["pid"]
            elif kind == "worker_exited":
                del node.workers[worker]
                self._killed.pop(worker, None)
        self._tell(event)

    def _give_up_on_killed(self, now: float) -> None:
        with self._lock:
            late = [worker for worker, until in self._killed.items() if now > until]
            for worker in late:
                del self._killed[worker]
                for node in self._nodes.values():
                    self._count_as_gone(node, worker)

    def _lose(self, name: str) -> None:
        """Nothing can be heard from this node or done there any more."""
        with self._lock:
            node = self._nodes.pop(name, None)
            self._shunned[name] = time.monotonic() + SHUN_SECONDS
            if node is not None:
                for worker in list(node.workers):
                    self._count_as_gone(node, worker)
        if node is not None:
            with contextlib.suppress(RayError):
                ray.kill(node.actor)

    def _count_as_gone(self, node: _Node, worker: int) -> None:
        pid = node.workers.pop(worker, None)
        if pid is not None:
            self._tell({"event": "worker_exited", "worker": worker, "pid": pid, "code": -int(signal.SIGKILL)})

    def _tell(self, event: dict[str, object]) -> None:
        self._told.put(event)
        with contextlib.suppress(BlockingIOError, OSError):
            os.write(self._wake_write, b".")


def open_backend(log_dir: Path, threads: int, hold: Sequence[int] = ()) -> RayBackend:
    """For keepers of a cluster's jobs."""
    return RayBackend(log_dir, threads, hold=hold)


def connect(address: str = "auto") -> bool:
    """To the Ray cluster that this machine belongs to; False if this process is connected already."""
    os.environ.setdefault("RAY_IGNORE_UNHANDLED_ERRORS", "1")  # of calls whose answers nobody waits for
    if ray.is_initialized():
        return False
    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, configure_logging=False)
    except (ConnectionError, RuntimeError) as error:
        raise UsageError(
            f"no Ray cluster was found ({error}): start one with `ray start --head`, and with "
            "`ray start --address=...` on the other machines"
        ) from None
    return True


def disconnect() -> None:
    ray.shutdown()


def ray_nodes(threads: int = 1) -> list[Host]:
    """The nodes that Ray holds for alive, by address: a slot per GPU, or without GPUs per so many cores.

    OSError if Ray's head does not answer.
    """
    found = []
    try:
        known: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
    except (RayError, RuntimeError) as error:
        raise OSError(f"Ray does not say which nodes there are ({error})") from None
    for node in known:
        resources = node.get("Resources", {})
        gpus, cores = int(resources.get("GPU", 0)), int(resources.get("CPU", 0))
        kinds = [name.partition(":")[2] for name in resources if name.startswith("accelerator_type:")]
        slots = gpus or cores // max(1, threads)
        if node["Alive"] and slots:
            device = kinds[0] if gpus and kinds else "GPU" if gpus else ""
            found.append(Host(node["NodeID"], node["NodeManagerAddress"], slots, device))
    return sorted(found, key=lambda host: host.address)
