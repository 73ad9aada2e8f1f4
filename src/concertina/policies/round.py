"""One round, the same for the live cluster and the simulator: admit, allocate, place, and compare with
what is.

`changes` is the heart: what a policy wants against what is held, as a short list, devices given back before
devices taken. `run_round` does it all on a `Snapshot` and returns a `Plan`; run it again on a cluster
that has carried the plan out and the plan is empty.

A node may be lost or drained while jobs sit on it. Those devices count as given back before anything is decided,
and the plan says so, job by job.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from concertina.core.cluster import Allocation, Cluster, Placement, Snapshot
from concertina.core.job import JobPhase, JobView
from concertina.core.plan import Action, Admitted, Launch, Move, Nodes, Plan, Rejected, Resize, Stop
from concertina.policies.admission import rule_of
from concertina.policies.base import Policy, Shares, explainer_of
from concertina.policies.mixed_speed import mixed_speed
from concertina.policies.placement import Placer, Shift, Spot
from concertina.policies.scaling_curve import Curves
from concertina.policies.table import Table

GANGS = ("fits", "promise-gang")
"""Admission rules of policies that give a job what it asked for or nothing."""
ADMIT_WORK = 1000
"""Jobs filled in for the answers of one round (see `Admitted.work`); who comes after that is answered in the next."""


@dataclass(frozen=True, slots=True)
class Change:
    """One job that shall hold other devices than it does."""

    row: int
    before: int
    after: int
    workers: tuple[tuple[int, int], ...]
    """(index of a device type, devices) pairs it shall hold; empty: none."""
    spots: tuple[Spot, ...] | None = None
    """The nodes, where the policy has chosen them."""


def changes(table: Table, shares: Shares) -> list[Change]:
    """What differs between wanted and held, those that only give back first, each in order of rows."""
    held, wanted = table.held, shares.workers
    if wanted.base is held.base:  # the policy handed the column back: only what it lists changes
        return [
            Change(row, 0, gpus, ((kind, gpus),), shares.spots.get(row))
            for row, kind in shares.starts.items()
            if (gpus := int(table.gpus[row]))
        ]
    differs = wanted != held
    kind_now = table.kind
    if shares.kind is not None and len(table.types) > 1:
        differs |= (wanted > 0) & (shares.kind != kind_now)
    found: list[Change] = []
    rows = np.flatnonzero(differs).tolist()
    if shares.splits or table.splits or shares.moves:
        rows = sorted({*rows, *_split_rows(table, shares), *shares.moves})
    for row in rows:
        before, after = int(held[row]), int(wanted[row])
        if row in shares.splits:
            workers = tuple((kind, n) for kind, n in enumerate(shares.splits[row]) if n)
        else:
            kind = 0 if shares.kind is None else int(shares.kind[row])
            workers = ((kind, after),) if after else ()
        found.append(Change(row, before, after, workers, shares.spots.get(row)))
    if len(found) > 1:
        found.sort(key=lambda change: change.after > change.before)
    return found


def _split_rows(table: Table, shares: Shares) -> list[int]:
    """Rows whose devices are, or shall be, of several types, and differ."""
    rows = [row for row, key in enumerate(table.keys) if key in table.splits]
    return [row for row in {*rows, *shares.splits} if table.splits.get(table.keys[row]) != shares.splits.get(row)]


def run_round(snapshot: Snapshot, policy: Policy, curves: Curves, *, migrate: bool = False) -> Plan:
    """Admit new jobs, share out devices, place them, and say what to do.

    New jobs are answered one after the other until that has taken as much as a round may; the rest has no answer in
    the plan, holds nothing, and is found again, still new, in the next snapshot.
    """
    before = {view.spec.id: view.placement for view in snapshot.jobs}
    answers, taken = _admit(surviving(snapshot, policy, curves), policy, curves)
    table = Table.from_snapshot(taken, curves)
    placer, spots = observed(taken, migrate=migrate)
    table.rooms = placer
    shares = policy.allocate(table)
    actions = _actions(taken, table, policy, changes(table, shares), placer, spots)
    actions = _with_losses(taken, before, actions)
    nodes = {table.specs[key].id: name_nodes(taken.cluster, where) for key, where in spots.items() if where}
    return Plan(
        actions=actions,
        answers=answers,
        allocation=_allocation(taken.cluster, nodes),
        placement=Placement(nodes=nodes),
        notes=_notes(table, shares),
        reserved=shares.reserved,
        wake_s=shares.wake_s,
    )


def surviving(snapshot: Snapshot, policy: Policy, curves: Curves) -> Snapshot:
    """The snapshot with what jobs still hold on nodes that are up.

    A job that can not run on the rest (its policy gives all or nothing, it needs more workers, its speed there is not
    known) holds nothing any more and waits.
    """
    kind_of = {node.id: node.device_type for node in snapshot.cluster.nodes if node.id not in snapshot.down}
    jobs = list(snapshot.jobs)
    for i, view in enumerate(jobs):
        if all(node in kind_of for node, _ in view.placement):
            continue
        rest = tuple((node, count) for node, count in view.placement if node in kind_of)
        workers = _by_type(kind_of, rest)
        if policy.admission in GANGS or not _can_run(view, workers, curves):
            rest, workers = (), ()
        view = replace(view, placement=rest, workers=workers)
        jobs[i] = view if rest else replace(view, phase=JobPhase.WAITING, waiting_since_s=snapshot.now)
    return replace(snapshot, jobs=tuple(jobs))


def _can_run(view: JobView, workers: tuple[tuple[str, int], ...], curves: Curves) -> bool:
    if sum(count for _, count in workers) < (view.spec.min_workers or 1):
        return False
    curve, _ = curves.of(view.spec)
    return (curve.speed(*workers[0]) if len(workers) == 1 else mixed_speed(curve, workers)) > 0


def _with_losses(snapshot: Snapshot, before: dict[str, Nodes], actions: tuple[Action, ...]) -> tuple[Action, ...]:
    """The actions with what jobs held before nodes went down, and one for each job that has none of its own.

    A job that still holds something, and is only made smaller by the loss, comes first: it gives back, like a stop.
    """
    up = {node.id for node in snapshot.cluster.nodes} - snapshot.down
    missing = {
        view.spec.id: f"{_name_lost(lost)} down"
        for view in snapshot.jobs
        if (lost := [node for node, _ in before[view.spec.id] if node not in up])
    }
    if not missing:
        return actions
    own: dict[str, Action] = {}
    for action in actions:
        own.setdefault(action.job_id, action)
    found: list[Action] = []
    for view in snapshot.jobs:
        job_id = view.spec.id
        if job_id in missing and (job_id not in own or isinstance(own[job_id], Move)):
            say = "it goes on with the devices it has left" if view.placement else "it waits for other devices"
            found.append(_action(job_id, before[job_id], view.placement, f"{missing.pop(job_id)}; {say}"))
    for action in actions:
        why = missing.pop(action.job_id, None)
        if why is not None:
            nodes = () if isinstance(action, Stop) else action.nodes
            action = _action(action.job_id, before[action.job_id], nodes, f"{why}; {action.reason}")
        found.append(action)
    return tuple(found)


def _name_lost(nodes: list[str]) -> str:
    return f"node {nodes[0]} is" if len(nodes) == 1 else f"nodes {', '.join(nodes)} are"


def _allocation(cluster: Cluster, placed: dict[str, Nodes]) -> Allocation:
    """How many of which type, from where."""
    kind_of = {node.id: node.device_type for node in cluster.nodes}
    return Allocation(workers={job_id: _by_type(kind_of, nodes) for job_id, nodes in placed.items()})


def _by_type(kind_of: dict[str, str], nodes: Nodes) -> tuple[tuple[str, int], ...]:
    """Devices by type instead of by node."""
    found: dict[str, int] = {}
    for node, count in nodes:
        found[kind_of[node]] = found.get(kind_of[node], 0) + count
    return tuple(found.items())


def _notes(table: Table, shares: Shares) -> dict[str, tuple[int, float]]:
    """The policy's notes by job, those it did not touch included."""
    level = (table.level if shares.level is None else shares.level).tolist()
    stamp = (table.stamp if shares.stamp is None else shares.stamp).tolist()
    return {spec.id: (level[row], stamp[row]) for row, spec in enumerate(table.specs)}


