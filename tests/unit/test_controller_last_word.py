"""A keeper says how its job ended, then it ends: the controller may see the second before the first."""

from typing import Any

import pytest

from concertina.cluster import keys
from concertina.cluster.codec import dump
from concertina.cluster.controller import Controller
from concertina.cluster.mirror import Mirror
from concertina.cluster.records import Activity, JobRequest, JobSeen, JobState, NodeState
from concertina.core.job import JobPhase
from concertina.store.memory import MemoryStore


class Gone:
    """A machine on which no keeper is left."""

    name = "local"

    def nodes(self) -> tuple[NodeState, ...]:
        return (NodeState(id="n", device_type="cpu", slots=1),)

    def is_gone(self, *about: Any) -> bool:
        return True


@pytest.mark.parametrize(("activity", "gone"), [(Activity.FINISHED, set()), (Activity.TRAINING, {"j"})])
def test_a_keeper_that_said_how_it_ended_has_not_vanished(activity: Activity, gone: set[str]) -> None:
    store = MemoryStore()
    store.put(keys.REQUESTS + "j", dump(JobRequest(id="j", name="j", user="u", script="/x.py")))
    store.put(keys.STATES + "j", dump(JobState(id="j", phase=JobPhase.RUNNING, slots=("n/0",), attempt=1, order=1)))
    store.put(keys.SEEN + "j", dump(JobSeen(id="j", attempt=1, slots=("n/0",), activity=Activity.TRAINING)))
    mirror = Mirror(store)
    mirror.start()
    mirror.close()  # from here on it hears nothing: as late as can be
    controller = Controller(lambda: store, mirror, Gone())  # type: ignore[arg-type]
    books = controller._load(store)
    store.put(keys.SEEN + "j", dump(JobSeen(id="j", attempt=1, activity=activity)))
    assert controller._look(store, books).gone == gone
    store.close()
