"""When `concertina up` ends by itself."""

from types import SimpleNamespace
from typing import Any

import pytest

from concertina.cli.up import is_going_down
from concertina.cluster.records import ClusterState


@pytest.mark.parametrize(
    ("cluster", "ends"),
    [
        (None, False),
        (ClusterState(policy="", backend=""), False),
        (ClusterState(policy="", backend="", going_down=True, down_s=99.0), False),  # the one before was ended
        (ClusterState(policy="", backend="", going_down=True, down_s=101.0), True),
    ],
)
def test_a_cluster_that_was_ended_before_does_not_end_the_next_one(cluster: ClusterState | None, ends: bool) -> None:
    serving: Any = SimpleNamespace(mirror=SimpleNamespace(cluster=cluster), controller=SimpleNamespace(started_s=100.0))
    assert is_going_down(serving) is ends
