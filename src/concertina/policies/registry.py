"""The list of policies by name, each with the paper it comes from."""

from __future__ import annotations

from concertina.core.errors import UnknownNameError
from concertina.policies.backfill import BackfillPolicy
from concertina.policies.base import Policy
from concertina.policies.chronus import ChronusPolicy
from concertina.policies.concertina import ConcertinaPolicy
from concertina.policies.easyscale import EasyScalePolicy
from concertina.policies.edf import EdfPolicy
from concertina.policies.elastic_backfill import ElasticBackfillPolicy
from concertina.policies.elastic_fifo import ElasticFifoPolicy
from concertina.policies.elastic_tiresias import ElasticTiresiasPolicy
from concertina.policies.elasticflow import ElasticFlowPolicy
from concertina.policies.fifo import FifoPolicy
from concertina.policies.gandiva import GandivaPolicy
from concertina.policies.greedy import GreedyPolicy
from concertina.policies.las import LasPolicy
from concertina.policies.milp import MilpPolicy
from concertina.policies.optimus import OptimusPolicy
from concertina.policies.promise import Terms
from concertina.policies.srtf import SrtfPolicy
from concertina.policies.themis import ThemisPolicy
from concertina.policies.tiresias import TiresiasPolicy, log_normal_samples
from concertina.policies.yarn_cs import YarnCsPolicy

_ALL: tuple[Policy, ...] = (
    FifoPolicy(),
    BackfillPolicy(),
    ElasticFifoPolicy(),
    ElasticBackfillPolicy(),
    YarnCsPolicy(),
    EasyScalePolicy(),
    EasyScalePolicy(name="easyscale-heter", paper="EasyScale (SC 2023), 3.4.2: device types may be mixed", mixes=True),
    SrtfPolicy(),
    LasPolicy(),
    TiresiasPolicy(),
    TiresiasPolicy(
        name="tiresias-gittins",
        paper="Gu et al. (NSDI 2019), 2D-Gittins",
        samples=log_normal_samples(median=900.0, sigma=2.5),
    ),
    ElasticTiresiasPolicy(),
    GandivaPolicy(),
    ThemisPolicy(),
    ChronusPolicy(),
    EdfPolicy(),
    OptimusPolicy(),
    GreedyPolicy(),
    MilpPolicy(),
    ConcertinaPolicy(),
    ElasticFlowPolicy(),
    ElasticFlowPolicy(
        name="edf-admission",
        paper="ElasticFlow (ASPLOS 2023), 6.4: admission without elasticity",
        admission="promise-gang",
        terms=Terms(elastic=False),
    ),
    ElasticFlowPolicy(
        name="edf-elastic",
        paper="ElasticFlow (ASPLOS 2023), 6.4: elasticity without admission",
        admission="fits-elastic",
        terms=Terms(give_up=False, attempts=0),
    ),
)

POLICIES: dict[str, Policy] = {policy.name: policy for policy in _ALL}


def policy_named(name: str) -> Policy:
    """The policy of that name with its default parameters."""
    if name not in POLICIES:
        raise UnknownNameError(kind="policy", seen=name, known=tuple(sorted(POLICIES)))
    return POLICIES[name]