def _admit(snapshot: Snapshot, policy: Policy, curves: Curves) -> tuple[tuple[Admitted | Rejected, ...], Snapshot]:
    """Answers to the jobs that admission has not looked at, one after the other, and the jobs that are there then.

    One table for all: a job that is taken becomes its last row.
    """
    new = [view for view in snapshot.jobs if view.phase is JobPhase.SUBMITTED]
    if not new:
        return (), snapshot
    admit = rule_of(policy)
    slots = [snapshot.cluster.slots_of(kind) for kind in snapshot.cluster.types]
    known = [view for view in snapshot.jobs if view.phase is not JobPhase.SUBMITTED]
    table = Table.from_snapshot(_with_jobs(snapshot, known), curves)
    users = {name: i for i, name in enumerate(dict.fromkeys(view.spec.user for view in known))}
    answers: list[Admitted | Rejected] = []
    left_out = {view.spec.id for view in new}
    spent = 0
    for view in new:
        if spent >= ADMIT_WORK:
            break
        curve, work = curves.of(view.spec)
        answer = admit(view.spec, curve, slots, table)
        answers.append(answer)
        if isinstance(answer, Admitted):
            table.add_view(len(table), view, curve, work, user=users.setdefault(view.spec.user, len(users)))
            table.reserved.update(answer.reserved)
            left_out.discard(view.spec.id)
        spent += answer.work
    jobs = [_planned(view, table) for view in snapshot.jobs if view.spec.id not in left_out]
    return tuple(answers), _with_jobs(snapshot, jobs)


