"""Hooks on the user's model that stay with this very model."""

from collections.abc import Callable
from typing import Any


class InertHook:
    """What a hook of ours becomes in a copy of the model: nothing."""

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        return None


class ModelHook:
    """A forward hook that does not follow the model into copies and pickles (an EMA copy must not train)."""

    def __init__(self, function: Callable[..., None]) -> None:
        self._function = function

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        self._function(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> InertHook:
        return InertHook()

    def __reduce__(self) -> tuple[type[InertHook], tuple[()]]:
        return InertHook, ()
