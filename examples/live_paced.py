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

from concertina.runtime.loader import Pass


def pace(seconds):
    """From now on, a loop body begins at least `seconds` after the one before it began."""
    take = Pass.__next__
    began = 0.0

    def paced(self):
        nonlocal began
        batch = take(self)
        time.sleep(max(0.0, began + seconds - time.monotonic()))
        began = time.monotonic()
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
