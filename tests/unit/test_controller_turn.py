"""Whole turns of the controller, on a cluster made of numbers that obeys."""

from dataclasses import replace

import pytest
from tests.property.cluster_model import World, node

from concertina.cluster.records import (
    Activity,
    Ask,
    ClusterState,
    Curve,
    JobRequest,
    JobState,
    NodePhase,
    NodeState,
    Op,
    Reply,
)
from concertina.cluster.turn import decide
from concertina.cluster.turn_types import Decision, Facts, Memory
from concertina.cluster.views import live_policy
from concertina.cluster.writes import Written
from concertina.core.job import JobPhase

KNOWN = {"kind-()": Curve(key="kind-()", speeds={1: 1.0, 2: 1.8, 4: 3.1})}


def world(slots: int = 4, seed: int = 0) -> World:
    found = World(seed, (node("n", slots),))
    found.curves = dict(KNOWN)
    return found


def settle(world: World, turns: int = 6) -> None:
    """A few seconds in which every keeper does all it should but train."""
    for _ in range(turns):
        world.turn()
        obey(world)
        world.now += 1.0


def obey(world: World) -> None:
    for process in list(world.processes):
        world.locks[process.job] = process
        for move in (world._read, *[world._workers] * 8, world._write):
            if process in world.processes:
                move(process)


def test_a_job_alone_gets_all_and_shrinks_for_one_with_a_deadline() -> None:
    here = world()
    first = here.submit(steps=10_000)
    settle(here)
    assert len(here.states[first].slots) == 4
    second = here.submit(steps=400, deadline_s=here.now + 300)
    settle(here)
    a, b = here.states[first], here.states[second]
    assert (b.phase, b.promised_s) == (JobPhase.RUNNING, here.requests[second].deadline_s)
    assert len(a.slots) + len(b.slots) == 4
    assert len(b.slots) >= 2
    assert a.history[-1].reason == a.reason != ""
    assert {line.workers for line in a.history} >= {0, 4}
    assert here.processes[0].workers == set(a.slots)


def test_a_deadline_that_can_not_be_kept_is_refused_with_the_earliest_that_could() -> None:
    here = world()
    name = here.submit(steps=10_000, deadline_s=here.now + 60)
    settle(here, 1)
    state = here.states[name]
    assert state.phase is JobPhase.REJECTED
    assert "it can not be done by then" in state.reason
    assert "could be promised" in state.reason
    assert "18000" not in state.reason, "a moment, not seconds since 1970"
    assert state.earliest_s is not None
    assert state.earliest_s > here.now + 3000


def test_a_job_that_nobody_knows_is_measured_on_what_is_idle_then_admitted() -> None:
    here = world()
    here.curves = {}
    name = here.submit(steps=4000, deadline_s=here.now + 5000)
    counts = []
    for _ in range(40):
        settle(here, 1)
        for process in here.processes:
            process.step += 3
            here._write(process)
        counts.append(len(here.states[name].slots))
        if here.states[name].phase is JobPhase.RUNNING:
            break
    state = here.states[name]
    assert state.phase is JobPhase.RUNNING
    assert state.promised_s == here.requests[name].deadline_s
    assert [n for i, n in enumerate(counts) if n not in counts[:i]] == [1, 2, 4]
    assert here.curves["kind-()"].speeds == {1: 1.0, 2: 1.8, 4: 3.1}
    assert len({p.attempt for p in here.processes}) == 1, "measuring costs no restart"


def test_a_measured_job_that_gives_a_borrowed_slot_up_says_so() -> None:
    here = world()
    here.curves = {}
    first = here.submit(steps=4000, deadline_s=here.now + 9000)
    for _ in range(60):
        here.turn()
        if len(here.states[first].slots) == 4:
            break
        obey(here)
        for process in here.processes:
            process.step += 3
            here._write(process)
    here.requests["new"] = replace(here.requests[first], id="new", args=("new",), submitted_s=here.now)
    here.turn()
    state = here.states[first]
    assert (state.profiling, len(state.slots)) == (True, 3)
    assert state.reason == "others want slots that were idle; it is measured on 3 workers"


def test_of_two_jobs_of_one_unknown_kind_the_second_waits_for_the_first() -> None:
    here = world()
    here.curves = {}
    first, second = here.submit(), here.submit()
    settle(here, 2)
    assert here.states[first].profiling
    assert here.states[first].slots
    assert here.states[second].reason == f"it waits until {first} has shown how fast this kind of job is"
    here.ask(Op.CANCEL, first)
    settle(here)
    assert here.states[second].profiling, "then it is its turn"


