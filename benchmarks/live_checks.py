"""Looks over a live cluster's shoulder: every record that is written, and the processes themselves.

Finds what must never be: a slot with processes of two jobs, a job that is lost, run twice, or late against its promise.
"""

from __future__ import annotations

import json
import os
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from concertina.cluster.mirror import Job, Mirror
from concertina.core.job import JobPhase
from concertina.store.protocol import Change, Store

LOOK_SECONDS = 0.1


@dataclass
class Watcher:
    """Started before the first job; `problems` is to stay empty."""

    store: Store
    problems: list[str] = field(default_factory=list)
    changes: int = 0
    looks: int = 0
    most_slots: int = 0
    held: dict[str, list[tuple[float, int]]] = field(default_factory=dict)
    """By job's name: from this moment (seconds since 1970) on so many slots that were granted to it."""

    def __post_init__(self) -> None:
        self.mirror = Mirror(self.store)
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._look, name="live-checks", daemon=True)

    def start(self) -> None:
        self.mirror.listen(self._note)
        self.mirror.start()
        self._thread.start()

    def close(self) -> None:
        self._ends.set()
        self._thread.join(timeout=10.0)
        self.mirror.close()

    def _note(self, change: Change) -> None:
        """By the records: a slot that two jobs see a process of theirs on."""
        self.changes += 1
        if change.key.startswith("seen/"):
            self._compare({job.id: job.seen.slots for job in self.mirror.jobs() if job.seen is not None}, "seen by")

    def _look(self) -> None:
        """By the processes: a slot on which processes of two jobs are alive. Also notes what each job was granted."""
        while not self._ends.wait(LOOK_SECONDS):
            self.looks += 1
            jobs = self.mirror.jobs()
            seen = [(job.id, job.seen.pids) for job in jobs if job.seen is not None]
            self._compare({name: [s for s, pid in pids.items() if alive(pid)] for name, pids in seen}, "alive in")
            for job in jobs:
                steps, slots = self.held.setdefault(job.request.name, []), _granted(job)
                if slots != (steps[-1][1] if steps else 0):
                    steps.append((time.time(), slots))

    def _compare(self, slots: dict[str, Any], how: str) -> None:
        owners: dict[str, str] = {}
        for name, held in slots.items():
            for slot in held:
                if owners.setdefault(slot, name) != name:
                    self.problems.append(f"slot {slot} {how} {owners[slot]} and {name}")
        self.most_slots = max(self.most_slots, len(owners))

    def busy_since_reclaim(self, slots: set[str]) -> set[str]:
        """Of these slots, the ones that still have a process."""
        found: set[str] = set()
        for job in self.mirror.jobs():
            if job.seen is not None:
                found |= slots & set(job.seen.slots)
                found |= {slot for slot, pid in job.seen.pids.items() if slot in slots and alive(pid)}
        return found


def _granted(job: Job) -> int:
    return 0 if job.state.phase.is_end else len(job.state.slots)


def alive(pid: int) -> bool:
    try:
        return (Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def check_jobs(jobs: list[dict[str, Any]], wanted: dict[str, int]) -> list[str]:
    """By the interface: every job of the trace is there once and ended well; `wanted`: name -> steps."""
    problems = []
    names = [job["name"] for job in jobs]
    problems += [f"{name} is there {names.count(name)} times" for name in wanted if names.count(name) != 1]
    for job in jobs:
        if job["name"] not in wanted:
            continue
        if job["phase"] not in (JobPhase.FINISHED.value, JobPhase.REJECTED.value):
            problems.append(f"{job['id']} ended as {job['phase']}: {job['error'] or job['reason']}")
        elif job["phase"] == "finished" and job["step"] != wanted[job["name"]]:
            problems.append(f"{job['id']} made {job['step']} steps, needed {wanted[job['name']]}")
        if job["phase"] == "finished" and job["promised_s"] is not None and job["ended_s"] > job["promised_s"]:
            problems.append(f"{job['id']} missed its deadline by {job['ended_s'] - job['promised_s']:.1f} s")
    return problems


def check_events(state: Path, job_id: str) -> list[str]:
    """By the job's own story: attempts follow one another, it finished once, and no step is missing."""
    problems, running, finished, last = [], "", 0, 0
    for event in read_events(state, job_id):
        kind = event["event"]
        if kind == "keeper_started":
            running = f"attempt {event['attempt']}"
        elif kind == "keeper_ended":
            if running != f"attempt {event['attempt']}":
                problems.append(f"{job_id}: attempt {event['attempt']} ended while {running or 'none'} ran")
            running = ""
            finished += event["activity"] == "finished"
        elif kind == "step":
            if event["step"] > last + 1 and last:
                problems.append(f"{job_id}: after step {last} came {event['step']}")
            last = event["step"]
    if finished != 1:
        problems.append(f"{job_id} finished {finished} times by its own account")
    return problems


def read_events(state: Path, job_id: str) -> list[dict[str, Any]]:
    path = state / "jobs" / job_id / "events.jsonl"
    found = []
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            found.append(json.loads(line))
        except ValueError:  # the end of a keeper that was killed while it wrote
            continue
    return found


def processes_left(state: Path) -> list[int]:
    """Keepers of this state folder, after everything should be over."""
    mark = str(state.absolute()).encode()
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                words = (entry / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if b"concertina.cluster.keeper" in words and mark in words:
                found.append(int(entry.name))
    return found


def wait_until(there: Any, limit_s: float, every_s: float = 0.05) -> float | None:
    """Seconds until `there()` was true; None: never within the limit."""
    began = time.monotonic()
    while time.monotonic() - began < limit_s:
        if there():
            return time.monotonic() - began
        time.sleep(every_s)
    return None
