"""A job's state as JSON and back: what a master leaves to its successor."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from concertina.master.machine_types import Change, Pending, Phase, Stage, State, Worker


def dump(state: State) -> dict[str, Any]:
    return asdict(state)


def load(raw: Mapping[str, Any]) -> State:
    pending = raw["pending"]
    plain = _with_tuples(raw)
    plain["phase"] = Phase(raw["phase"])
    plain["shares"] = _shares(raw["shares"])
    plain["workers"] = {int(n): Worker(**w) for n, w in raw["workers"].items()}
    plain["schedule"] = tuple(Change(**change) for change in raw["schedule"])
    for name in ("stopped", "exits", "speeds"):
        plain[name] = {int(n): value for n, value in raw[name].items()}
    plain["pending"] = None if pending is None else _load_pending(pending)
    return State(**plain)


def _load_pending(raw: Mapping[str, Any]) -> Pending:
    plain = _with_tuples(raw)
    return Pending(**{**plain, "stage": Stage(raw["stage"]), "shares": _shares(raw["shares"])})


def _with_tuples(raw: Mapping[str, Any]) -> dict[str, Any]:
    return {name: tuple(value) if isinstance(value, list) else value for name, value in raw.items()}


def _shares(raw: list[list[int]]) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(block) for block in raw)
