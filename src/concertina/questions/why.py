"""What holds a job back, in one sentence: one round of the policy, and who holds what it would need."""

from __future__ import annotations

from dataclasses import replace

from concertina.core.cluster import Snapshot
from concertina.core.job import JobPhase, JobView
from concertina.core.plan import Admitted
from concertina.policies.admission import rule_of
from concertina.policies.round import GANGS, changes, observed, surviving
from concertina.policies.table import Table
from concertina.questions.basis import Basis, check_job

NAMED = 2
"""Jobs named as holders; the others are counted."""


def why(snapshot: Snapshot, job_id: str, basis: Basis) -> str:
    """What this job waits for, or why it runs on as many devices as it does."""
    at = check_job(snapshot, job_id)
    snapshot = surviving(snapshot, basis.policy, basis.curves)
    view = snapshot.jobs[at]
    if view.phase is JobPhase.SUBMITTED:
        return _submitted(snapshot, view, basis)
    known = replace(snapshot, jobs=tuple(v for v in snapshot.jobs if v.phase is not JobPhase.SUBMITTED))
    table = Table.from_snapshot(known, basis.curves)
    if all(v.placement or not v.workers for v in known.jobs):
        table.rooms, _ = observed(known, migrate=basis.placement == "buddy")
    row = known.jobs.index(view)
    wanted = {change.row: change.after for change in changes(table, basis.policy.allocate(table))}
    held = view.worker_count
    after = wanted.get(row, held)
    reason = basis.policy.explain(table, row, held, after)
    if after != held:
        return f"nothing: it goes from {held} to {_devices(after)} in this round ({reason})"
    if held:
        return f"it runs on {_devices(held)}; {reason}"
    return f"it waits: {_lack(known, table, row, basis)}; {reason}"


def _submitted(snapshot: Snapshot, view: JobView, basis: Basis) -> str:
    """What admission would say beside those that were taken."""
    known = replace(snapshot, jobs=tuple(v for v in snapshot.jobs if v.phase is not JobPhase.SUBMITTED))
    slots = [snapshot.cluster.slots_of(kind) for kind in snapshot.cluster.types]
    curve, _ = basis.curves.of(view.spec)
    answer = rule_of(basis.policy)(view.spec, curve, slots, Table.from_snapshot(known, basis.curves))
    verdict = "taken" if isinstance(answer, Admitted) else "refused"
    return f"it is not yet admitted and would be {verdict}: {answer.reason}"


def _lack(snapshot: Snapshot, table: Table, row: int, basis: Basis) -> str:
    """Too few devices up, too few free, or free ones that others get first."""
    spec, allowed = table.specs[row], int(table.allowed[row])
    need = spec.gpus if basis.policy.admission in GANGS else spec.min_workers or 1
    kinds = [kind for kind in range(len(table.types)) if allowed >> kind & 1]
    free = table.free()
    best = max(kinds, key=lambda kind: (free[kind], table.capacity[kind]))
    names = table.types[best]
    if max(table.capacity[kind] for kind in kinds) < need:
        up = max(table.capacity[kind] for kind in kinds)
        out = f" ({_plural(len(snapshot.down), 'node')} lost, drained or reclaimed)" if snapshot.down else ""
        return f"it needs {need} {names} at once and only {up} can be used{out}"
    state = f"it needs {need} {names} and {max(free[best], 0)} of {table.capacity[best]} are free"
    if free[best] >= need:
        return f"{state}, but not for it"
    return f"{state}, {_holders(table, best)}{_ahead(table, row)}"


def _holders(table: Table, kind: int) -> str:
    """Who has the others, largest first."""
    rows = [r for r in range(len(table)) if table.held[r] and table.kind[r] == kind]
    rows.sort(key=lambda r: (-int(table.held[r]), r))
    named = ", ".join(f"{table.specs[r].id} ({int(table.held[r])})" for r in rows[:NAMED])
    more = len(rows) - NAMED
    return f"the others are held by {named}" + (f" and {_plural(more, 'other job')}" if more > 0 else "")


def _ahead(table: Table, row: int) -> str:
    """Who waits longer. Rows are in order of submission."""
    earlier = int((table.held[:row] == 0).sum())
    return f", and {_plural(earlier, 'job')} submitted earlier wait{'s' if earlier == 1 else ''} too" if earlier else ""


def _devices(count: int) -> str:
    return _plural(count, "device")


def _plural(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"
