"""The master as a process: a socket, a store and a clock around the pure machine.

    python -m concertina.master.service

It is told through its environment which job is its own. One master acts at a time: the holder of a lease, whose fencing
number goes with every command, so that workers never obey an older one. After every transition the state, and what has
been said but not confirmed, goes into the store before any word of it goes out; a new master reads it and goes on.
Training needs no master between changes.
"""

import json
import os
import signal
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import zmq

from concertina.core.channel import Channel
from concertina.core.errors import ConcertinaError, Deposed, StoreError
from concertina.core.process import die_with_parent
from concertina.master import machine, state_json
from concertina.master.machine_types import Change, Command, Event, PauseOver, Progressed, State
from concertina.master.pause_clock import PauseClock
from concertina.master.speed_watch import Sign, SpeedWatch
from concertina.master.words import FROM_MASTER, LAUNCHER, decode, event_of, name_of, number_of, seal, words_of
from concertina.store import Leadership, Store, open_store

LOOPBACK = "127.0.0.1"  # where a master listens whose workers are all on its machine
TTL_SECONDS = 1.5  # of the leader's lease
BIND_SECONDS = 5.0
POLL_MS = 50
LOOK_SECONDS = 0.2
LINGER_SECONDS = 5.0  # a master whose job is over stays this long for the last confirmations


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSpec:
    """What a master must know of its job before anything has happened."""

    virtual: int
    workers: int
    schedule: tuple[tuple[int, int], ...] = ()
    at_step: int = 0
    minimum: int = 1
    maximum: int = 0  # 0: as many as there are virtual workers
    resume: bool = False
    silence_s: float = 10.0  # a worker that says nothing for so long is taken for lost
    stall_s: float = 300.0  # so is one that others have waited for so long within a step
    arrive_s: float = 900.0  # and one that has not said a word for so long after its start

    def to_json(self) -> str:
        fields = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return json.dumps(fields)

    @classmethod
    def from_json(cls, text: bytes) -> "JobSpec":
        raw = json.loads(text)
        return cls(**{**raw, "schedule": tuple((step, workers) for step, workers in raw["schedule"])})


def spec_key(job: str) -> str:
    return f"jobs/{job}/spec"


def state_key(job: str) -> str:
    return f"jobs/{job}/state"


def address_key(job: str) -> str:
    """Where workers find the master: its address and fencing number."""
    return f"jobs/{job}/master"


