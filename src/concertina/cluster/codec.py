"""Records as JSON and back, by the types of their fields. Unknown fields are passed over: newer writers add some."""

import json
import types
from dataclasses import asdict, fields, is_dataclass
from enum import Enum
from functools import cache
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

T = TypeVar("T")


def dump(record: Any) -> bytes:
    return json.dumps(asdict(record), separators=(",", ":"), default=_plain).encode()


def _plain(value: Any) -> Any:
    if isinstance(value, Enum):
        return value.value
    raise TypeError(f"{type(value).__name__} can not be kept in a record")


def load(kind: type[T], raw: bytes) -> T:
    """Raises ValueError, KeyError or TypeError if it is not such a record."""
    return build(kind, json.loads(raw))


def build(kind: type[T], plain: Any) -> T:
    hints = _hints(kind)  # type: ignore[arg-type]  # a class can be hashed
    return kind(**{name: _value(hints[name], value) for name, value in plain.items() if name in hints})


@cache
def _hints(kind: type) -> dict[str, Any]:
    hints = get_type_hints(kind)
    return {field.name: hints[field.name] for field in fields(kind)}


def _value(hint: Any, plain: Any) -> Any:
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return None if plain is None else _value(next(a for a in args if a is not type(None)), plain)
    if origin is tuple:
        if args[-1] is Ellipsis:
            return tuple(_value(args[0], item) for item in plain)
        return tuple(_value(arg, item) for arg, item in zip(args, plain, strict=True))
    if origin is dict:
        return {args[0](key): _value(args[1], item) for key, item in plain.items()}
    if is_dataclass(hint):
        return build(hint, plain)  # type: ignore[arg-type]
    if isinstance(hint, type) and issubclass(hint, Enum):
        return hint(plain)
    return float(plain) if hint is float else plain
