"""What the master's machine hears and says, as messages: the vocabulary between master, launcher and workers. Pure."""

import hmac
import json
from collections.abc import Mapping
from typing import Any

from concertina.master.machine_types import (
    Abandon,
    Answer,
    Arm,
    AskToStop,
    BuildFailed,
    Built,
    CheckpointAsked,
    Command,
    Dropped,
    Event,
    Form,
    InterruptAsked,
    KillWorkers,
    NewcomerReady,
    PostOffered,
    Release,
    RemovalAsked,
    ResizeAsked,
    Save,
    StartWorker,
    Stopped,
    Switched,
    Synced,
    TellLost,
    TellStory,
    ToWorkers,
    WorkerArrived,
    WorkerExited,
    WorkerFailed,
)

LAUNCHER = "launcher"
FROM_MASTER, FROM_MEMBER = "master", "member"  # who speaks; signed with every frame
SIGNATURE_BYTES = 32
SCRIPT = "script"  # the name of every request that the training script makes itself


def name_of(worker: int) -> str:
    return f"worker-{worker}"


def number_of(name: str) -> int:
    return int(name.removeprefix("worker-"))


def seal(frame: Mapping[str, Any], key: str, role: str) -> bytes:
    """A frame as bytes, signed with the job's key, which itself never travels.

    The role (master or member) is part of what is signed: nobody can send us our own words back.
    """
    payload = json.dumps(frame).encode()
    return _signature(payload, key, role) + payload


def unseal(data: bytes, key: str, role: str) -> dict[str, Any] | None:
    """A frame of one who knows the job's key; anything else is nobody's."""
    payload = data[SIGNATURE_BYTES:]
    if not hmac.compare_digest(data[:SIGNATURE_BYTES], _signature(payload, key, role)):
        return None
    try:
        frame = json.loads(payload)
    except ValueError:
        return None
    return frame if isinstance(frame, dict) else None


def _signature(payload: bytes, key: str, role: str) -> bytes:
    return hmac.digest(key.encode(), role.encode() + b":" + payload, "sha256")


def decode(data: bytes, key: str) -> dict[str, Any] | None:
    """A worker's or the launcher's frame, as the master receives it."""
    frame = unseal(data, key, FROM_MEMBER)
    try:
        if frame is None or not isinstance(frame["from"], str):
            return None
        if frame["from"] != LAUNCHER:
            number_of(frame["from"])
    except (ValueError, KeyError, TypeError):
        return None
    return frame


def event_of(name: str, body: Any) -> Event | None:
    """A message as an event of the"""
    op = body["op"]
    if name == LAUNCHER:
        return _launcher_event(op, body)
    worker = number_of(name)
    if op == "arrived":
        return WorkerArrived(worker, body["post"], body["desk"])
    if op == "offered":
        return PostOffered(worker, body["post"])
    if op == "ready":
        return NewcomerReady(worker)
    if op == "built":
        return Built(worker, body["generation"])
    if op == "build_failed":
        return BuildFailed(worker, body["generation"], body["error"])
    if op == "synced":
        return Synced(worker, body["generation"])
    if op == "switched":
        return Switched(worker, body["generation"], body["step"])
    if op == "stopped":
        return Stopped(worker, body["generation"], body["step"])
    if op == "dropped":
        return Dropped(worker, body["generation"])
    if op == "resize":
        return ResizeAsked(SCRIPT, body["workers"])
    return None


def _launcher_event(op: str, body: Any) -> Event | None:
    if op == "exited":
        return WorkerExited(body["worker"], body["code"])
    if op == "failed":
        return WorkerFailed(body["worker"], body["error"])
    if op == "interrupt":
        return InterruptAsked()
    if op == "resize":
        return ResizeAsked(body["request"], body["workers"])
    if op == "remove":
        return RemovalAsked(body["request"], tuple(body["workers"]), body["replaced"], body["reason"])
    if op == "checkpoint":
        return CheckpointAsked(body["request"])
    return None


def words_of(command: Command) -> list[tuple[str, dict[str, Any]]]:
    """A command as messages: to whom, and what."""
    if isinstance(command, StartWorker):
        fields = {name: getattr(command, name) for name in command.__dataclass_fields__}
        return [(LAUNCHER, {"op": "start", **fields})]
    if isinstance(command, KillWorkers):
        return [(LAUNCHER, {"op": "kill", "workers": list(command.workers), "reason": command.reason})]
    if isinstance(command, AskToStop):
        return [(LAUNCHER, {"op": "stop", "reason": command.reason})]
    if isinstance(command, TellStory):
        return [(LAUNCHER, {"op": "story", "event": command.event, **command.fields})]
    if isinstance(command, Answer):
        answer = {"request": command.request, "accepted": command.accepted, "reason": command.reason}
        return [(LAUNCHER, {"op": "answer", **answer})]
    return [(name_of(n), _word(command)) for n in command.to]


def _word(command: ToWorkers) -> dict[str, Any]:
    if isinstance(command, Form):
        return {"op": "form", "formation": command.formation.to_json(), "at_once": command.at_once}
    if isinstance(command, Arm):
        return {"op": "arm", "generation": command.generation}
    if isinstance(command, Abandon):
        return {"op": "abandon", "generation": command.generation}
    if isinstance(command, Release):
        return {"op": "release", "generation": command.generation, "next_hold": command.next_hold}
    if isinstance(command, TellLost):
        return {"op": "lost", "lost": list(command.lost)}
    if isinstance(command, Save):
        return {"op": "save"}
    return {"op": "dismiss"}