def _planned(view: JobView, table: Table) -> JobView:
    """The job with what admission has planned for it."""
    found = table.reserved.get(view.spec.id, ())
    return view if found == view.reserved else replace(view, reserved=found)


def _with_jobs(snapshot: Snapshot, jobs: list[JobView]) -> Snapshot:
    return Snapshot(now=snapshot.now, cluster=snapshot.cluster, jobs=tuple(jobs), down=snapshot.down)


def observed(snapshot: Snapshot, *, migrate: bool) -> tuple[Placer, dict[int, tuple[Spot, ...]]]:
    """A placer that knows what is held, and each job's spots by its key (its place in the snapshot).

    Nobody may be on a node that is down (see `surviving`).
    """
    placer = Placer(snapshot.cluster, migrate=migrate)
    index = {node.id: i for i, node in enumerate(snapshot.cluster.nodes)}
    for node in sorted(snapshot.down):
        placer.set_up(index[node], False)
    spots: dict[int, tuple[Spot, ...]] = {}
    for key, view in enumerate(snapshot.jobs):
        spots[key] = tuple((index[node], count) for node, count in view.placement)
        placer.take(key, spots[key])
    return placer, spots


def _actions(
    snapshot: Snapshot,
    table: Table,
    policy: Policy,
    wanted: list[Change],
    placer: Placer,
    spots: dict[int, tuple[Spot, ...]],
) -> tuple[Action, ...]:
    cluster, explain = snapshot.cluster, explainer_of(policy, table)
    found: list[Action] = []
    for change in wanted:
        key = table.keys[change.row]
        placer.release(key, spots[key])
    for change in wanted:
        key = table.keys[change.row]
        job_id = table.specs[change.row].id
        before = name_nodes(cluster, spots[key])
        reason = explain(change.row, change.before, change.after)
        after, moves = place_change(placer, key, change)
        for other, old, new in moves:
            held = spots[other]
            spots[other] = moved(held, old, new)
            found.append(_move(cluster, snapshot.jobs[other].spec.id, held, spots[other], job_id))
        spots[key] = after
        if sorted(before) != sorted(name_nodes(cluster, after)):
            found.append(_action(job_id, before, name_nodes(cluster, after), reason))
    return tuple(found)


def place_change(placer: Placer, key: int, change: Change) -> tuple[tuple[Spot, ...], tuple[Shift, ...]]:
    """Take the devices of a change, where the policy said or else where they fit best; who moves for it."""
    if change.spots is not None:
        placer.take(key, change.spots)
        return change.spots, ()
    spots: tuple[Spot, ...] = ()
    moves: tuple[Shift, ...] = ()
    for kind, count in change.workers:
        placed = placer.place(key, kind, count)
        spots += placed.spots
        moves += placed.moves
    return spots, moves


def moved(held: tuple[Spot, ...], old: tuple[Spot, ...], new: tuple[Spot, ...]) -> tuple[Spot, ...]:
    """What a job holds after its devices on `old` moved to `new`; those of other types stay."""
    return (*(spot for spot in held if spot not in old), *new)


def _action(job_id: str, before: Nodes, nodes: Nodes, reason: str) -> Action:
    if not nodes:
        return Stop(job_id=job_id, before=before, reason=reason)
    if not before:
        return Launch(job_id=job_id, nodes=nodes, reason=reason)
    return Resize(job_id=job_id, before=before, nodes=nodes, reason=reason)


def _move(cluster: Cluster, job_id: str, old: tuple[Spot, ...], new: tuple[Spot, ...], who: str) -> Move:
    reason = f"moves aside so that {who} gets devices that are close together"
    return Move(job_id=job_id, before=name_nodes(cluster, old), nodes=name_nodes(cluster, new), reason=reason)


def name_nodes(cluster: Cluster, spots: tuple[Spot, ...]) -> Nodes:
    """Spots with the nodes' ids."""
    return tuple((cluster.nodes[node].id, count) for node, count in spots)