@pytest.mark.parametrize("seed", range(4))  # how many are admitted in one turn is left to chance
def test_what_the_first_of_a_kind_tells_of_its_steps_holds_for_those_that_waited(seed: int) -> None:
    here = world(seed=seed)
    here.curves = {}
    first = here.submit(steps=400)
    second = here.submit(steps=0, deadline_s=here.now + 5000)
    for _ in range(20):
        settle(here, 1)
        for process in here.processes:
            process.step += 3
            here._write(process)
        if here.states[second].phase is not JobPhase.SUBMITTED:
            break
    assert here.states[first].phase is JobPhase.RUNNING
    assert "--steps" not in here.states[second].reason
    assert here.states[second].work == 400


def test_room_is_made_to_measure_a_newcomer() -> None:
    here = world()
    long = here.submit(steps=10_000)
    settle(here)
    here.requests["new"] = replace(here.requests[long], id="new", args=("new",), submitted_s=here.now)
    settle(here)
    assert here.states["new"].profiling
    assert len(here.states["new"].slots) == 1
    assert 1 <= len(here.states[long].slots) <= 3


def test_a_deadline_without_a_known_amount_of_work_is_refused_in_words() -> None:
    here = world()
    name = here.submit(steps=0, deadline_s=here.now + 600)
    settle(here, 1)
    assert here.states[name].phase is JobPhase.REJECTED
    assert "--steps" in here.states[name].reason


def test_a_job_that_proves_slow_makes_a_round_and_its_curve_is_corrected() -> None:
    here = world()
    other = here.submit(steps=100_000)
    name = here.submit(steps=900, deadline_s=here.now + 800)
    settle(here)
    before = len(here.states[name].slots)
    assert before < 4
    seen = here.seen[name]
    here.seen[name] = replace(seen, step=40, speeds={before: 0.6 * KNOWN["kind-()"].speeds[before]})
    here.turn()
    state = here.states[name]
    assert state.speeds[before] == 0.6 * KNOWN["kind-()"].speeds[before]
    obey(here)
    settle(here)
    assert len(here.states[name].slots) > before, here.states[other]
    assert "steps/s on" in here.states[name].history[-1].reason


def test_what_a_job_shows_on_one_type_of_device_is_kept_for_that_type() -> None:
    here = World(0, (replace(node("slow", 2), device_type="T4"), replace(node("fast", 2), device_type="A100")))
    here.curves = {"kind-()": Curve(key="kind-()", speeds={1: 1.0, 2: 1.8}, types={"T4": {1: 1.0, 2: 1.8}})}
    name = here.submit(steps=10_000, max_workers=2)
    settle(here)
    seen = here.seen[name]
    here.seen[name] = replace(seen, step=40, speeds={2: 9.0}, device_type="A100")
    here.turn()
    assert (here.states[name].speeds, here.states[name].speeds_type) == ({2: 9.0}, "A100")
    here.seen[name] = replace(here.seen[name], activity=Activity.FINISHED, slots=())
    here.turn()
    assert here.curves["kind-()"].types == {"T4": {1: 1.0, 2: 1.8}, "A100": {2: 9.0}}


def test_a_job_is_measured_on_one_type_of_device_at_a_time() -> None:
    here = World(0, (replace(node("a", 2), device_type="T4"), replace(node("b", 2), device_type="A100")))
    name = here.submit(steps=4000, deadline_s=here.now + 9000)
    counts = set()
    for _ in range(30):
        settle(here, 1)
        for process in here.processes:
            process.step += 3
            here._write(process)
        state = here.states[name]
        if state.profiling:
            counts.add(len({slot[0] for slot in state.slots}))
    assert counts <= {0, 1}
    assert here.states[name].phase is JobPhase.RUNNING


def test_reclaimed_slots_are_left_in_a_hurry_and_come_back() -> None:
    here = world()
    name = here.submit(steps=10_000)
    settle(here)
    asked = here.ask(Op.RECLAIM, number=2)
    here.turn()
    state = here.states[name]
    assert (len(state.slots), state.vacate_s) == (2, 2.0)
    assert state.reason == "2 slots were reclaimed for somebody else; it goes on with 2 slots"
    assert here.answers[asked].accepted  # type: ignore[attr-defined]
    obey(here)
    settle(here)
    assert len(here.states[name].slots) == 2
    here.ask(Op.RETURN)
    settle(here)
    assert len(here.states[name].slots) == 4


def test_down_suspends_everybody_and_keeps_them() -> None:
    here = world()
    names = [here.submit(steps=1000) for _ in range(3)]
    settle(here)
    here.ask(Op.DOWN)
    settle(here)
    assert not here.processes
    assert {here.states[name].phase for name in names} == {JobPhase.WAITING}
    here.cluster = replace(here.cluster, going_down=False)
    here.memory = None
    settle(here)
    assert any(here.states[name].slots for name in names)


