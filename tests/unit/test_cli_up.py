"""When `concertina up` ends by itself."""

from types import SimpleNamespace
from typing import Any

import pytest

from concertina.cli.up import _cancel_all, is_going_down
from concertina.cluster.records import ClusterState
from concertina.core.errors import RequestRefused


@pytest.mark.parametrize(
    ("cluster", "ends"),
    [
        (None, False),
        (ClusterState(policy="", backend=""), False),
        (ClusterState(policy="", backend="", going_down=True, down_s=99.0), False),  # the one before was ended
        (ClusterState(policy="", backend="", going_down=True, down_s=101.0), True),
        (ClusterState(policy="", backend="", going_down=True, down_s=98.0), True),  # the clock was set back
    ],
)
def test_a_cluster_that_was_ended_before_does_not_end_the_next_one(cluster: ClusterState | None, ends: bool) -> None:
    serving: Any = SimpleNamespace(
        mirror=SimpleNamespace(cluster=cluster), controller=SimpleNamespace(down_before=99.0)
    )
    assert is_going_down(serving) is ends


def test_a_job_that_ends_by_itself_does_not_keep_the_others_from_being_cancelled() -> None:
    class Jobs:
        def __init__(self) -> None:
            self.cancelled: list[str] = []

        def jobs(self) -> list[dict[str, Any]]:
            return [{"id": name, "phase": "running", "ended_s": None} for name in ("quick", "slow")]

        def delete(self, path: str) -> None:
            if path.endswith("quick"):
                raise RequestRefused("job quick has ended already (finished)")
            self.cancelled.append(path)

    client: Any = Jobs()
    _cancel_all(client)
    assert client.cancelled == ["/jobs/slow"]
