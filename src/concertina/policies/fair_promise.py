"""Jobs without a promise beside those with one: deadlines of their own, only ever wished for.

Where promises alone may fill the cluster, a job without a deadline waits for as long as others with one keep
coming. So a newcomer is promised its deadline only if, beside all promises, the jobs without one could still be
done as if they had the devices they asked for, or are no worse off than without it. What such a job is then
given is another matter: `concertina.py` plans with its fair share, as far as promises allow. While somebody waits
below the floor there are no new promises at all; the old ones end, so nobody waits for ever. While somebody is behind
its fair time, no longer job than that is promised anything.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from concertina.core.job import JobSpec
from concertina.core.plan import Admitted, Rejected
from concertina.policies.counter import Counter, admit, work_of
from concertina.policies.fairness import FLOOR, Fairness, fairness_of
from concertina.policies.scaling_curve import ScalingCurve
from concertina.policies.table import Floats, Ints, Table, allowed_types, asked_speed
from concertina.policies.terms import Terms

BEHIND = 1.2
"""The rho from which a job without a promise comes before a newcomer that has more to do."""
MOST_WISHES = 100
"""Jobs without a promise that an admission looks at, those that fare worst: more would take too long."""


def loose_rows(table: Table) -> Ints:
    """Rows without a promise: no deadline, or a soft one."""
    strict = np.isfinite(table.deadline)
    for row in np.flatnonzero(strict).tolist():
        if table.specs[row].soft:
            strict[row] = False
    return np.flatnonzero(~strict)


def wished(table: Table, rows: Ints, total_s: Floats, rest_s: Floats, terms: Terms) -> Floats:
    """Deadlines with all that a promise allows for, for jobs that take so long in all and from now on."""
    end = np.maximum(table.submit[rows] + total_s, table.now + rest_s)
    pause = terms.cost.flat_s + terms.cost.start_s + terms.cost.doubling_s * np.log2(np.maximum(table.gpus[rows], 1))
    found: Floats = terms.deadline(table.now, end + pause)  # type: ignore[assignment, arg-type]
    return found


def with_wishes(table: Table, rows: Ints, deadlines: Floats) -> Table:
    """The table with these deadlines, as if they were promised."""
    deadline, level = table.deadline.copy(), table.level.copy()
    deadline[rows], level[rows] = deadlines, 0
    return table.with_columns(deadline=deadline, level=level)


def admit_fairly(job: JobSpec, curve: ScalingCurve, table: Table, terms: Terms) -> Admitted | Rejected:
    """Promise the job's strict deadline if no other promise breaks and nobody's share is lost."""
    answer = admit(job, curve, table, terms)
    rows = np.flatnonzero(np.isinf(table.deadline))
    if isinstance(answer, Rejected) or answer.promised_s is None or not rows.size:
        return answer
    fair = fairness_of(table, rows)
    worst = np.argsort(-fair.rho, kind="stable")[:MOST_WISHES]
    deadlines = wished(table, rows, fair.alone_s, fair.rest_s / fair.crowd, terms)[worst]
    twin, terms = with_wishes(table, rows[worst], deadlines), replace(terms, quotas=())
    if why := _held_up(job, curve, table, rows, fair):
        counter = Counter(job, curve, twin, terms)
        return _refusal(job, why, counter.earliest(answer.promised_s), answer.work + counter.effort.spent)
    fair_answer = admit(job, curve, twin, terms)
    work = answer.work + fair_answer.work
    if isinstance(fair_answer, Admitted):
        return replace(fair_answer, work=work)
    return _refusal(job, "jobs without a deadline would lose their share", fair_answer.earliest_s, work)


def _held_up(job: JobSpec, curve: ScalingCurve, table: Table, rows: Ints, fair: Fairness) -> str:
    """Who without a promise waits too long already for this newcomer to be promised anything; empty: nobody.

    Whoever is below the floor; and whoever is behind its fair time and has less to do than the newcomer, because the
    short before the long is what ends most jobs soonest, and a promise turns that round.
    """
    asked = asked_speed(job, curve, table.types, allowed_types(job, table.types))
    shorter = table.time_left()[rows] * table.gpus[rows] < job.gpus * work_of(job, curve) / asked
    slow = table.speed[rows] * fair.crowd < table.asked_speed[rows]
    waits = slow & ((fair.rho >= FLOOR) | (fair.rho >= BEHIND) & shorter)
    if not waits.any():
        return ""
    place = int(np.argmax(np.where(waits, fair.rho, 0.0)))
    less = "" if fair.rho[place] >= FLOOR else " and has less to do"
    return f"{table.specs[int(rows[place])].id} is on its way to {fair.rho[place]:.1f} times its fair time{less}"


def _refusal(job: JobSpec, why: str, earliest: float | None, work: int) -> Rejected:
    could = "no deadline could be promised" if earliest is None else f"{earliest:.0f} s could be promised"
    reason = f"deadline {job.deadline_s:.0f} s: {why}; {could}"
    return Rejected(job_id=job.id, reason=reason, earliest_s=earliest, work=work)