def test_jobs_leave_a_node_that_is_drained_or_lost() -> None:
    here = World(0, (node("x", 2), node("y", 2)))
    here.curves = dict(KNOWN)
    name = here.submit(steps=1000)
    settle(here)
    assert len(here.states[name].slots) == 4
    here.ask(Op.DRAIN, "x")
    settle(here)
    assert set(here.states[name].slots) == {"y/0", "y/1"}
    here.nodes = (here.nodes[0], replace(here.nodes[1], phase=NodePhase.LOST))
    settle(here)
    assert here.states[name].slots == ()


def test_a_resize_holds_until_it_is_taken_back() -> None:
    here = world()
    name = here.submit(steps=10_000)
    settle(here)
    here.ask(Op.RESIZE, name, 1)
    settle(here)
    assert len(here.states[name].slots) == 1
    assert here.states[name].reason == here.states[name].history[-1].reason == "pinned to 1 worker"
    here.ask(Op.RESIZE, name, 0)
    settle(here)
    assert len(here.states[name].slots) == 4
    assert "pinned" not in here.states[name].reason


def test_a_settled_cluster_is_left_alone() -> None:
    here = world()
    for _ in range(3):
        here.submit(steps=5000)
    settle(here, 10)
    orders = {name: state.order for name, state in here.states.items()}
    settle(here, 40)
    assert {name: state.order for name, state in here.states.items()} == orders


def test_a_policy_that_breaks_costs_nobody_anything() -> None:
    class Broken:
        name = paper = admission = "fits-elastic"

        def allocate(self, table: object) -> None:
            raise ZeroDivisionError("division by zero")

    here = world()
    name = here.submit(steps=10_000)
    settle(here)
    memory, facts = here.memory, here._look(here.memory)  # type: ignore[arg-type]
    assert memory is not None
    decision = decide(replace(memory, dirty=True), facts, Broken())  # type: ignore[arg-type]
    assert decision.memory.cluster.error == "ZeroDivisionError: division by zero"
    assert decision.memory.live[name].slots == here.states[name].slots


def test_senseless_requests_are_refused_at_once() -> None:
    facts = Facts(
        now=1.8e9,
        nodes=(NodeState(id="n", device_type="cpu", slots=2),),
        requests={},
        fresh=(),
    )
    wide = JobRequest(id="wide", name="", user="", script="s", virtual=8, min_workers=4)
    odd = JobRequest(id="odd", name="", user="", script="gone.py")
    upside = JobRequest(id="upside", name="", user="", script="s", virtual=2, min_workers=3)
    requests = {r.id: r for r in (wide, odd, upside)}
    facts = replace(facts, requests=requests, fresh=tuple(requests.values()), kinds={"wide": "k", "upside": "k"})
    memory = Memory(cluster=ClusterState(policy="concertina", backend="x"))
    found = decide(memory, facts, live_policy("concertina"))
    reasons = {job: state.reason for job, state in found.states.items() if state.phase is JobPhase.REJECTED}
    assert reasons == {
        "wide": "it needs at least 4 workers; with 2 slots a job gets 2 at most",
        "odd": "its script gone.py can not be read on this machine",
        "upside": "it asks for at least 3 workers and for at most 2",
    }
    assert set(found.at_rest) == set(requests)


def test_a_keeper_that_stands_still_is_ended_and_replaced() -> None:
    here = world()
    name = here.submit(steps=1000)
    settle(here)
    assert here.memory is not None
    facts = replace(here._look(here.memory), registered=frozenset(), missing_s={name: 25.0})
    decision = decide(here.memory, facts, here.policy)
    assert decision.end == (name,)
    assert not decide(here.memory, replace(facts, missing_s={name: 5.0}), here.policy).end


def test_rounds_go_on_when_the_clock_was_set_back() -> None:
    here = world()
    here.submit(steps=1000)
    settle(here)
    assert here.memory is not None
    memory = replace(here.memory, wake_s=None)
    facts = here._look(memory)
    assert not decide(memory, facts, here.policy).round
    for jump_s in (15.0, -3600.0):
        assert decide(memory, replace(facts, now=facts.now + jump_s), here.policy).round


def test_promises_wait_for_the_next_round_where_they_would_take_too_long() -> None:
    here = world()
    names = [here.submit(steps=10, deadline_s=here.now + 900) for _ in range(5)] + [here.submit() for _ in range(3)]
    here.memory = here._load()
    facts = replace(here._look(here.memory), admit_most=50, promise_most=2)
    decision = decide(here.memory, facts, here.policy)
    still = [name for name in names if decision.states[name].phase is JobPhase.SUBMITTED]
    assert still == names[2:5]
    assert (decision.admissions, decision.promises, decision.memory.dirty) == (5, 2, True)
    settle(here)
    assert all(here.states[name].phase is not JobPhase.SUBMITTED for name in names)


