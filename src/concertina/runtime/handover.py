"""What the main worker hands to newcomers at a change, besides what they read from memory themselves."""

import io
from typing import Any

import torch

from concertina.core.errors import ConcertinaError
from concertina.runtime.checkpoint import to_bytes
from concertina.runtime.prepared import Prepared
from concertina.runtime.segments import Segment
from concertina.runtime.state_map import describe


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
    """Lays the state out for newcomers: where to read the large part, and the rest of it; or all, if that is asked."""
    memory = None if whole else describe(prepared)
    state = {"rest": rest, "memory": memory, "small": small_state(prepared)}
    if memory is None:  # on a GPU, or in some form that cannot be read from outside
        state["whole"] = prepared.state()
    data = to_bytes(state)
    segment = Segment.create(len(data) + 8)
    segment.memory[:8] = len(data).to_bytes(8, "little")
    segment.memory[8 : 8 + len(data)] = data
    return segment


def receive(address: str) -> dict[str, Any]:
    """What was handed over; executes nothing of it."""
    try:
        segment = Segment.open(address)
    except OSError as error:
        raise ConcertinaError(f"the worker that handed over the state is gone ({error})") from None
    size = int.from_bytes(segment.memory[:8], "little")
    state: dict[str, Any] = torch.load(io.BytesIO(segment.memory[8 : 8 + size]), map_location="cpu", weights_only=True)
    return state
