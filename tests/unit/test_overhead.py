"""What a change of devices costs, by named model."""

from __future__ import annotations

import math

import pytest

from concertina.core.cluster import Cluster
from concertina.core.errors import UnknownNameError
from concertina.policies.admission import terms_of
from concertina.policies.registry import policy_named
from concertina.simulator.overhead import OVERHEADS, OverheadModel, overhead_named
from concertina.simulator.run import _priced


def pause(name: str | float, **how: object) -> float:
    given = {"before": 4, "after": 8, "first": False, "cluster": 128, "round_number": 1, **how}
    return overhead_named(name).pause(**given)  # type: ignore[arg-type]


def test_elasticflow_charges_as_its_simulator_does() -> None:
    assert pause("elasticflow") == 2 + 2 * (math.log2(8) + 1)
    assert pause("elasticflow", cluster=256) == 7 + 8
    assert pause("elasticflow", round_number=60) == 2 + 27 + 8
    assert pause("elasticflow", round_number=120, cluster=256) == 7 + 47 + 8
    assert pause("elasticflow", after=1) == 2 + 2


def test_giving_everything_back_costs_nothing() -> None:
    assert all(pause(name, after=0) == 0 for name in OVERHEADS)


def test_models_tell_rescaling_from_resuming_from_launching() -> None:
    assert pause("concertina") < 0.1 < pause("concertina", before=0)
    assert pause("concertina", before=0, first=True) == 0
    assert pause("elan") < pause("stop-resume")
    assert pause("instant") == 0


def test_who_trains_on_while_it_grows_loses_only_what_is_to_come() -> None:
    model = OverheadModel(name="m", grow_s=8.0, launch_s=20.0)

    def cost(**how: float) -> float:
        return model.pause(before=4, after=8, first=False, cluster=8, round_number=1, **how)

    assert cost(kept=0.75) == 2.0
    assert cost(kept=1.5) == 0.0
    assert cost(kept=0.75, rest=5.0) == 5.0, "a start under way is not over sooner"


def test_promises_count_what_growing_takes() -> None:
    model, cluster = OverheadModel(name="m", rescale_s=1.0, grow_s=50.0), Cluster.parse("1x4")
    terms = terms_of(_priced(policy_named("elasticflow"), model, cluster))
    assert terms is not None
    assert terms.cost.flat_s == 51.0


def test_a_number_is_a_model() -> None:
    assert pause(12.5) == pause("12.5") == pause("12.5", before=0, first=True) == 12.5


@pytest.mark.parametrize("given", ["free", "-1", "nan", "inf"])
def test_nonsense_is_refused_with_the_list(given: str) -> None:
    with pytest.raises(UnknownNameError, match="elasticflow"):
        overhead_named(given)
