"""What reading a sharded stream costs a step, and what reading ahead saves.

    python benchmarks/shards.py

One process, several virtual workers. Agreeing: microseconds per step to find out who reads what, apart from waiting for
records (with several workers one meeting of all comes on top). Reading ahead: an epoch whose pieces take a while to
read, beside the time that training alone and reading alone would take.
"""

import time

import torch
from torch import nn

from concertina.core.env import WorkerEnv
from concertina.runtime import Session
from concertina.runtime.shards import ShardStream

PIECES, RECORDS = 48, 96  # of which each has so many records
BATCH = 8


def epoch(virtual: int, read_s: float, turn_s: float) -> tuple[float, float, int]:
    """Seconds of an epoch, seconds of it spent agreeing, steps."""
    session = Session(WorkerEnv(virtual=virtual))
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session.prepare(model, optimizer)

    def read(item: int) -> torch.Tensor:
        time.sleep(read_s)
        return torch.full((RECORDS, 4), float(item))

    stream = session.shards(range(PIECES), read, batch_size=BATCH)
    agreeing = _timed(stream)
    began = time.monotonic()
    for _ in session.epochs(1):
        for x in stream:
            time.sleep(turn_s)
            model(x).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    took = time.monotonic() - began
    session.close()
    return took, agreeing[0], session.step


def _timed(stream: ShardStream) -> list[float]:
    total, inside, begin_round, look = [0.0], [False], stream.begin_round, stream.feed._reader.look

    def waiting(v: int, count: int) -> list[int]:
        began = time.perf_counter()
        found = look(v, count)
        total[0] -= (time.perf_counter() - began) * inside[0]
        return found

    def agreeing() -> None:
        began, inside[0] = time.perf_counter(), True
        begin_round()
        total[0] += time.perf_counter() - began
        inside[0] = False

    stream.feed._reader.look = waiting  # type: ignore[method-assign]
    stream.begin_round = agreeing  # type: ignore[method-assign]
    return total


def main() -> None:
    torch.set_num_threads(1)
    print("virtual workers  steps  agreeing, us per step")
    for virtual in (1, 4, 16, 64):
        _, agreeing, steps = min((epoch(virtual, 0.0, 0.0) for _ in range(3)), key=lambda found: found[1])
        print(f"{virtual:15}  {steps:5}  {1e6 * agreeing / steps:21.0f}")
    read_s, turn_s = 0.02, 0.002
    both = min(epoch(4, read_s, turn_s)[0] for _ in range(3))  # the least disturbed of three
    alone = min(epoch(4, 0.0, turn_s)[0] for _ in range(3))
    print(f"reading takes {PIECES * read_s:.2f} s, training {alone:.2f} s, both {both:.2f} s")


if __name__ == "__main__":
    main()
