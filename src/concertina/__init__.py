"""Elastic deep-learning training that plays the same tune at any size.

A training script needs one name from here, `join`; it is loaded on first use, so that importing the package (and
with it every start of the command line) stays free of torch.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from concertina.runtime import Session, join

__version__ = "0.1.0"
__all__ = ["Session", "join", "__version__"]


def __getattr__(name: str) -> Any:
    if name in {"Session", "join"}:
        from concertina import runtime

        return getattr(runtime, name)
    raise AttributeError(f"module 'concertina' has no attribute {name!r}")
