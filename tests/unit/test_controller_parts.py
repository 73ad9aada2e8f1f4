"""The pure parts of the controller: curves, views, progress, asks."""

from dataclasses import replace

import pytest

from concertina.cluster.asks import Standing, answer
from concertina.cluster.codec import load
from concertina.cluster.curves import LiveCurves, adopted, corrected, kind_of, merged, points
from concertina.cluster.evict import Holder
from concertina.cluster.records import (
    Activity,
    Ask,
    ClusterState,
    Curve,
    JobRequest,
    JobSeen,
    JobState,
    NodePhase,
    NodeState,
    Op,
    User,
)
from concertina.cluster.settle import (
    Need,
    change,
    given_up,
    known_work,
    need,
    not_started,
    restarted,
    settled,
    vanished,
)
from concertina.cluster.slots import occupied
from concertina.cluster.views import (
    Live,
    Notes,
    at_cost,
    cluster_of,
    live_policy,
    readable,
    snapshot_of,
    spec_of,
    start_seconds,
)
from concertina.core.errors import NoCurveError
from concertina.core.job import JobPhase
from concertina.policies.admission import terms_of

NOW = 1_800_000_000.0
NO_NOTES = Notes(levels={}, reserved={})


def request(**fields: object) -> JobRequest:
    given = {"id": "a", "name": "a", "user": "u", "script": "a.py", "virtual": 8, "steps": 100, "submitted_s": NOW}
    return JobRequest(**{**given, **fields})  # type: ignore[arg-type]


def live(state: JobState | None = None, seen: JobSeen | None = None, **fields: object) -> Live:
    return Live(request=request(**fields), state=state or JobState(id="a", curve="k"), seen=seen)


# -- curves --------------------------------------------------------------------------------------------------------


def test_the_kind_of_a_job_is_its_script_arguments_virtual_workers_and_scaling() -> None:
    kind = kind_of(request(args=("1", "2")), b"code")
    assert kind == kind_of(request(id="b", args=("1", "2"), steps=7, deadline_s=9.0), b"code")
    others = [
        kind_of(request(args=("12",)), b"code"),
        kind_of(request(args=("1", "2")), b"other"),
        kind_of(request(args=("1", "2"), virtual=4), b"code"),
        kind_of(request(args=("1", "2"), scaling="weak"), b"code"),
    ]
    assert len({kind, *others}) == 5


def test_what_was_not_measured_follows_the_law_beyond_and_a_line_between() -> None:
    found = points({2: 10.0, 4: 14.0}, 8)
    assert found[3] == 12.0
    assert found[8] == pytest.approx(14.0 * 1.6)
    assert found[1] == pytest.approx(10.0 / 1.6)
    assert points({}, 4) == {}


def test_a_job_that_is_slower_than_its_kind_is_believed_to_be_so_everywhere() -> None:
    assert corrected({1: 10.0, 2: 16.0, 4: 30.0}, {2: 8.0}) == {1: 5.0, 2: 8.0, 4: 15.0}


def test_small_differences_are_no_news() -> None:
    assert adopted({2: 10.0}, {}, {2: 10.9}) == {}
    assert adopted({2: 10.0}, {}, {2: 9.6}) == {}
    assert adopted({2: 10.0}, {}, {2: 9.4}) == {2: 9.4}
    assert adopted({2: 10.0}, {}, {2: 11.5, 4: 3.0}) == {2: 11.5, 4: 3.0}
    assert adopted({2: 10.0}, {4: 1.0}, {2: 9.0}) == {2: 9.0, 4: 1.0}


def test_a_kind_that_is_measured_again_moves_half_way() -> None:
    old = Curve(key="k", speeds={1: 10.0}, total_steps=50)
    found = merged(old, "k", {1: 8.0, 2: 15.0}, 0, "measured while it ran")
    assert found == Curve(key="k", speeds={1: 9.0, 2: 15.0}, source="measured while it ran", total_steps=50)
    assert merged(old, "k", {1: 10.1}, 50, "") is None


