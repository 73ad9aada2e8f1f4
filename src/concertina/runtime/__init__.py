"""The training runtime: what a worker process imports. It needs torch, NumPy and the standard library, nothing else."""

from concertina.runtime.session import Session, join

__all__ = ["Session", "join"]
