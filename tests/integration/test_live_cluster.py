"""A live cluster under fire, in small: a server killed, slots reclaimed, and every model compared with its twin.

`benchmarks/live_trace.py` does the same with twenty jobs, fifty kills and twenty reclaims.
"""

import threading
from pathlib import Path

import torch
from benchmarks.live_bits import different_tensors
from benchmarks.live_checks import Watcher, check_events, check_jobs, processes_left, wait_until
from benchmarks.live_cluster import all_jobs, ask, cluster, free_port, wait_for_server
from benchmarks.live_jobs import EXAMPLES

from concertina.runner import RunSettings, run
from concertina.store.address import open_store

SLOTS, VIRTUAL, STEPS = 2, 2, 63
LIMIT_SECONDS = 240.0


def body(name: str, folder: Path) -> dict[str, object]:
    args = ["0.05", str(EXAMPLES / "mlp.py"), "--epochs", "1", "--out", "model.pt"]
    folder.mkdir()
    return {
        "script": str(EXAMPLES / "live_paced.py"),
        "args": args,
        "cwd": str(folder),
        "name": name,
        "virtual": VIRTUAL,
    }


def lent_slots(watcher: Watcher) -> set[str]:
    return {f"{node.id}/{index}" for node in watcher.mirror.nodes() for index in node.lent}


def test_jobs_survive_a_killed_server_and_reclaimed_slots_with_the_bits_of_one_machine(tmp_path: Path) -> None:
    state, names = tmp_path / "state", ("one", "two", "three")
    threads = set(threading.enumerate())
    with (
        cluster(state, free_port(), "--slots", str(SLOTS)) as up,
        open_store(f"sqlite:{state / 'cluster.db'}") as store,
    ):
        watcher = Watcher(store)
        watcher.start()
        try:
            for name in names:
                ask(up.url, "POST", "/jobs", body(name, tmp_path / name))
            trains = wait_until(lambda: any(j.seen and j.seen.step > 3 for j in watcher.mirror.jobs()), LIMIT_SECONDS)
            assert trains is not None
            up.kill()
            before = {job.id: job.state.attempt for job in watcher.mirror.jobs()}
            up.start()
            wait_for_server(state, up.url)
            assert all(watcher.mirror.job(job).state.attempt >= a for job, a in before.items())
            assert ask(up.url, "POST", "/cluster/reclaim", {"slots": 1, "return": False})["accepted"]
            assert (
                wait_until(lambda: len(lent_slots(watcher)) == 1, 30.0) is not None
            )  # it reads after the server wrote
            lent = lent_slots(watcher)
            assert wait_until(lambda: not watcher.busy_since_reclaim(lent), 30.0) is not None
            assert ask(up.url, "POST", "/cluster/reclaim", {"slots": 0, "return": True})["accepted"]
            over = wait_until(lambda: all(j["ended_s"] for j in all_jobs(up.url)), LIMIT_SECONDS, 0.3)
            assert over is not None, [(j["id"], j["phase"], j["step"]) for j in all_jobs(up.url)]
            found = all_jobs(up.url)
        finally:
            watcher.close()
    problems = check_jobs(found, dict.fromkeys(names, STEPS)) + watcher.problems
    problems += [problem for job in found for problem in check_events(state, job["id"])]
    assert problems == []
    assert watcher.most_slots <= SLOTS
    assert processes_left(state) == []
    twin = tmp_path / "twin.pt"
    settings = RunSettings(
        script=EXAMPLES / "mlp.py",
        args=["--epochs", "1", "--out", str(twin)],
        virtual=VIRTUAL,
        run_dir=tmp_path / "run",
    )
    assert run(settings).exit == 0
    assert set(torch.load(twin)) == set(torch.load(tmp_path / "one" / "model.pt"))
    assert [different_tensors(tmp_path / name / "model.pt", twin) for name in names] == [[], [], []]
    assert {t for t in threading.enumerate() if not t.daemon} <= threads
