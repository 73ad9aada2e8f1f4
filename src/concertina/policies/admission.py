"""Rules for taking a job in, by the name a policy gives. A refusal is a value with a reason."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, cast

from concertina.core.errors import UnknownNameError
from concertina.core.job import JobSpec
from concertina.core.plan import Admitted, Rejected
from concertina.policies.base import Policy
from concertina.policies.counter import admit, sure
from concertina.policies.fair_promise import admit_fairly
from concertina.policies.scaling_curve import ScalingCurve
from concertina.policies.table import Table, allowed_types
from concertina.policies.terms import Terms

Rule = Callable[[JobSpec, ScalingCurve, Sequence[int], Table], Admitted | Rejected]
"""(job, its curve, devices by type when all nodes are up, the table without the job) -> answer"""


USUAL = Terms()


def fits(job: JobSpec, curve: ScalingCurve, slots: Sequence[int], table: Table) -> Admitted | Rejected:
    """Take every job whose gang fits on one device type of the whole cluster."""
    allowed = allowed_types(job, table.types)
    if not allowed:
        return _refuse(job, f"allows only {', '.join(job.device_types)}; there are {', '.join(table.types)}")
    room = [count if allowed >> kind & 1 else 0 for kind, count in enumerate(slots)]
    if max(room) < job.gpus:
        return _refuse(job, f"asks for {job.gpus} devices of one type; the cluster has {max(room)}")
    kinds = [name for kind, name in enumerate(table.types) if room[kind] >= job.gpus]
    if not any(curve.speed(name, job.gpus) > 0 for name in kinds):
        return _refuse(job, f"its speed on {job.gpus} devices of {' or '.join(kinds)} is not known")
    return Admitted(job_id=job.id, reason="it fits on the cluster")


def fits_elastic(job: JobSpec, curve: ScalingCurve, slots: Sequence[int], table: Table) -> Admitted | Rejected:
    """Take every job that can run on some number of devices of one type."""
    allowed = allowed_types(job, table.types)
    least = job.min_workers or 1
    for kind, name in enumerate(table.types):
        if allowed >> kind & 1 and any(least <= n <= slots[kind] for n in curve.counts(name)):
            return Admitted(job_id=job.id, reason="it can run on the cluster")
    return _refuse(job, f"needs at least {least} devices of one type with a known speed")


def _refuse(job: JobSpec, reason: str) -> Rejected:
    return Rejected(job_id=job.id, reason=reason)


def promise(
    job: JobSpec, curve: ScalingCurve, slots: Sequence[int], table: Table, terms: Terms = USUAL
) -> Admitted | Rejected:
    """Take a job whose strict deadline can be kept beside all others (ElasticFlow 4.1)."""
    answer = fits_elastic(job, curve, slots, table)
    return admit(job, curve, sure(table, slots, terms), terms) if isinstance(answer, Admitted) else answer


def promise_fair(
    job: JobSpec, curve: ScalingCurve, slots: Sequence[int], table: Table, terms: Terms = USUAL
) -> Admitted | Rejected:
    """The same, and jobs without a promise still get their fair share."""
    answer = fits_elastic(job, curve, slots, table)
    return admit_fairly(job, curve, sure(table, slots, terms), terms) if isinstance(answer, Admitted) else answer


def promise_gang(
    job: JobSpec, curve: ScalingCurve, slots: Sequence[int], table: Table, terms: Terms = USUAL
) -> Admitted | Rejected:
    """The same for jobs that only ever run on the devices they asked for."""
    answer, terms = fits(job, curve, slots, table), replace(terms, elastic=False)
    return admit(job, curve, sure(table, slots, terms), terms) if isinstance(answer, Admitted) else answer


_PROMISES = {"promise": promise, "promise-fair": promise_fair, "promise-gang": promise_gang}
RULES: dict[str, Rule] = {"fits": fits, "fits-elastic": fits_elastic, **_PROMISES}


def rule(name: str) -> Rule:
    """The rule of that name."""
    if name not in RULES:
        raise UnknownNameError(kind="admission rule", seen=name, known=tuple(RULES))
    return RULES[name]


def rule_of(policy: Policy) -> Rule:
    """The rule that a policy names, on the policy's own terms."""
    terms, promising = terms_of(policy), _PROMISES.get(policy.admission)
    if promising is None or terms is None:
        return rule(policy.admission)
    return partial(promising, terms=terms)


def terms_of(policy: Policy) -> Terms | None:
    """The terms on which it promises deadlines; None if it promises none."""
    terms = getattr(policy, "terms", None)
    return terms if isinstance(terms, Terms) else None


def makes_promises(policy: Policy) -> bool:
    """Whether its admission promises deadlines."""
    return policy.admission in _PROMISES and terms_of(policy) is not None


def on_terms(policy: Policy, **changes: object) -> Policy:
    """The policy with other terms for its promises (fields of `Terms`); the policy itself if it makes none."""
    terms = terms_of(policy)
    if terms is None:
        return policy
    return cast(Policy, replace(cast(Any, policy), terms=replace(terms, **cast(Any, changes))))
