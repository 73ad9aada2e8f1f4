"""Runs another example at the pace of a device that is slower than this machine: each batch takes so long.

    concertina run --virtual 4 --workers 2 examples/live_paced.py 0.1 examples/digits.py --epochs 2

A worker that waits for its GPU leaves the CPU to others. These waits stand for that, so that many jobs of a
demonstration (`concertina up --demo`, benchmarks/live_trace.py) fit on two cores and still speed up with every worker.
Waiting changes no number that is computed: the result is, to the bit, the one without it.
"""

import os
import runpy
import sys
import time
from collections import deque

from concertina.runtime.loader import Pass


class Pace:
    """Holds loop bodies back, so that the n-th of a step ends n times `seconds` after the step began.

    All workers begin a step at the same moment, so they keep the same time, as equal devices would.
    """

    def __init__(self, seconds):
        self.seconds = seconds
        self.began = self.handed = 0.0
        self.bodies = deque([0.0], maxlen=20)  # how long the last ones took, waiting for others included

    def hold_back(self, turn):
        """`turn` counts from 1 within a step."""
        now = time.monotonic()
        if turn == 1:
            self.began = now
        time.sleep(max(0.0, self.began + turn * self.seconds - min(self.bodies) - now))
        self.handed = time.monotonic()

    def note_body(self):
        self.bodies.append(time.monotonic() - self.handed)


def pace(seconds):
    """From now on, every loop body takes at least `seconds`."""
    take, here = Pass.__next__, Pace(seconds)

    def paced(self):
        here.note_body()
        batch = take(self)
        here.hold_back(self._turn)
        return batch

    Pass.__next__ = paced


def main():
    if len(sys.argv) < 3:
        sys.exit("usage: live_paced.py SECONDS SCRIPT [ARGS]")
    pace(float(sys.argv[1]))
    sys.argv = sys.argv[2:]
    sys.path[0] = os.path.dirname(os.path.abspath(sys.argv[0]))
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
