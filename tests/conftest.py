"""What every test stands on: no process or thread outlives its test, and CI allows no skips."""

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

LEAVE_SECONDS = 5.0


def children() -> set[int]:
    """Processes below this one, by pid; not zombies, and not the one that multiprocessing keeps until the end."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                command = (entry / "cmdline").read_bytes()
            except OSError:
                continue
            if fields[0] != "Z" and b"resource_tracker" not in command:
                parents[int(entry.name)] = int(fields[1])
    found, frontier = set(), {os.getpid()}
    while frontier:
        frontier = {pid for pid, parent in parents.items() if parent in frontier} - found
        found |= frontier
    return found


@pytest.fixture(autouse=True)
def no_leaks(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fails a test that leaves a process or a thread behind. Fixtures of wider scope are started before it looks."""
    for name in request.fixturenames:
        if name in ("backend",):
            request.getfixturevalue(name)
    processes, threads = children(), set(threading.enumerate())
    yield
    patience = time.monotonic() + LEAVE_SECONDS
    while time.monotonic() < patience:
        left = children() - processes
        alive = [t for t in threading.enumerate() if t not in threads and not t.daemon]
        if not left and not alive:
            return
        time.sleep(0.05)
    names = {pid: Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ")[:120] for pid in left}
    pytest.fail(f"left behind: processes {names}, threads {alive}")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    report = yield
    if os.environ.get("CI") == "true" and report.skipped and not hasattr(report, "wasxfail"):
        report.outcome = "failed"
        report.longrepr = f"skipped in CI: {report.longrepr}"
    return report
