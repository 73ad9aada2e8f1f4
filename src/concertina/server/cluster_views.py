"""The cluster as the JSON that clients see."""

from typing import Any

from concertina.cluster.mirror import Job, Mirror
from concertina.server.auth import Caller
from concertina.server.board import Board
from concertina.server.events import Hub
from concertina.server.views import busy_slots, finite, node_json, slot_counts, slots_json

MOST_SLOTS = 256


def holders(board: Board) -> list[Job]:
    """Jobs that hold slots, or still have a process on one."""
    return [job for job in board.jobs() if job.state.slots or (job.seen and job.seen.slots)]


def summary_json(mirror: Mirror, board: Board, jobs: list[Job], *, leader: bool) -> dict[str, Any]:
    """Counts, no names."""
    state = mirror.cluster
    slots = slots_json(mirror.nodes(), busy_slots(jobs), None)
    return {
        "policy": state.policy if state else "",
        "backend": state.backend if state else "",
        "controller": state.controller if state else "",
        "leader": leader,
        "going_down": state.going_down if state else False,
        "rounds": state.rounds if state else 0,
        "round_ms": (finite(state.round_ms) or 0.0) if state else 0.0,
        "at_s": state.at_s if state else 0.0,
        "revision": mirror.revision,
        "slots": slot_counts(slots),
        "jobs": {phase.value: count for phase, count in board.count().items()},
    }


def cluster_json(mirror: Mirror, board: Board, hub: Hub, caller: Caller) -> dict[str, Any]:
    jobs = holders(board)
    visible = None if caller.admin else frozenset(job.id for job in jobs if caller.may_see(job.request.user))
    return {
        **summary_json(mirror, board, jobs, leader=hub.led),
        "placement": slots_json(mirror.nodes(), busy_slots(jobs), visible),
        "nodes": nodes_json(mirror, jobs),
    }


def cluster_event(mirror: Mirror, board: Board, hub: Hub, caller: Caller) -> dict[str, Any]:
    """The same for a stream of events, where a large cluster's slots would be too much: ask for them instead."""
    if sum(node.slots for node in mirror.nodes()) > MOST_SLOTS:
        return summary_json(mirror, board, holders(board), leader=hub.led)
    return cluster_json(mirror, board, hub, caller)


def nodes_json(mirror: Mirror, jobs: list[Job]) -> list[dict[str, Any]]:
    busy = busy_slots(jobs)
    return [node_json(node, busy) for node in mirror.nodes()]


def history_json(
    mirror: Mirror, board: Board, caller: Caller, from_s: float, to_s: float, limit: int
) -> dict[str, Any]:
    """Workers of every job over time, as far as the jobs' own stories go back."""
    jobs = [job for job in board.jobs() if _points(job, from_s)]
    jobs.sort(key=lambda job: (job.request.submitted_s, job.id))
    shown = jobs[-limit:]
    return {
        "from_s": from_s,
        "to_s": to_s,
        "slots": sum(node.slots for node in mirror.nodes()),
        "series": [_series(job, caller, from_s) for job in shown],
        "left_out": len(jobs) - len(shown),
    }


def _series(job: Job, caller: Caller, from_s: float) -> dict[str, Any]:
    mine = caller.may_see(job.request.user)
    return {
        "job": job.id if mine else None,
        "name": job.request.name if mine else "somebody else's",
        "points": _points(job, from_s),
    }


def _points(job: Job, from_s: float) -> list[tuple[float, int]]:
    """From the last change before `from_s` on; empty if it had no workers since."""
    if not job.state.history:
        return []
    found = [(line.at_s, line.workers) for line in job.state.history]
    before = [point for point in found if point[0] < from_s][-1:]
    since = [point for point in found if point[0] >= from_s]
    points = [(from_s, workers) for _, workers in before if workers] + since
    return points if any(workers for _, workers in points) else []
