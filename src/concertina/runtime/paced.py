"""A training script whose worker is at most one step ahead of its GPU: started as its script by `concertina profile`.

    paced.py SCRIPT [ARGS]

A worker hands its GPU work and goes on. Alone, with nothing to wait for, it may report many steps that have not been
computed yet, which says nothing about speed. Here, the end of a step waits until the one before has been computed.
"""

import os
import runpy
import sys

import torch

from concertina.runtime.boundary import Boundary


def pace() -> None:
    end_round = Boundary.end_round
    done: list[torch.cuda.Event] = []

    def paced(boundary: Boundary) -> None:
        if torch.cuda.is_initialized():
            done.append(torch.cuda.Event())
            done[-1].record()
            if len(done) > 1:
                done.pop(0).synchronize()
        end_round(boundary)

    Boundary.end_round = paced  # type: ignore[method-assign,assignment]


def main() -> None:
    sys.argv = sys.argv[1:]
    sys.path[0] = os.path.dirname(sys.argv[0])
    pace()
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
