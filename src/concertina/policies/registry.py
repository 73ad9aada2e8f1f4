"""The list of policies by name, each with the paper it comes from."""

from __future__ import annotations

from concertina.core.errors import UnknownNameError
from concertina.policies.backfill import BackfillPolicy
from concertina.policies.base import Policy
from concertina.policies.edf import EdfPolicy
from concertina.policies.fifo import FifoPolicy
from concertina.policies.srtf import SrtfPolicy
from concertina.policies.tiresias import TiresiasPolicy
from concertina.policies.yarn_cs import YarnCsPolicy

POLICIES: dict[str, Policy] = {
    policy.name: policy
    for policy in (FifoPolicy(), BackfillPolicy(), EdfPolicy(), YarnCsPolicy(), SrtfPolicy(), TiresiasPolicy())
}


def policy_named(name: str) -> Policy:
    """The policy of that name with its default parameters."""
    if name not in POLICIES:
        raise UnknownNameError(kind="policy", seen=name, known=tuple(sorted(POLICIES)))
    return POLICIES[name]
