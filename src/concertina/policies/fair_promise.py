"""Jobs without a promise beside those with one: deadlines of their own, by finish-time fairness.

Where promises alone may fill the cluster, a job without a deadline waits for as long as others with one keep
coming. Here it gets a deadline too, one that is only ever wished for: the time its fair share of the cluster
would take. A newcomer is promised its own deadline only if, beside all promises, these wishes can come true
as well or are no worse off than without it; and `concertina.py` plans with as many of them as promises allow.
"""

from __future__ import annotations

import numpy as np

from concertina.core.job import JobSpec
from concertina.core.plan import Admitted, Rejected
from concertina.policies.fairness import Fairness, fairness_of
from concertina.policies.promise import Terms, admit
from concertina.policies.scaling_curve import ScalingCurve
from concertina.policies.table import Floats, Ints, Table

MOST_WISHES = 100
"""Jobs without a promise that an admission looks at, those that fare worst: more would take too long."""


def loose_rows(table: Table) -> Ints:
    """Rows without a promise: no deadline, or a soft one."""
    strict = np.isfinite(table.deadline)
    for row in np.flatnonzero(strict).tolist():
        if table.specs[row].soft:
            strict[row] = False
    return np.flatnonzero(~strict)


def wished(table: Table, rows: Ints, fair: Fairness, terms: Terms) -> Floats:
    """The end these jobs would have with their fair share, as a deadline with all that a promise allows for."""
    end = np.maximum(table.submit[rows] + fair.fair_s, table.now + fair.rest_s)
    pause = terms.cost.flat_s + terms.cost.doubling_s * np.log2(np.maximum(table.gpus[rows], 1))
    found: Floats = terms.deadline(table.now, end + pause)  # type: ignore[assignment, arg-type]
    return found


def with_wishes(table: Table, rows: Ints, deadlines: Floats) -> Table:
    """The table with these deadlines, as if they were promised."""
    deadline, level = table.deadline.copy(), table.level.copy()
    deadline[rows], level[rows] = deadlines, 0
    return table.with_columns(deadline=deadline, level=level)


def admit_fairly(job: JobSpec, curve: ScalingCurve, table: Table, terms: Terms) -> Admitted | Rejected:
    """Promise the job's strict deadline if no other promise breaks and no fair share is lost."""
    answer = admit(job, curve, table, terms)
    rows = np.flatnonzero(np.isinf(table.deadline))
    if isinstance(answer, Rejected) or answer.promised_s is None or not rows.size:
        return answer
    fair = fairness_of(table, rows)
    worst = np.argsort(-fair.rho, kind="stable")[:MOST_WISHES]
    deadlines = wished(table, rows, fair, terms)[worst]
    answer = admit(job, curve, with_wishes(table, rows[worst], deadlines), terms)
    if isinstance(answer, Admitted):
        return answer
    could = "no deadline could be promised"
    if answer.earliest_s is not None:
        could = f"{answer.earliest_s:.0f} s could be promised"
    why = "jobs without a deadline would lose their fair share"
    return Rejected(
        job_id=job.id, reason=f"deadline {job.deadline_s:.0f} s: {why}; {could}", earliest_s=answer.earliest_s
    )
