"""A worker that the operating system allows a third of the processor it had: fewer virtual workers within 20 steps."""

import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from time import monotonic
from typing import Any

import pytest

from concertina.backends.local import LocalBackend
from concertina.runner import Run, RunSettings

COMPUTES = """
import time, torch, concertina as ct
from torch import nn
from torch.utils.data import TensorDataset

session = ct.join()
model = nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
model, optimizer = session.prepare(model, optimizer)
loader = session.loader(TensorDataset(torch.randn(64, 8), torch.randn(64, 1)), batch_size=4)
for epoch in session.epochs(1000):
    for x, y in loader:
        until = time.thread_time() + 0.06  # of the processor, not of the wall clock
        while time.thread_time() < until:
            pass
        (model(x) - y).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
"""
LIMIT_SECONDS = 120.0
GROUPS = Path("/sys/fs/cgroup")

Limit = Callable[[int, float], None]


@pytest.fixture
def limit() -> Iterator[Limit]:
    """Puts a process into a control group of its own that may use so much of a processor."""
    found = next((root for root in (GROUPS / "cpu", GROUPS) if (root / "cgroup.procs").exists()), None)
    if found is None or not os.access(found, os.W_OK):
        pytest.skip("no control group can be made here: needs root and a writable /sys/fs/cgroup")
    group = found / f"concertina-test-{os.getpid()}"
    group.mkdir()

    def put(pid: int, share: float) -> None:
        quota = int(100_000 * share)
        if (group / "cpu.cfs_quota_us").exists():
            (group / "cpu.cfs_quota_us").write_text(str(quota))
        else:
            (group / "cpu.max").write_text(f"{quota} 100000")
        (group / "cgroup.procs").write_text(str(pid))

    yield put
    group.rmdir()  # its process has ended


@pytest.mark.slow
def test_a_worker_with_a_third_of_its_processor_gets_fewer_virtual_workers_within_20_steps(
    backend: LocalBackend, tmp_path: Path, limit: Limit
) -> None:
    script = tmp_path / "computes.py"
    script.write_text(COMPUTES)
    events: list[Mapping[str, Any]] = []
    settings = RunSettings(script=script, virtual=4, workers=2, steps=60, run_dir=tmp_path / "run")
    slowed = 0
    patience = monotonic() + LIMIT_SECONDS
    with Run(settings, events.append, backend) as run:
        while not run.turn():
            assert monotonic() < patience, events[-20:]
            step = max((e["step"] for e in events if e["event"] == "step"), default=0)
            if step >= 12 and not slowed:
                slowed = step
                limit(run.workers[1], 1 / 3)
        report = run.close_report()
    assert report.exit == 0, report.error
    dealt = [e for e in events if e["event"] == "generation_started" and e["shares"] == [3, 1]]
    assert dealt, [e for e in events if e["event"] == "generation_started"]
    assert dealt[0]["step"] <= slowed + 20