def test_curves_are_found_by_kind_and_by_job() -> None:
    stored = {"k": Curve(key="k", speeds={1: 10.0})}
    curves = LiveCurves(stored, {"slow": ("", {1: 5.0})}, 4)
    spec = spec_of(live(), stored, 4)
    assert curves.of(spec)[0].speed("any", 4) == pytest.approx(10.0 * 4 * 0.64)
    assert curves.of(replace(spec, id="slow"))[0].speed("any", 1) == 5.0
    assert curves.of(replace(spec, id="other"))[0] is curves.of(spec)[0], "one ladder for all jobs of a kind"
    with pytest.raises(NoCurveError, match="not measured"):
        curves.of(replace(spec, model="unknown"))


def test_each_type_of_device_has_its_own_curve_and_old_records_hold_for_all() -> None:
    old = Curve(key="k", speeds={1: 10.0, 2: 18.0})
    assert load(Curve, b'{"key":"k","speeds":{"1":10.0,"2":18.0},"source":"","total_steps":0}') == old
    slow = merged(old, "k", {1: 4.0}, 0, "", "T4")
    assert slow is not None
    fast = merged(slow, "k", {1: 10.0, 2: 18.0}, 0, "", "A100")
    assert fast is not None
    assert fast.types == {"T4": {1: 4.0}, "A100": {1: 10.0, 2: 18.0}}
    assert (old.on("T4"), fast.on("T4"), fast.on("V100")) == (old.speeds, {1: 4.0}, fast.speeds)
    curves = LiveCurves({"k": fast}, {}, 4)
    curve = curves.of(spec_of(live(), {"k": fast}, 4))[0]
    assert (curve.speed("T4", 1), curve.speed("A100", 1), curve.speed("A100", 2)) == (4.0, 10.0, 18.0)


def test_a_job_that_is_slow_on_one_type_is_believed_to_be_so_on_the_others() -> None:
    stored = {"k": Curve(key="k", speeds={1: 8.0}, types={"T4": {1: 4.0}, "A100": {1: 10.0}})}
    curve = LiveCurves(stored, {"a": ("A100", {1: 5.0})}, 4).of(spec_of(live(), stored, 4))[0]
    assert (curve.speed("A100", 1), curve.speed("T4", 1), curve.speed("new", 1)) == (5.0, 2.0, 4.0)


# -- views ---------------------------------------------------------------------------------------------------------


def test_a_specification_says_what_was_asked_for() -> None:
    job = live(min_workers=2, max_workers=6, deadline_s=NOW + 50)
    spec = spec_of(replace(job, state=replace(job.state, work=100.0)), {}, 4)
    assert (spec.gpus, spec.min_workers, spec.max_workers) == (2, 2, 6)
    assert spec_of(job, {}, 4, gang=True).gpus == 4
    assert (spec.work, spec.deadline_s, spec.model, spec.soft) == (100.0, NOW + 50, "k", False)
    pinned = spec_of(replace(job, state=replace(job.state, pinned=3)), {}, 4)
    assert (pinned.gpus, pinned.min_workers, pinned.max_workers) == (3, 3, 3)


def test_work_that_nobody_knows_is_as_much_again_and_ten_minutes_at_least() -> None:
    stored = {"k": Curve(key="k", speeds={1: 2.0})}
    running = JobState(id="a", curve="k", phase=JobPhase.RUNNING, done=100.0)
    assert spec_of(live(running, steps=0), stored, 4).work == 1300.0
    assert spec_of(live(replace(running, done=5000.0), steps=0), stored, 4).work == 10000.0


def test_admission_counts_only_what_is_left_of_a_job_that_was_measured() -> None:
    measured = JobState(id="a", curve="k", work=100.0, done=30.0)
    assert spec_of(live(measured), {}, 4).work == 70.0
    assert spec_of(live(replace(measured, phase=JobPhase.RUNNING)), {}, 4).work == 100.0