class MasterService:
    """One master's time in office."""

    def __init__(
        self, store: Store, job: str, key: str, leadership: Leadership, host: str = LOOPBACK, port: int = 0
    ) -> None:
        self._store = store
        self._job = job
        self._key = key
        self._leadership = leadership
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.IPV6, int(":" in host))
        self._address = _bind(self._socket, host, port)
        self._peers: dict[str, bytes] = {}  # name -> connection
        self._channels: dict[str, Channel] = {}
        self._over_since = 0.0
        self._spec, self._state = self._take_over()
        self._watch = SpeedWatch(self._spec.silence_s, self._spec.stall_s, self._spec.arrive_s)
        self._pauses = PauseClock()
        self._looked_at = 0.0

    def _take_over(self) -> tuple[JobSpec, State]:
        found = self._store.get(spec_key(self._job))
        if found is None:
            raise ConcertinaError(f"the store knows no job {self._job!r}")
        spec = JobSpec.from_json(found.value)
        saved = self._store.get(state_key(self._job))
        if saved is not None:
            raw = json.loads(saved.value)
            self._channels = {name: Channel.from_json(c) for name, c in raw["channels"].items()}
            state = state_json.load(raw["state"])
            self._save(state)
        else:
            schedule = tuple(Change(step, workers) for step, workers in spec.schedule)
            state, commands = machine.start(
                spec.virtual, spec.workers, schedule, spec.at_step, spec.minimum, spec.maximum, spec.resume
            )
            frames = self._put(commands)
            self._save(state)
            self._send(frames)
        place = json.dumps({"address": self._address, "fence": self._leadership.fence})
        self._leadership.put_fenced(address_key(self._job), place.encode())
        return spec, state

    def _save(self, state: State) -> None:
        channels = {name: channel.to_json() for name, channel in self._channels.items()}
        blob = json.dumps({"state": state_json.dump(state), "channels": channels})
        self._leadership.put_fenced(state_key(self._job), blob.encode())

    # -- the loop ----------------------------------------------------------------------------------------------------

    def serve(self) -> None:
        """Until the job is over and everybody knows it. Raises Deposed when another master has taken over."""
        try:
            while not self._done():
                self._renew()
                if self._socket.poll(POLL_MS):
                    self._receive()
                self._say_again()
                self._look_around()
        finally:
            self._socket.close()
            self._context.term()

    def _done(self) -> bool:
        if self._state.phase not in machine.OVER:
            return False
        launcher = self._channels.get(LAUNCHER)
        self._over_since = self._over_since or time.monotonic()
        confirmed = launcher is not None and not launcher.unconfirmed
        return confirmed or time.monotonic() - self._over_since > LINGER_SECONDS

    def _renew(self) -> None:
        from concertina.store.clock import since_boot

        if since_boot() >= self._leadership.renew_at:
            self._leadership.renew()
        self._leadership.check()

    def _receive(self) -> None:
        for _ in range(256):
            try:
                peer, payload = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            except ValueError:
                continue
            frame = decode(payload, self._key)
            if frame is not None:
                self._on_frame(peer, frame)

    def _on_frame(self, peer: bytes, frame: dict[str, Any]) -> None:
        name = frame["from"]
        if self._has_given_up(name):
            data = seal({"gone": True, "fence": self._leadership.fence}, self._key, FROM_MASTER)
            self._socket.send_multipart([peer, data], zmq.NOBLOCK)
            return
        channel = self._channels.setdefault(name, Channel())
        if self._peers.get(name) != peer:
            channel.said_at = 0.0  # a new connection: what waited for it need not wait longer
        self._peers[name] = peer
        body = channel.take(frame)
        if body is not None:
            self._on_message(name, body)
        if name != LAUNCHER:
            self._on_sign_of_life(number_of(name), frame.get("beat"))
        self._send([(name, channel.nod())])

    def _has_given_up(self, name: str) -> bool:
        """A worker whose end was reported speaks: its host was cut off for a while. It must not take part any more."""
        return name != LAUNCHER and name not in self._channels and number_of(name) not in self._state.workers

    def _on_message(self, name: str, body: Any) -> None:
        event = event_of(name, body)
        if event is not None:
            self._transition(event)
        else:
            self._save(self._state)  # a message that is confirmed must be known to be taken
        if name == LAUNCHER and body["op"] == "exited":
            self._forget(name_of(body["worker"]))

    def _forget(self, name: str) -> None:
        """Its number is never used again."""
        self._channels.pop(name, None)
        self._peers.pop(name, None)
        self._watch.forget(number_of(name))

    def _transition(self, event: Event, save: bool = True) -> None:
        before = self._state
        self._state, commands = machine.handle(before, event)
        frames = self._put(commands)
        if self._state.phase in machine.OVER and before.phase not in machine.OVER:
            frames += self._put_raw(
                LAUNCHER,
                {
                    "op": "over",
                    "phase": self._state.phase,
                    "exit": self._state.exit_code,
                    "failure": self._state.failure,
                },
            )
        if save or commands:
            self._save(self._state)
        self._send(frames)

    # -- words out ---------------------------------------------------------------------------------------------------

    def _put(self, commands: tuple[Command, ...]) -> list[tuple[str, dict[str, Any]]]:
        frames: list[tuple[str, dict[str, Any]]] = []
        for command in commands:
            for name, body in words_of(command):
                frames += self._put_raw(name, body)
        return frames

    def _put_raw(self, name: str, body: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
        channel = self._channels.setdefault(name, Channel())
        return [(name, channel.say(body, time.monotonic()))]

    def _say_again(self) -> None:
        now = time.monotonic()
        for name, channel in self._channels.items():
            if name in self._peers:
                self._send([(name, frame) for frame in channel.again(now)])

    def _send(self, frames: list[tuple[str, dict[str, Any]]]) -> None:
        for name, frame in frames:
            peer = self._peers.get(name)
            if peer is None:
                continue  # it will be said again when we hear of it
            data = seal({**frame, "fence": self._leadership.fence}, self._key, FROM_MASTER)
            self._socket.send_multipart([peer, data], zmq.NOBLOCK)

    def _on_sign_of_life(self, worker: int, beat: Mapping[str, Any] | None) -> None:
        sign = None if beat is None else Sign.from_json(beat)
        self._watch.heard(worker, time.monotonic(), sign)
        if sign is not None:
            self._transition(Progressed(worker, sign.step, sign.pace), save=False)

    def _look_around(self) -> None:
        """Several times a second: who is silent, stands still or is slow?"""
        now = time.monotonic()
        if now - self._looked_at < LOOK_SECONDS or self._state.phase in machine.OVER:
            return
        self._looked_at = now
        for finding in self._watch.findings(self._state, now):
            self._transition(finding)
        if self._pauses.is_over(self._state, now):
            self._transition(PauseOver())


def _bind(socket: "zmq.Socket[bytes]", host: str, port: int) -> str:
    """The address at which this master can be reached. A given port may be held by the master before for a moment."""
    at = f"tcp://[{host}]" if ":" in host else f"tcp://{host}"
    if not port:
        return f"{at}:{socket.bind_to_random_port(at)}"
    until = time.monotonic() + BIND_SECONDS
    while True:
        try:
            socket.bind(f"{at}:{port}")
            return f"{at}:{port}"
        except zmq.ZMQError as error:
            if time.monotonic() > until:
                raise ConcertinaError(f"the master cannot listen at {at}:{port} ({error})") from None
            time.sleep(0.05)


def main() -> int:
    """Wait for the lease, then serve until the job is over or somebody else is master."""
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal's Ctrl-C is for whoever started us
    job, key = os.environ["CONCERTINA_JOB"], os.environ["CONCERTINA_KEY"]
    host = os.environ.get("CONCERTINA_HOST") or LOOPBACK
    port = int(os.environ.get("CONCERTINA_PORT") or 0)
    ttl = float(os.environ.get("CONCERTINA_LEASE_S", TTL_SECONDS))
    with open_store(os.environ["CONCERTINA_STORE"]) as store:
        parent = os.getppid()
        while os.getppid() == parent:
            leadership = Leadership.acquire(store, f"master-{job}", ttl, holder=str(os.getpid()), wait_s=5.0)
            if leadership is None:
                continue
            print(f"master {os.getpid()} in office, fence {leadership.fence}", file=sys.stderr, flush=True)
            try:
                MasterService(store, job, key, leadership, host, port).serve()
            except Deposed as error:
                print(error, file=sys.stderr, flush=True)
                continue
            except StoreError as error:
                print(f"store: {error}", file=sys.stderr, flush=True)
                continue
            leadership.resign()
            return 0
    return 1


if __name__ == "__main__":
    sys.exit(main())
