"""What the main worker hands to newcomers at a change, besides what they read from memory themselves."""

import io
import json
from typing import Any

import torch

from concertina.core.errors import ConcertinaError
from concertina.runtime.checkpoint import plain, to_bytes
from concertina.runtime.prepared import Prepared
from concertina.runtime.segments import Segment
from concertina.runtime.state_map import items, others, readable


def small_state(prepared: Prepared) -> dict[str, Any]:
    """Everything replicated but parameters and the optimizers' tensors."""
    return {
        "groups": [
            [{k: v for k, v in group.items() if k != "params"} for group in o.param_groups] for o in prepared.optimizers
        ],
        "schedulers": [s.state_dict() for s in prepared.schedulers],
        "scalers": [s.state_dict() for s in prepared.scalers],
        "registered": {name: thing.state_dict() for name, thing in prepared.registered.items()},
    }


def load_small_state(prepared: Prepared, state: dict[str, Any]) -> None:
    for optimizer, groups in zip(prepared.optimizers, state["groups"], strict=True):
        for group, values in zip(optimizer.param_groups, groups, strict=True):
            group.update(values)
    for kind in ("schedulers", "scalers"):
        for thing, saved in zip(getattr(prepared, kind), state[kind], strict=True):
            thing.load_state_dict(saved)
    for name, thing in prepared.registered.items():
        thing.load_state_dict(state["registered"][name])


def hand_over(prepared: Prepared, rest: dict[str, Any], whole: bool) -> Segment:
    """Lays out what newcomers cannot read from memory themselves; or all of the state, if that is asked."""
    kept = None if whole or not all(readable(item.tensor) for item in items(prepared)) else others(prepared)
    state = {"rest": rest, "small": small_state(prepared), "others": kept}
    if kept is None:  # in some form that cannot be read from outside
        state["whole"] = prepared.state()
    data = pack(state)
    segment = Segment.create(len(data) + 8)
    segment.memory[: len(data) + 8] = len(data).to_bytes(8, "little") + data
    return segment


def receive(address: str) -> dict[str, Any]:
    """What was handed over; executes nothing of it."""
    try:
        segment = Segment.open(address)
    except OSError as error:
        raise ConcertinaError(f"the worker that handed over the state is gone ({error})") from None
    size = int.from_bytes(segment.memory[:8], "little")
    state: dict[str, Any] = unpack(segment.memory[8 : 8 + size])
    return state


# -- as bytes: torch's own format takes milliseconds, which everybody would wait for ---------------------------------


class _NotPlainError(Exception):
    """A value that JSON cannot carry."""


def pack(state: Any) -> bytes:
    """Plain values as JSON that keeps tuples and keys as they are; with tensors among them, as torch does it."""
    state = plain(state)
    try:
        return b"J" + json.dumps(_to_json(state), separators=(",", ":")).encode()
    except _NotPlainError:
        return b"T" + to_bytes(state)


def unpack(data: bytes) -> Any:
    if data[:1] == b"J":
        return _from_json(json.loads(data[1:]))
    return torch.load(io.BytesIO(data[1:]), map_location="cpu", weights_only=True)


def _to_json(value: Any) -> Any:
    kind = type(value)
    if value is None or kind in (bool, int, float, str):
        return value
    if kind is list:
        return ["l", *map(_to_json, value)]
    if kind is tuple:
        return ["t", *map(_to_json, value)]
    if kind is dict:
        return ["d", *([_to_json(k), _to_json(v)] for k, v in value.items())]
    raise _NotPlainError


def _from_json(value: Any) -> Any:
    if not isinstance(value, list):
        return value
    mark, *parts = value
    if mark == "d":
        return {_from_json(k): _from_json(v) for k, v in parts}
    inner = [_from_json(part) for part in parts]
    return inner if mark == "l" else tuple(inner)
