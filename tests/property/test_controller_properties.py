"""Thousands of turns of the controller among keepers that are late, killed and started again."""

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from tests.property.cluster_model import World, node, replace

from concertina.cluster.records import NodePhase, Op
from concertina.core.job import JobPhase
from concertina.policies.registry import POLICIES

CLUSTERS = [(node("n", 4),), (node("a", 2), node("b", 2)), (node("a", 4), node("b", 1)), (node("n", 1),)]


def trouble(world: World, moves: int, *, kill_controllers: bool, kill_keepers: bool) -> None:
    chance = world.chance
    for _ in range(moves):
        what = chance.random()
        if what < 0.05 and len(world.requests) < 8:
            low = chance.choice([1, 1, 1, 2])
            given = {"min_workers": low, "steps": chance.choice([10, 40, 100]), "args": (str(chance.randint(0, 2)),)}
            if chance.random() < 0.4:
                given |= {"deadline_s": world.now + chance.uniform(20, 2000), "soft": chance.random() < 0.3}
            world.submit(**given)
        elif what < 0.08:
            asks(world)
        elif what < 0.10:
            flip_node(world)
        elif what < 0.3:
            crash = chance.randint(0, 6) if kill_controllers and chance.random() < 0.4 else None
            world.turn(crash)
            world.now += chance.choice([0.2, 1.0])
        elif what < 0.32 and kill_keepers and world.processes:
            world.kill_keeper(chance.choice(world.processes))
        elif world.processes:
            world.keeper_moves(chance.choice(world.processes))
        else:
            world.now += 0.2
        world.check()


def asks(world: World) -> None:
    chance = world.chance
    job = chance.choice([*world.requests, "nobody"])
    op = chance.choice([Op.RESIZE, Op.RECLAIM, Op.RETURN, Op.DRAIN, Op.UNDRAIN, Op.CANCEL])
    if op is Op.CANCEL and chance.random() < 0.7:
        return
    target = chance.choice(world.nodes).id if op in (Op.DRAIN, Op.UNDRAIN) else job
    world.ask(op, target, chance.randint(0, 3))


def flip_node(world: World) -> None:
    at = world.chance.randrange(len(world.nodes))
    nodes = list(world.nodes)
    lost = nodes[at].phase is NodePhase.LOST
    nodes[at] = replace(nodes[at], phase=NodePhase.UP if lost else NodePhase.LOST)
    world.nodes = tuple(nodes)


def calm(world: World, most: int = 4000) -> None:
    """Nothing bad happens any more: everybody comes to an end."""
    world.nodes = tuple(replace(n, phase=NodePhase.UP) for n in world.nodes)
    world.turn()  # whatever was asked before comes first
    if world.cluster.lent:
        world.ask(Op.RETURN)
    for name in world.cluster.drained:
        world.ask(Op.UNDRAIN, name)
    for job, state in list(world.states.items()):
        if state.pinned and not state.phase.is_end:
            world.ask(Op.RESIZE, job, 0)
    for _ in range(most):
        if world.quiet() and not world.asks and not world.processes and world.requests.keys() == world.states.keys():
            return
        world.turn()
        for process in list(world.processes):
            for _ in range(3):
                if process in world.processes:
                    world.keeper_moves(process)
                world.check()
        world.now += 1.0
    left = {j: (s.phase.value, s.slots, s.reason) for j, s in world.states.items() if not s.phase.is_end}
    raise AssertionError(f"not at an end: {left}, {[(p.job, p.attempt, p.activity) for p in world.processes]}")


def all_accounted_for(world: World) -> None:
    for job, state in world.states.items():
        if state.phase is JobPhase.FINISHED:
            assert world.finished_work[job] == 1
            assert state.done == world.requests[job].steps
        elif state.phase is JobPhase.FAILED:
            assert world.killed_keepers.get(job, 0) >= 3, f"{job} failed without reason: {state.reason}"
        else:
            assert state.phase in (JobPhase.CANCELLED, JobPhase.REJECTED), (job, state)
            assert state.reason
    assert not world.asks


# A seed can not be made simpler, so nobody tries to.
@settings(max_examples=30, deadline=None, phases=(Phase.explicit, Phase.reuse, Phase.generate))
@given(seed=st.integers(0, 2**32), cluster=st.sampled_from(CLUSTERS), kills=st.tuples(st.booleans(), st.booleans()))
def test_no_slot_is_used_twice_no_job_is_lost_none_runs_twice(
    seed: int, cluster: tuple[object, ...], kills: tuple[bool, bool]
) -> None:
    world = World(seed, cluster)  # type: ignore[arg-type]
    trouble(world, 500, kill_controllers=kills[0], kill_keepers=kills[1])
    calm(world)
    all_accounted_for(world)


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_every_policy_can_run_a_live_cluster(policy: str) -> None:
    world = World(3, CLUSTERS[1], policy)  # type: ignore[arg-type]
    trouble(world, 120, kill_controllers=True, kill_keepers=False)
    calm(world)
    all_accounted_for(world)
