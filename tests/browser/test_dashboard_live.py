"""The whole thing as a person meets it: `concertina up`, a browser, a real job that trains, grows and is cancelled."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.browser.conftest import Browser

SCRIPT = """
import time
import torch
import concertina as ct
from torch import nn
from torch.utils.data import TensorDataset

torch.manual_seed(0)
session = ct.join()
model = nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
model, optimizer = session.prepare(model, optimizer)
loader = session.loader(TensorDataset(torch.randn(256, 8), torch.randn(256, 1)), batch_size=4)
for epoch in session.epochs(1000):
    for x, y in loader:
        loss = (model(x) - y).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        session.log(loss=loss)
        time.sleep(0.05)
    print(f"epoch {epoch} is done", flush=True)
"""
WATCH = """
const count = document.querySelector(".bellows .count");
window.seen = [count.textContent];
new MutationObserver(() => window.seen.push(count.textContent)).observe(count, {childList: true, characterData: true});
"""
UP_SECONDS = 60.0
DOWN_SECONDS = 90.0


def of_cluster(state: Path) -> list[int]:
    """Every process that was started for it, also those that have left the family."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                if str(state).encode() in (entry / "cmdline").read_bytes():
                    found.append(int(entry.name))
            except OSError:
                continue
    return found


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[str]:
    """The address of a cluster of two slots."""
    state = tmp_path / "state"
    log = (tmp_path / "up.log").open("w")
    program = [sys.executable, "-c", "from concertina.cli import main; main()"]
    command = [*program, "up", "--slots", "2", "--port", "0", "--state", str(state)]
    up = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env={**os.environ, "OMP_NUM_THREADS": "1"})
    try:
        end = time.monotonic() + UP_SECONDS
        while not (state / "server.json").exists():
            if up.poll() is not None or time.monotonic() > end:
                pytest.fail(f"it did not come up: {(tmp_path / 'up.log').read_text()}")
            time.sleep(0.1)
        yield json.loads((state / "server.json").read_text())["url"]
        up.send_signal(signal.SIGTERM)
        assert up.wait(DOWN_SECONDS) == 0, (tmp_path / "up.log").read_text()
    finally:
        if up.poll() is None:
            up.kill()
            up.wait()
        log.close()
        left = of_cluster(state)
        for pid in left:
            os.kill(pid, signal.SIGKILL)
    assert not left


def test_submit_watch_it_grow_read_why_and_cancel(cluster: str, browser: Browser, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    browser.driver.get(f"{cluster}/#/ask")
    browser.is_live()
    browser.find("#ask-script").send_keys(str(script))
    browser.find("#ask-virtual").clear()
    browser.find("#ask-virtual").send_keys("2")
    browser.find("#ask-name").send_keys("little")
    browser.find("#submit-now").click()
    browser.reads("h1", "little")
    browser.until(lambda: browser.all(".bellows .count"), "the job's bellows")
    browser.run(WATCH)
    browser.reads(".bellows", "2 of 2")
    assert len(browser.run("return window.seen")) > 1  # it grew before our eyes
    grown = browser.until(lambda: [line.text for line in browser.all("[data-move=grew]")], "a story of growing")
    assert "2 workers" in grown[0]
    assert "1 worker" in grown[-1]
    reason = browser.text("#reason")
    assert len(reason) > 10
    assert reason.endswith(".")
    browser.until(lambda: browser.all(".charts .plot .trace"), "the loss drawn from what it logs")
    browser.reads(".log", "epoch 0 is done")
    browser.find("[data-view=overview]").click()
    browser.reads(".jobs .why", reason)
    browser.reads("#pulse", "2 of 2 slots at work")
    browser.find(".jobs a.stop").click()
    browser.until(lambda: browser.all("#cancel"), "the job's page").pop().click()
    browser.reads("dialog[open]", "Cancel little?")
    browser.find("dialog .danger").click()
    browser.reads(".jobtop .chip", "cancelled")
    browser.reads("#pulse", "0 of 2 slots at work")
    browser.until(lambda: not browser.find("#cancel").is_displayed(), "nothing left to cancel")