def test_a_snapshot_shows_what_was_granted() -> None:
    nodes = [
        NodeState(id="x", device_type="A", slots=4, lent=(0,)),
        NodeState(id="y", device_type="B", slots=2, phase=NodePhase.LOST),
        NodeState(id="z", device_type="B", slots=1, lent=(0,)),
    ]
    state = JobState(id="a", curve="k", phase=JobPhase.RUNNING, slots=("x/1", "x/3"), work=10.0, done=4.0)
    job = live(state)
    found = snapshot_of([job], {"a": spec_of(job, {}, 7)}, nodes, Notes(levels={"a": (3, 1.5)}, reserved={}), NOW)
    assert found is not None
    assert [(n.id, n.slots) for n in found.cluster.nodes] == [("x", 3), ("y", 2), ("z", 1)]
    assert found.down == {"y", "z"}
    view = found.jobs[0]
    assert (view.workers, view.placement, view.work_done) == ((("A", 2),), (("x", 2),), 4.0)
    assert (view.level, view.stamp, view.waiting_since_s) == (3, 1.5, None)
    assert cluster_of([]) == (None, frozenset())


def test_a_job_on_its_way_to_its_first_step_is_shown_as_such() -> None:
    nodes = [NodeState(id="x", device_type="A", slots=4)]
    state = JobState(id="a", curve="k", phase=JobPhase.RUNNING, slots=("x/1",), work=10.0, begun_s=NOW - 3.0)
    for one, resumes in ((state, NOW + 9.0), (replace(state, trains_s=NOW), None), (replace(state, slots=()), None)):
        job = live(one)
        found = snapshot_of([job], {"a": spec_of(job, {}, 4)}, nodes, NO_NOTES, NOW, 12.0)
        assert found is not None
        assert found.jobs[0].resumes_s == resumes
    again = replace(state, attempt_s=NOW - 1.0)
    assert again.started_s == NOW - 1.0


def test_what_a_start_costs_is_what_three_of_four_took() -> None:
    assert start_seconds(()) == 5.0
    assert start_seconds((9.0,)) == 9.0
    assert start_seconds((20.0, 8.0, 12.0, 10.0, 400.0)) == 20.0
    assert start_seconds((400.0,)) == 120.0
    assert start_seconds((0.4,)) == 5.0


def test_promises_count_what_a_start_costs() -> None:
    terms = terms_of(at_cost(live_policy("concertina"), 18.0))
    assert terms is not None
    assert (terms.cost.flat_s, terms.cost.start_s, terms.spare_s) == (5.0, 13.0, 18.0)
    assert at_cost(live_policy("fifo"), 18.0) == live_policy("fifo")


def test_a_job_that_is_measured_shows_the_policy_only_its_fewest() -> None:
    state = JobState(id="a", profiling=True, slots=("x/0", "x/1", "x/2"))
    job = live(state)
    found = snapshot_of([job], {"a": spec_of(job, {}, 4)}, [NodeState(id="x", device_type="A", slots=4)], NO_NOTES, NOW)
    assert found is not None
    assert found.jobs[0].placement == (("x", 1),)
    assert found.jobs[0].phase is JobPhase.RUNNING


def test_moments_are_written_as_people_write_them() -> None:
    assert "1800000000" not in readable("deadline 1800000000 s: too soon; 1800000100 s could be promised")
    assert readable("within 45 s") == "within 45 s"


# -- what keepers say ----------------------------------------------------------------------------------------------

RUNNING = JobState(
    id="a", phase=JobPhase.RUNNING, slots=("x/0", "x/1"), order=3, attempt=2, attempt_s=NOW, settled_s=NOW
)


def seen(**fields: object) -> JobSeen:
    given = {"id": "a", "attempt": 2, "heard": 3, "activity": Activity.TRAINING, "slots": ("x/0", "x/1"), "step": 7}
    return JobSeen(**{**given, **fields})  # type: ignore[arg-type]


