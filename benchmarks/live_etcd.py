"""Two servers on a real etcd: the one in office is killed, again and again; the other takes over."""

from __future__ import annotations

import argparse
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from tests.integration.etcd_server import etcd

from benchmarks.live_checks import Watcher, wait_until
from benchmarks.live_cluster import Up, end_keepers, free_port, wait_for_server
from concertina.core.job import JobSpec
from concertina.store.address import open_store

if TYPE_CHECKING:
    from benchmarks.live_trace import Outcome, Trial

TAKE_OVER_SECONDS = 3.0
KILLS = 5


class Pair:
    """Two servers that share a store and a state folder."""

    def __init__(self, state: Path, store: str, slots: int) -> None:
        self.ups = [Up(state, free_port(), "--slots", str(slots), "--store", store) for _ in range(2)]

    def url(self) -> str:
        """Of one that is up; requests are tried again if it is killed meanwhile."""
        return next((up.url for up in self.ups if up.alive), self.ups[0].url)

    def leader(self, watcher: Watcher) -> Up | None:
        """By the record of whoever is in office: its name ends with its pid."""
        cluster = watcher.mirror.cluster
        return next((up for up in self.ups if cluster and cluster.controller.endswith(f":{up.pid}") and up.alive), None)


def run_with_standby(jobs: list[JobSpec], folder: Path, args: argparse.Namespace) -> Outcome:
    from benchmarks.live_trace import Trial

    with ExitStack() as stack:
        server = stack.enter_context(etcd())
        trial = Trial(jobs, folder, args.slots, server.address("live"))
        pair = Pair(trial.state, trial.store, args.slots)
        stack.callback(end_keepers, trial.state)
        for up in pair.ups:
            up.start()
            stack.callback(up.stop)
        wait_for_server(trial.state, pair.ups[0].url)
        store = open_store(trial.store)
        stack.callback(store.close)
        watcher = Watcher(store)
        watcher.start()
        stack.callback(watcher.close)
        killer = threading.Thread(target=_kill_leaders, args=(pair, trial, watcher))
        killer.start()
        found = trial.run(pair.url(), pair.url)
        killer.join(timeout=120.0)
        trial.judge(found, watcher, args)
    late = [s for s in trial.outcome.takeovers_s if s > TAKE_OVER_SECONDS]
    trial.outcome.problems += [f"a take-over took {s:.2f} s" for s in late]
    return trial.outcome


def _kill_leaders(pair: Pair, trial: Trial, watcher: Watcher) -> None:
    while trial.outcome.kills < KILLS and not trial.over.wait(15.0):
        if wait_until(lambda: all(up.alive for up in pair.ups) and pair.leader(watcher) is not None, 60.0) is None:
            trial.outcome.problems.append("nobody was in office for a minute")
            return
        leader = pair.leader(watcher)
        assert leader is not None
        other = next(up for up in pair.ups if up is not leader)
        began = time.monotonic()
        leader.kill()
        trial.outcome.kills += 1
        took = wait_until(lambda other=other: pair.leader(watcher) is other, 60.0, 0.01)
        trial.outcome.takeovers_s.append(60.0 if took is None else time.monotonic() - began)
        leader.start()
        time.sleep(8.0)  # until it waits for the office again
