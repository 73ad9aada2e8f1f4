"""The training runtime: what a worker process imports. It needs torch, NumPy, pyzmq and the standard library."""

from concertina.runtime.session import Session, join

__all__ = ["Session", "join"]