def test_a_change_is_a_new_order_with_a_line_in_the_story() -> None:
    after = change(RUNNING, NOW + 5, "others come first", slots=("x/1",))
    assert (after.order, after.slots, after.releasing, after.reason) == (4, ("x/1",), ("x/0",), "others come first")
    assert (after.history[-1].workers, after.history[-1].reason) == (1, "others come first")
    waits = change(after, NOW + 6, "suspended", slots=(), phase=JobPhase.WAITING)
    assert (waits.waiting_since_s, waits.releasing) == (NOW + 6, ("x/0", "x/1"))
    assert change(waits, NOW + 7, "suspended") is waits
    ended = change(RUNNING, NOW + 9, "done", phase=JobPhase.FINISHED)
    assert (ended.slots, ended.ended_s) == ((), NOW + 9)


def test_a_job_trains_from_when_its_keeper_says_so_until_it_has_no_slots() -> None:
    state = change(JobState(id="a", phase=JobPhase.WAITING), NOW, "starts", slots=("x/0",), phase=JobPhase.RUNNING)
    assert (state.begun_s, state.trains_s) == (NOW, 0.0)
    state = restarted(state, NOW + 1)
    of_before = live(state, seen(attempt=1, trains_s=NOW - 50))
    assert settled(of_before, NOW + 2, gone=False).trains_s == 0.0
    state = settled(live(state, seen(attempt=1, trains_s=NOW + 9)), NOW + 10, gone=False)
    assert state.trains_s == NOW + 9
    grown = change(state, NOW + 20, "grows", slots=("x/0", "x/1"))
    assert (grown.begun_s, grown.trains_s) == (NOW, NOW + 9)
    assert change(grown, NOW + 30, "waits", slots=(), phase=JobPhase.WAITING).trains_s == 0.0
    assert restarted(grown, NOW + 30).trains_s == 0.0


@pytest.mark.parametrize(
    ("state", "said", "gone", "used"),
    [
        (RUNNING, None, False, {"x/0", "x/1"}),  # its keeper is being started
        (RUNNING, seen(attempt=1, slots=("x/5",)), False, {"x/0", "x/1", "x/5"}),
        (RUNNING, seen(slots=("x/0",)), False, {"x/0"}),
        (replace(RUNNING, order=4, slots=("x/0",), releasing=("x/1",)), seen(slots=()), False, {"x/0", "x/1"}),
        (replace(RUNNING, order=4, slots=("x/0",), releasing=("x/1",)), seen(heard=4, slots=()), False, set()),
        (RUNNING, seen(activity=Activity.SUSPENDED), False, set()),
        (RUNNING, seen(), True, set()),
        (replace(RUNNING, attempt=0), None, False, set()),
    ],
)
def test_a_slot_counts_as_used_until_the_keeper_has_read_that_it_is_not(
    state: JobState, said: JobSeen | None, gone: bool, used: set[str]
) -> None:
    assert occupied(state, said, gone=gone) == used


def test_progress_and_service_are_counted() -> None:
    after = settled(live(RUNNING, seen(total_steps=80)), NOW + 10, gone=False)
    assert (after.done, after.work, after.service_s, after.executed_s) == (7.0, 80.0, 20.0, 10.0)
    assert known_work(0, 0) is None


@pytest.mark.parametrize(
    ("said", "phase", "reason"),
    [
        (seen(activity=Activity.FINISHED, exit=0), JobPhase.FINISHED, "all its work is done"),
        (seen(activity=Activity.FAILED, exit=1, error="NameError"), JobPhase.FAILED, "it failed: NameError"),
        (seen(activity=Activity.SUSPENDED), JobPhase.RUNNING, ""),
        (seen(attempt=1, activity=Activity.FINISHED), JobPhase.RUNNING, ""),  # not this attempt's word
    ],
)
def test_a_job_ends_when_its_keeper_says_so(said: JobSeen, phase: JobPhase, reason: str) -> None:
    after = settled(live(RUNNING, said), NOW, gone=False)
    assert (after.phase, after.reason) == (phase, reason)
    assert bool(after.slots) != phase.is_end


