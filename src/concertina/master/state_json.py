"""A job's state as JSON and back: what a master leaves to its successor."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from concertina.master.machine import Change, Pending, Phase, Stage, State, Worker


def dump(state: State) -> dict[str, Any]:
    return asdict(state)


def load(raw: Mapping[str, Any]) -> State:
    pending = raw["pending"]
    plain = {**raw}
    plain["phase"] = Phase(raw["phase"])
    plain["members"] = tuple(raw["members"])
    plain["shares"] = tuple(tuple(block) for block in raw["shares"])
    plain["workers"] = {int(n): Worker(**w) for n, w in raw["workers"].items()}
    plain["schedule"] = tuple(Change(**change) for change in raw["schedule"])
    plain["stopped"] = {int(n): g for n, g in raw["stopped"].items()}
    plain["exits"] = {int(n): code for n, code in raw["exits"].items()}
    for name in ("formed", "dropped", "lost"):
        plain[name] = tuple(raw[name])
    plain["pending"] = None if pending is None else _load_pending(pending)
    return State(**plain)


def _load_pending(raw: Mapping[str, Any]) -> Pending:
    plain = {**raw, "stage": Stage(raw["stage"])}
    for name in ("members", "joiners", "leavers", "built", "synced", "switched"):
        plain[name] = tuple(raw[name])
    return Pending(**plain)