PROMISING = ("concertina", "elasticflow", "edf-elastic", "edf-admission")


def one_slot_nodes(count: int, policy: str = "concertina") -> World:
    found = World(0, tuple(node(f"n{number}", 1) for number in range(count)), policy)
    found.curves = dict(KNOWN)
    return found


@pytest.mark.parametrize("policy", PROMISING)
@pytest.mark.parametrize("due_s", [None, 3000])
def test_a_job_that_no_power_of_two_can_serve_is_given_what_it_needs(policy: str, due_s: int | None) -> None:
    here = one_slot_nodes(3, policy)
    deadline_s = None if due_s is None else here.now + due_s
    name = here.submit(virtual=4, min_workers=3, steps=400, deadline_s=deadline_s)
    settle(here)
    state = here.states[name]
    assert (state.phase, len(state.slots)) == (JobPhase.RUNNING, 3), state.reason
    assert policy == "edf-elastic" or state.promised_s == deadline_s


def test_a_job_that_no_power_of_two_can_serve_is_measured_on_what_it_needs() -> None:
    here = one_slot_nodes(3)
    here.curves = {}
    name = here.submit(virtual=4, min_workers=3)
    settle(here)
    assert (here.states[name].profiling, len(here.states[name].slots)) == (True, 3)


def test_a_job_that_no_power_of_two_can_serve_shares_with_others_and_grows_to_all() -> None:
    here = world(7)
    small = here.submit(virtual=1, steps=300, deadline_s=here.now + 500)
    large = here.submit(virtual=8, min_workers=5, steps=10_000)
    settle(here)
    assert (len(here.states[small].slots), len(here.states[large].slots)) == (1, 5)
    here.ask(Op.CANCEL, small)
    settle(here, 12)
    assert len(here.states[large].slots) == 7


def test_a_job_may_insist_on_any_number_that_is_there_and_on_no_more() -> None:
    here = world(6)
    here.submit(virtual=8, min_workers=7)
    name = here.submit(virtual=8)
    settle(here)
    assert here.states["j0"].reason == "it needs at least 7 workers; with 6 slots a job gets 6 at most"
    for number in (5, 3, 6):
        here.ask(Op.RESIZE, name, number)
        settle(here)
        assert len(here.states[name].slots) == number


def test_who_gives_slots_up_is_written_before_who_takes_them() -> None:
    state = JobState(id="a", phase=JobPhase.RUNNING)
    before = {"taker": replace(state, id="taker"), "giver": replace(state, id="giver", slots=("n/0", "n/1"))}
    after = {"taker": replace(state, id="taker", slots=("n/1",)), "giver": replace(state, id="giver", slots=("n/0",))}
    cluster = ClusterState(policy="p", backend="b", asks_done=("1",))
    ask = Ask(id="1", op=Op.RECLAIM, user="u")
    decision = Decision(
        memory=Memory(cluster=cluster, live=after, notes={"giver": (2, 0.5)}, reserved={}),
        states=after,
        replies=(Reply(id="1", accepted=True, reason="done"),),
    )
    todo = Written(states=before).todo(decision, [ask], 100.0)
    assert [write.key for write in todo] == ["cluster", "states/giver", "states/taker", "answers/1", "asks/1"]
    assert todo[1].record == replace(after["giver"], level=2, stamp=0.5)
    assert todo[-1].record is None


def test_progress_is_written_now_and_then_decisions_at_once() -> None:
    state = JobState(id="a", phase=JobPhase.RUNNING, slots=("n/0",))
    written = Written(cluster=ClusterState(policy="p", backend="b"), cluster_s=100.0)
    first = Decision(memory=Memory(cluster=ClusterState(policy="p", backend="b"), live={"a": state}))
    for write in (todo := written.todo(first, [], 100.0)):
        written.done(write, 100.0)
    assert [write.key for write in todo] == ["states/a"]

    def keys_for(changed: JobState, now: float) -> list[str]:
        memory = Memory(cluster=ClusterState(policy="p", backend="b", rounds=9), live={"a": changed})
        return [write.key for write in written.todo(Decision(memory=memory), [], now)]

    assert keys_for(replace(state, done=5.0, service_s=3.0), 101.0) == []
    assert keys_for(replace(state, done=5.0), 106.0) == ["cluster", "states/a"]
    assert keys_for(replace(state, reason="another"), 101.0) == ["states/a"]
    assert keys_for(replace(state, slots=(), done=9.0, phase=JobPhase.WAITING), 101.0) == ["states/a"]
