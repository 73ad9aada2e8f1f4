"""`concertina up` on a Ray cluster of three hosts: a job that is submitted there is spread over them."""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from ray_hosts import RayHosts, ray_hosts
from several_hosts import SCRIPT

PATIENCE = 240.0
COMMAND = [sys.executable, "-c", "from concertina.cli import main; main()"]


class Cluster:
    """`concertina up --backend ray`, on the head."""

    def __init__(self, hosts: RayHosts, folder: Path) -> None:
        self._hosts, self._folder = hosts, folder
        self._env = {**hosts.env, "RAY_ADDRESS": hosts.address, "XDG_STATE_HOME": str(folder / "state")}
        with (folder / "up.log").open("wb") as log:
            self.process = subprocess.Popen(
                [*hosts.head.prefix, *COMMAND, "up", "--backend", "ray", "--port", "8411"],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=folder,
                env=self._env,
            )

    def ask(self, *words: str) -> Any:
        command = [*self._hosts.head.prefix, *COMMAND, words[0], "--json", *words[1:]]
        env = {**self._env, "CONCERTINA_URL": "http://127.0.0.1:8411"}
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, cwd=self._folder, env=env)
        return json.loads(done.stdout) if done.returncode == 0 and done.stdout else None

    def wait(self, there: Callable[[], Any], what: str) -> Any:
        until = time.monotonic() + PATIENCE
        while True:
            found = there()
            if found:
                return found
            said = (self._folder / "up.log").read_text()[-2000:]
            assert self.process.poll() is None, f"the cluster ended before {what}:\n{said}"
            assert time.monotonic() < until, (
                f"no end of waiting: {what}\n{said}\n{self.ask('jobs')}\n{self.ask('nodes')}"
            )
            time.sleep(0.5)

    def close(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with ray_hosts(tmp_path) as hosts:
        found = Cluster(hosts, tmp_path)
        try:
            yield found
        finally:
            found.close()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_submitted_job_is_spread_over_the_machines_of_a_ray_cluster(tmp_path: Path, cluster: Cluster) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    go = tmp_path / "go"
    assert len(cluster.wait(lambda: cluster.ask("nodes"), "an answer about the nodes")) == 3
    sent = cluster.ask("submit", "--steps", "60", "train.py", str(go))
    assert sent is not None, "the job was not taken"

    def job() -> dict[str, Any]:
        return (cluster.ask("jobs") or [{}])[0]

    cluster.wait(lambda: len({slot.rpartition("/")[0] for slot in job().get("slots", ())}) > 1, "slots on two machines")
    go.touch()
    cluster.wait(lambda: job().get("phase") == "finished", "the end of the job")
    assert job()["exit"] == 0