def test_keepers_are_started_restarted_and_given_up() -> None:
    fresh = replace(RUNNING, attempt=0)
    later = NOW + 100
    assert need(live(fresh), later, gone=False, registered=False) is Need.START
    assert need(live(RUNNING, seen()), later, gone=False, registered=True) is Need.NOTHING
    assert need(live(RUNNING, seen(activity=Activity.SUSPENDED)), later, gone=False, registered=True) is Need.START
    assert need(live(RUNNING, seen()), NOW + 0.5, gone=True, registered=False) is Need.NOTHING, "not at once"
    assert need(live(RUNNING, seen()), later, gone=True, registered=False) is Need.RESTART
    assert need(live(RUNNING, seen()), NOW - 3600, gone=True, registered=False) is Need.RESTART, (
        "the clock was set back"
    )
    tired = replace(RUNNING, failures=3, failed_at=7.0, done=7.0)
    assert need(live(tired, seen()), later, gone=True, registered=False) is Need.FAIL
    assert need(live(replace(tired, done=8.0), seen()), later, gone=True, registered=False) is Need.RESTART
    stopped = change(RUNNING, NOW, "cancelled", phase=JobPhase.CANCELLED)
    assert need(live(stopped, seen()), NOW + 10, gone=False, registered=True) is Need.NOTHING
    assert need(live(stopped, seen()), later, gone=False, registered=True) is Need.END
    again = change(replace(RUNNING, slots=()), NOW, "it has slots again", slots=("x/0",))
    stuck = seen(activity=Activity.SUSPENDING)
    assert need(live(again, stuck), NOW + 10, gone=False, registered=True) is Need.NOTHING
    assert need(live(again, stuck), later, gone=False, registered=True) is Need.END, "it will never end by itself"


def test_failures_count_only_while_there_is_no_progress() -> None:
    once = vanished(live(replace(RUNNING, done=7.0), seen()), NOW)
    assert (once.failures, once.failed_at, once.attempt) == (1, 7.0, 3)
    again = vanished(live(once, seen(attempt=3)), NOW)
    assert again.failures == 2
    assert vanished(live(replace(again, done=9.0), seen(attempt=4)), NOW).failures == 1
    assert "without progress beyond step 7" in given_up(live(again, seen(attempt=4)), NOW).error


def test_an_attempt_that_never_said_a_word_may_have_been_lost_with_a_controller() -> None:
    silent = vanished(live(RUNNING), NOW)
    assert (silent.failures, silent.unheard, silent.attempt) == (0, 1, 3)
    assert need(live(replace(RUNNING, unheard=20)), NOW + 100, gone=True, registered=False) is Need.FAIL
    assert "never said a word" in given_up(live(replace(RUNNING, unheard=20)), NOW).error
    assert restarted(RUNNING, NOW + 1).attempt_s == NOW + 1


def test_a_keeper_that_could_not_be_started_is_tried_for_as_long_as_it_takes_and_ever_less_often() -> None:
    state, now, pauses = RUNNING, NOW, []
    for _ in range(100):
        state, began = not_started(state, now, "No space left on device"), now
        while need(live(state), now, gone=True, registered=False) is Need.NOTHING:
            now += 1.0
        assert need(live(state), now, gone=True, registered=False) is Need.RESTART
        pauses.append(now - began)
    assert (pauses[:6], set(pauses[6:])) == ([2.0, 4.0, 8.0, 16.0, 30.0, 30.0], {30.0})
    assert state.reason == "its keeper could not be started (No space left on device): it is tried again"


# -- asks ----------------------------------------------------------------------------------------------------------


