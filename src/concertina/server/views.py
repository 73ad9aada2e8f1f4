"""Records as the JSON that clients see. Pure: the same records give the same bytes, so that they can be kept.

Nothing here reads a clock: a time that depends on now (how long until the end) is for the client to make.
"""

import json
import math
from collections.abc import Iterable, Mapping
from typing import Any

from concertina.cluster.mirror import Job
from concertina.cluster.records import ENDED, JobSeen, NodePhase, NodeState
from concertina.core.job import JobPhase

BRIEF_HISTORY = 3


def encode(plain: Any) -> bytes:
    return json.dumps(plain, separators=(",", ":"), allow_nan=False).encode()


def finite(value: float | None) -> float | None:
    """JSON has no infinity and no NaN."""
    return value if value is not None and math.isfinite(value) else None


def job_json(job: Job, *, brief: bool) -> dict[str, Any]:
    request, state, seen = job.request, job.state, job.seen
    step = max(seen.step if seen else 0, int(state.done))
    total = total_steps(job)
    speed = steps_per_s(seen) if _workers(job) else None
    due = state.promised_s if state.promised_s is not None else request.deadline_s
    eta = _eta(job, step, total, speed)
    history = state.history[-BRIEF_HISTORY:] if brief else state.history
    return {
        "id": request.id,
        "name": request.name,
        "user": request.user,
        "script": request.script,
        "args": list(request.args),
        "cwd": request.cwd,
        "virtual": request.virtual,
        "min_workers": request.min_workers,
        "max_workers": request.most,
        "steps": request.steps,
        "scaling": request.scaling,
        "level": request.level,
        "phase": state.phase.value,
        "activity": seen.activity.value if seen else None,
        "profiling": state.profiling,
        "reason": state.reason,
        "slots": list(state.slots),
        "workers": _workers(job),
        "pinned": state.pinned,
        "step": step,
        "total_steps": total,
        "progress": min(1.0, step / total) if total else (1.0 if state.phase is JobPhase.FINISHED else None),
        "epoch": seen.epoch if seen else 0,
        "steps_per_s": finite(speed),
        "eta_s": finite(eta),
        "deadline_s": finite(request.deadline_s),
        "promised_s": finite(state.promised_s),
        "slack_s": None if eta is None or due is None else finite(due - eta),
        "soft": request.soft,
        "submitted_s": request.submitted_s,
        "admitted_s": finite(state.admitted_s),
        "first_start_s": finite(state.first_start_s),
        "ended_s": finite(state.ended_s),
        "earliest_s": finite(state.earliest_s),
        "waiting_since_s": finite(state.waiting_since_s),
        "generation": seen.generation if seen else 0,
        "checkpoint_step": seen.checkpoint_step if seen else 0,
        "service_s": finite(state.service_s) or 0.0,
        "failures": state.failures,
        "values": {name: finite(value) for name, value in seen.values.items()} if seen else {},
        "history": [{"at_s": c.at_s, "workers": c.workers, "reason": c.reason, "step": c.step} for c in history],
        "exit": state.exit if state.exit is not None else (seen.exit if seen else None),
        "error": state.error or (seen.error if seen else ""),
    }


def _workers(job: Job) -> int:
    seen = job.seen
    return 0 if seen is None or job.state.phase.is_end or seen.activity in ENDED else seen.workers


def total_steps(job: Job) -> int | None:
    """Steps in all, as far as they are known."""
    told = job.seen.total_steps if job.seen else 0
    work = job.state.work
    return job.request.steps or (round(work) if work is not None and math.isfinite(work) else 0) or told or None


def steps_per_s(seen: JobSeen | None) -> float | None:
    """As measured at the number of workers it has now, or at the nearest that was measured."""
    if seen is None or not seen.speeds or not seen.workers:
        return None
    return seen.speeds[min(seen.speeds, key=lambda workers: (abs(workers - seen.workers), workers))]


def _eta(job: Job, step: int, total: int | None, speed: float | None) -> float | None:
    if job.state.phase is JobPhase.FINISHED:
        return job.state.ended_s
    if not total or not speed or job.seen is None:
        return None
    return job.seen.at_s + max(0, total - step) / speed


def busy_slots(jobs: Iterable[Job]) -> dict[str, tuple[str, bool]]:
    """Slot -> (job, whether it is granted; if not, a process has yet to leave it)."""
    found: dict[str, tuple[str, bool]] = {}
    for job in jobs:
        for slot in job.seen.slots if job.seen else ():
            found[slot] = (job.id, False)
    for job in jobs:
        for slot in job.state.slots:
            found[slot] = (job.id, True)
    return found


def slots_json(
    nodes: Iterable[NodeState], busy: Mapping[str, tuple[str, bool]], visible: frozenset[str] | None
) -> list[dict[str, Any]]:
    """Every slot. `visible`: the jobs that may be named; None: all."""
    out = []
    for node in nodes:
        for index in range(node.slots):
            slot = f"{node.id}/{index}"
            job, granted = busy.get(slot, ("", False))
            shown = job if job and (visible is None or job in visible) else None
            out.append({"slot": slot, "node": node.id, "state": _slot_state(node, index, job, granted), "job": shown})
    return out


def _slot_state(node: NodeState, index: int, job: str, granted: bool) -> str:
    if job:
        return "busy" if granted else "leaving"
    if node.phase is not NodePhase.UP:
        return node.phase.value
    return "lent" if index in node.lent else "free"


def slot_counts(slots: list[dict[str, Any]]) -> dict[str, int]:
    states = [slot["state"] for slot in slots]
    return {
        "total": len(states),
        "free": states.count("free"),
        "busy": states.count("busy") + states.count("leaving"),
        "lent": states.count("lent"),
        "away": states.count("drained") + states.count("lost"),
    }


def node_json(node: NodeState, busy: Mapping[str, tuple[str, bool]]) -> dict[str, Any]:
    return {
        "id": node.id,
        "device_type": node.device_type,
        "slots": node.slots,
        "phase": node.phase.value,
        "address": node.address,
        "reason": node.reason,
        "lent": list(node.lent),
        "busy": sum(f"{node.id}/{index}" in busy for index in range(node.slots)),
    }