def standing(**fields: object) -> Standing:
    given = {
        "now": NOW,
        "cluster": ClusterState(policy="concertina", backend="local"),
        "nodes": (NodeState(id="x", device_type="cpu", slots=4),),
        "requests": {"a": request(), "old": request(id="old")},
        "states": {"a": RUNNING},
        "ended": {"old": JobPhase.FINISHED},
        "users": {},
        "holders": (Holder(id="a", slots=RUNNING.slots),),
        "busy": RUNNING.slots,
    }
    return Standing(**{**given, **fields})  # type: ignore[arg-type]


def ask(op: Op, target: str = "", number: int = 0, user: str = "u") -> Ask:
    return Ask(id="1", op=op, user=user, target=target, number=number)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (ask(Op.CANCEL, "nobody"), "there is no job 'nobody'"),
        (ask(Op.CANCEL, "old"), "has ended already (finished)"),
        (ask(Op.RESIZE, "a", 9), "has 8 virtual workers"),
        (ask(Op.RESIZE, "a", 5), "has 4 slots to give"),
        (ask(Op.RESIZE, "a", -1), "needed 1 or more"),
        (ask(Op.DRAIN, "y"), "there is no node 'y'; there are x"),
        (ask(Op.UNDRAIN, "x"), "is not drained"),
        (ask(Op.RECLAIM, number=5), "only 4 of 4 slots can be taken back"),
        (ask(Op.RECLAIM, number=0), "needed 1 slot or more"),
        (ask(Op.RETURN), "no slot is lent"),
        (ask(Op.RETURN, number=-2), "needed 1 slot or more"),
    ],
)
def test_nonsense_is_refused_with_a_sentence(given: Ask, words: str) -> None:
    outcome = answer(given, standing())
    assert not outcome.reply.accepted
    assert words in outcome.reply.reason
    assert outcome.state is None
    assert outcome.cluster is None


def test_a_user_may_not_touch_the_job_of_another() -> None:
    users = {"eve": User(name="eve", token=""), "root": User(name="root", token="", admin=True)}
    refused = answer(ask(Op.CANCEL, "a", user="eve"), standing(users=users))
    assert refused.reply.reason == "job a belongs to u, not to eve"
    assert answer(ask(Op.CANCEL, "a", user="root"), standing(users=users)).reply.accepted


def test_what_is_asked_for_is_done() -> None:
    cancelled = answer(ask(Op.CANCEL, "a"), standing()).state
    assert cancelled is not None
    assert (cancelled.phase, cancelled.reason) == (JobPhase.CANCELLED, "u cancelled it")
    pinned = answer(ask(Op.RESIZE, "a", 3), standing()).state
    assert pinned is not None
    assert (pinned.pinned, pinned.reason) == (3, RUNNING.reason)  # the change to 3 will have the reason
    stays = answer(ask(Op.RESIZE, "a", 2), standing()).state
    assert stays is not None
    assert (stays.pinned, stays.reason) == (2, "pinned to 2 workers")
    free = answer(ask(Op.RESIZE, "a", 0), standing(states={"a": stays})).state
    assert free is not None
    assert (free.pinned, free.reason) == (0, "it has as many workers as the policy likes")
    drained = answer(ask(Op.DRAIN, "x"), standing()).cluster
    assert drained is not None
    assert drained.drained == ("x",)
    down = answer(ask(Op.DOWN), standing()).cluster
    assert down is not None
    assert (down.going_down, down.down_s) == (True, NOW)


def test_slots_are_lent_once_however_often_the_ask_is_read() -> None:
    first = answer(ask(Op.RECLAIM, number=3), standing())
    assert first.cluster is not None
    assert first.cluster.lent == ("x/2", "x/3", "x/1")
    assert first.reply.reason == "3 slots taken back: x/2, x/3, x/1 (1 slot of a)"
    again = answer(ask(Op.RECLAIM, number=3), standing(cluster=first.cluster))
    assert again.reply.accepted
    assert again.cluster is None
    back = answer(replace(ask(Op.RETURN, number=1), id="2"), standing(cluster=first.cluster))
    assert back.cluster is not None
    assert back.cluster.lent == ("x/2", "x/3")
