"""The machine that says who trains together: events in, commands out."""

import json

import pytest

from concertina.core.messages import EXIT_INTERRUPTED, EXIT_LEFT, EXIT_OK, EXIT_STATE_LOST, EXIT_USAGE
from concertina.master import state_json
from concertina.master.machine import Change, Phase, State, handle, start
from concertina.master.machine_end import MOST_LOSSES
from concertina.master.machine_types import (
    Abandon,
    Answer,
    Arm,
    AskToStop,
    BuildFailed,
    Built,
    CheckpointAsked,
    Command,
    Dismiss,
    Dropped,
    Event,
    Form,
    InterruptAsked,
    KillWorkers,
    NewcomerReady,
    PauseOver,
    PostOffered,
    Progressed,
    Release,
    RemovalAsked,
    ResizeAsked,
    Save,
    SlowFound,
    Stage,
    StartWorker,
    Stopped,
    StuckFound,
    Switched,
    Synced,
    TellLost,
    TellStory,
    UnevenFound,
    WorkerArrived,
    WorkerExited,
    WorkerFailed,
)


class Job:
    """A job under test. Every state goes through JSON, as if a new master took over after each event."""

    def __init__(self, workers: int, virtual: int = 4, **more: object) -> None:
        self.state: State
        self.state, self.said = start(virtual, workers, **more)  # type: ignore[arg-type]
        self._posts = iter(range(10**6))

    def hear(self, *events: Event) -> tuple[Command, ...]:
        """Returns what is said to all of them."""
        self.said = ()
        for event in events:
            state = state_json.load(json.loads(json.dumps(state_json.dump(self.state))))
            assert state == self.state
            self.state, commands = handle(state, event)
            self.said += commands
        return self.said

    def spoken(self, kind: type) -> list[Command]:
        return [command for command in self.said if isinstance(command, kind)]

    def one(self, kind: type) -> Command:
        found = self.spoken(kind)
        assert len(found) == 1, self.said
        return found[0]

    def reasons(self) -> list[str]:
        return [c.fields["reason"] for c in self.said if isinstance(c, TellStory)]

    def post(self, worker: int) -> PostOffered:
        return PostOffered(worker, f"post-{next(self._posts)}")

    def train(self) -> "Job":
        """The first generation arrives and builds."""
        members = self.state.members
        self.hear(*(WorkerArrived(n, f"first-{n}", f"desk-{n}") for n in members))
        self.hear(*(self.post(n) for n in members), *(Built(n, self.state.generation) for n in members))
        assert self.state.phase is Phase.TRAINING
        return self

    def let_in(self) -> "Job":
        """The newcomers of the pending change arrive; everybody builds; the members are armed."""
        pending = self.state.pending
        assert pending is not None
        for n in pending.joiners:
            self.hear(WorkerArrived(n, f"first-{n}", f"desk-{n}"), NewcomerReady(n))
        self.hear(*(self.post(n) for n in pending.members))
        self.hear(*(Built(n, pending.generation) for n in pending.members))
        if pending.joiners:
            self.hear(*(Synced(n, pending.generation) for n in pending.joiners))
        assert self.state.pending is not None
        assert self.state.pending.stage is Stage.ARMED
        return self

    def switch(self, step: int = 7) -> "Job":
        pending = self.state.pending
        assert pending is not None
        self.hear(*(Switched(n, pending.generation, step) for n in {*pending.members, *pending.leavers}))
        return self

    def regrouped(self) -> "Job":
        self.hear(*(self.post(n) for n in self.state.members), *(Built(n, self.state.generation) for n in self.members))
        return self

    def exit_all(self, code: int) -> "Job":
        self.hear(*(WorkerExited(n, code) for n in self.members))
        return self

    @property
    def members(self) -> tuple[int, ...]:
        return self.state.members

    @property
    def phase(self) -> Phase:
        return self.state.phase


@pytest.fixture
def pair() -> Job:
    return Job(2).train()


# -- start and end ---------------------------------------------------------------------------------------------------


def test_a_job_without_changes_is_one_generation() -> None:
    job = Job(2)
    assert job.reasons() == ["the job starts with 2 workers"]
    assert [c.worker for c in job.spoken(StartWorker)] == [0, 1]
    job.hear(WorkerArrived(0, "a", "d0"))
    assert job.said == ()
    job.hear(WorkerArrived(1, "b", "d1"))
    formation = job.one(Form).formation
    assert (formation.members, formation.posts, formation.placement.workers) == ((0, 1), ("a", "b"), ((0, 1), (2, 3)))
    job.hear(Built(0, 0))
    assert job.phase is Phase.STARTING
    job.hear(Built(1, 0))
    assert job.phase is Phase.TRAINING
    assert job.exit_all(EXIT_OK).phase is Phase.FINISHED


def test_a_resumed_job_starts_with_the_workers_its_plan_had_at_that_step() -> None:
    job = Job(1, schedule=(Change(10, 4), Change(20, 2)), at_step=15)
    assert len(job.spoken(StartWorker)) == 4
    assert all(c.resume and c.hold_at == 20 for c in job.spoken(StartWorker))


def test_a_failing_worker_ends_the_others_and_its_own_words_are_the_reason() -> None:
    job = Job(3).train()
    job.hear(WorkerFailed(1, "the model has no parameters"), WorkerExited(1, EXIT_USAGE))
    assert job.said == (KillWorkers((0, 2), "the model has no parameters"),)
    job.hear(WorkerExited(0, -9), WorkerExited(2, -9))
    assert (job.phase, job.state.failure, job.state.exit_code) == (
        Phase.FAILED,
        "the model has no parameters",
        EXIT_USAGE,
    )


def test_an_interrupt_asks_once_and_kills_the_second_time(pair: Job) -> None:
    assert pair.hear(InterruptAsked()) == (AskToStop("interrupted"),)
    state = pair.state
    assert pair.exit_all(EXIT_INTERRUPTED).phase is Phase.INTERRUPTED
    pair.state = state
    assert pair.hear(InterruptAsked()) == (KillWorkers((0, 1), "interrupted twice"),)
    pair.exit_all(-9)
    assert (pair.phase, pair.state.failure, pair.state.exit_code) == (Phase.FAILED, "interrupted", 130)


def test_an_interrupt_before_training_ends_the_job_and_tells_of_no_loss() -> None:
    job = Job(2)
    job.hear(InterruptAsked(), WorkerExited(0, -9))  # it was not there yet, so it was not started any more
    assert (job.phase, job.spoken(TellStory)) == (Phase.INTERRUPTED, [])
    assert job.one(KillWorkers).workers == (1,)


def test_nothing_new_begins_after_an_interrupt(pair: Job) -> None:
    pair.hear(InterruptAsked(), WorkerExited(1, -9), Stopped(0, 0, 5), pair.post(0))
    pair.regrouped()
    assert pair.members == (0,)
    assert pair.state.pending is None
    assert pair.hear(WorkerExited(0, EXIT_INTERRUPTED)) == ()
    assert pair.phase is Phase.INTERRUPTED


def test_a_worker_that_leaves_early_is_named(pair: Job) -> None:
    pair.hear(WorkerExited(1, EXIT_OK))
    assert pair.said == (TellLost((1,), (0,)),)
    pair.hear(Stopped(0, 0, 5), WorkerExited(0, -9))
    assert pair.phase is Phase.FAILED
    assert pair.state.failure.startswith("worker 1 left the training early, with exit code 0")


def test_workers_that_end_in_different_ways_are_a_failure(pair: Job) -> None:
    pair.hear(WorkerExited(0, EXIT_OK), WorkerExited(1, EXIT_INTERRUPTED))
    assert pair.phase is Phase.FAILED
    assert "different ways" in pair.state.failure


def test_a_worker_lost_after_the_last_step_costs_nothing_unless_it_is_the_main_one(pair: Job) -> None:
    state = pair.state
    pair.hear(WorkerExited(0, EXIT_OK), WorkerExited(1, -9))
    assert pair.phase is Phase.FINISHED
    pair.state = state
    pair.hear(WorkerExited(1, EXIT_OK), WorkerExited(0, -9))
    assert pair.phase is Phase.STARTING
    assert all(c.resume for c in pair.spoken(StartWorker))


def test_a_loss_after_others_have_ended_is_told_to_those_who_may_wait_for_it() -> None:
    job = Job(3).train()
    job.hear(WorkerExited(2, EXIT_OK))
    job.hear(WorkerExited(1, -9))
    assert job.one(TellLost).to == (0,)
    job.hear(Stopped(0, 0, 9))
    assert job.one(Form).formation.members == (0,)
    job.hear(WorkerExited(0, EXIT_OK))
    assert job.phase is Phase.FINISHED


# -- changes ---------------------------------------------------------------------------------------------------------


def test_growing_goes_through_its_stages(pair: Job) -> None:
    pair.hear(ResizeAsked("r", 3))
    assert pair.one(Answer) == Answer("r", True, "changing to 3 workers")
    assert pair.one(StartWorker) == StartWorker(worker=2, generation=1, members=(), resume=False)
    pair.hear(WorkerArrived(2, "p2", "d2"))
    assert pair.said == ()
    pair.hear(NewcomerReady(2))
    form = pair.one(Form)
    assert (form.to, form.at_once, form.formation.joiners) == ((0, 1, 2), False, (2,))
    assert form.formation.sources == ((0, "desk-0"), (1, "desk-1"))
    pair.hear(*(pair.post(n) for n in range(3)), *(Built(n, 1) for n in range(3)))
    assert pair.spoken(Arm) == []
    assert pair.hear(Synced(2, 1)) == (Arm(1, (0, 1)),)
    pair.hear(Switched(0, 1, 12), Switched(1, 1, 12))
    assert pair.state.generation == 0
    pair.hear(Switched(2, 1, 12))
    assert pair.reasons() == ["2 workers -> 3 workers"]
    assert (pair.state.generation, pair.members, pair.state.shares) == (1, (0, 1, 2), ((0,), (1,), (2, 3)))


def test_shrinking_dismisses_the_leaver_only_when_all_have_changed_over(pair: Job) -> None:
    pair.hear(ResizeAsked("r", 1))
    pair.let_in()
    pair.hear(Switched(0, 1, 4))
    assert pair.spoken(Dismiss) == []
    pair.hear(Switched(1, 1, 4))
    assert pair.one(Dismiss) == Dismiss((1,))
    assert pair.hear(WorkerExited(1, EXIT_LEFT)) == ()
    assert (pair.members, pair.phase) == ((0,), Phase.TRAINING)


def test_moving_replaces_a_worker_in_one_change(pair: Job) -> None:
    pair.hear(RemovalAsked("r", (0,), True, "the node is drained"))
    pair.let_in().switch()
    assert pair.members == (1, 2)
    assert pair.reasons() == ["worker 0 moved"]


@pytest.mark.parametrize(
    ("leavers", "members"),
    [
        ((2,), (0, 1, 4, 3)),
        ((1, 3), (0, 4, 2, 5)),
        ((0,), (3, 1, 2, 4)),
        ((0, 3), (2, 1, 4, 5)),
        ((0, 1, 2, 3), (4, 5, 6, 7)),
    ],
)
def test_who_stays_in_a_move_keeps_its_virtual_workers_and_the_first_place_stays_in_old_hands(
    leavers: tuple[int, ...], members: tuple[int, ...]
) -> None:
    job = Job(4).train()
    job.hear(RemovalAsked("r", leavers, True, "the node is drained"))
    job.let_in().switch()
    assert job.members == members
    assert job.state.shares == ((0,), (1,), (2,), (3,))


def test_a_planned_change_is_prepared_ahead_and_popped_when_it_is_done() -> None:
    job = Job(1, schedule=(Change(500, 2), Change(600, 1))).train()
    job.hear(Progressed(0, 10, 1.0))
    assert job.state.pending is None
    job.hear(Progressed(0, 490, 1.0))
    assert job.state.pending is not None
    assert job.state.pending.hold_at == 500
    job.let_in()
    job.hear(WorkerExited(1, -9), Dropped(0, 1))  # the newcomer dies: another try, at the same step
    assert job.state.pending.hold_at == 500
    job.let_in().switch(500)
    assert (job.state.target, job.state.schedule) == (2, (Change(600, 1),))


def test_slow_steps_do_not_make_members_wait_for_a_change_that_nobody_begins() -> None:
    job = Job(1, schedule=(Change(10, 2),)).train()
    job.state, _ = handle(job.state, Progressed(0, 5, 60.0))
    job.hear(Progressed(0, 9, 60.0))
    assert job.state.pending is not None


def test_a_planned_change_to_what_is_so_is_released_and_the_next_one_told() -> None:
    job = Job(2, schedule=(Change(500, 2), Change(10_000, 1))).train()
    job.hear(Progressed(0, 499, 0.1))
    assert job.one(Release) == Release((0, 1), 0, 10_000)


def test_requests_during_a_change_are_made_after_it_or_instead_of_it(pair: Job) -> None:
    pair.hear(ResizeAsked("a", 4))
    assert len(pair.spoken(StartWorker)) == 2
    pair.hear(ResizeAsked("b", 3))  # only newcomers know of the first one
    assert pair.one(Dismiss) == Dismiss((3,))
    assert pair.state.pending.members == (0, 1, 2)
    pair.let_in()
    pair.hear(ResizeAsked("c", 1))
    assert "after the change to 3 workers under way" in pair.one(Answer).reason
    pair.switch()
    assert pair.state.pending.members == (0,)


def test_a_newcomer_that_dies_is_tried_again_a_few_times(pair: Job) -> None:
    pair.hear(ResizeAsked("r", 3))
    for worker in (2, 3):
        pair.hear(WorkerExited(worker, -9))
        assert pair.one(StartWorker).worker == worker + 1
    pair.hear(WorkerFailed(4, "no memory"), WorkerExited(4, 1))
    assert pair.spoken(StartWorker) == []
    assert pair.one(Release).to == (0, 1)
    assert "no memory" in pair.reasons()[0]
    assert (pair.phase, pair.state.target, pair.state.failure) == (Phase.TRAINING, 3, "")


def fails(job: Job, times: int = 1) -> Job:
    """So many newcomers in a row die before they could join."""
    for _ in range(times):
        assert job.state.pending is not None
        job.hear(WorkerExited(job.state.pending.joiners[0], -9))
    return job


def test_what_has_failed_three_times_is_tried_again_after_pauses_that_grow_up_to_a_minute(pair: Job) -> None:
    pair.hear(ResizeAsked("r", 3))
    fails(pair, 2)
    pauses = []
    for _ in range(7):
        fails(pair)
        assert (pair.state.pending, pair.members, pair.state.target) == (None, (0, 1), 3)
        pauses.append(pair.state.pause_s)
        assert pair.hear(Progressed(0, 50 + len(pauses), 0.1)) == ()
        pair.hear(PauseOver())
        assert len(pair.spoken(StartWorker)) == 1
    assert pauses == [5.0, 10.0, 20.0, 40.0, 60.0, 60.0, 60.0]
    pair.let_in().switch()
    assert (len(pair.members), pair.state.attempts, pair.state.pause_s) == (3, 0, 0.0)


def test_a_pause_is_told_with_its_reason(pair: Job) -> None:
    pair.hear(ResizeAsked("r", 3))
    fails(pair, 3)
    told = [c for c in pair.said if isinstance(c, TellStory)][-1]
    assert told.event == "change_paused"
    assert told.fields == {
        "step": 0,
        "attempts": 3,
        "seconds": 5.0,
        "reason": "2 workers -> 3 workers: tried 3 times, again in 5 s: "
        "worker 4 was killed by signal 9 before it could join",
    }


@pytest.mark.parametrize(
    ("request_", "pending"),
    [
        (ResizeAsked("q", 2), ()),
        (ResizeAsked("q", 4), (0, 1, 5, 6)),
        (RemovalAsked("q", (1,), True, "moved"), (0, 5, 6)),
        (SlowFound(1, "worker 1 takes 9 times as long"), (0,)),
    ],
    ids=["withdrawn", "replaced by more", "with another wish", "with less than there is"],
)
def test_whatever_else_is_wanted_ends_a_pause(pair: Job, request_: Event, pending: tuple[int, ...]) -> None:
    pair.hear(ResizeAsked("r", 3))
    fails(pair, 3)
    pair.hear(request_)
    assert (pair.state.attempts, pair.state.pause_s) == (0, 0.0)
    assert (pair.state.pending.members if pair.state.pending else ()) == pending


def test_asking_for_the_same_again_does_not_shorten_a_pause(pair: Job) -> None:
    pair.hear(ResizeAsked("r", 3))
    fails(pair, 3)
    assert pair.hear(ResizeAsked("q", 3)) == (
        Answer("q", True, "3 workers are wanted already; the next try is within 5 s"),
    )
    assert pair.state.pause_s == 5.0


def test_nobody_waits_at_a_planned_step_for_newcomers_that_have_failed_three_times() -> None:
    job = Job(1, schedule=(Change(10, 2), Change(10_000, 1))).train()
    job.hear(Progressed(0, 9, 0.1))
    fails(job, 3)
    assert job.one(Release) == Release((0,), 0, 10_000)
    job.hear(PauseOver())
    assert (job.state.target, job.state.pending.hold_at) == (2, 0)


def test_a_planned_change_takes_the_place_of_one_that_waits_to_be_tried_again() -> None:
    job = Job(3, schedule=(Change(1000, 1),)).train()
    job.hear(WorkerExited(2, -9), Stopped(0, 0, 5), Stopped(1, 0, 5))
    job.regrouped()
    fails(job, 3)
    assert job.hear(Progressed(0, 500, 1.0)) == ()
    job.hear(Progressed(0, 990, 1.0))
    assert (job.state.pending.members, job.state.pending.hold_at) == ((0,), 1000)


def test_a_wish_to_move_a_worker_is_kept_during_a_pause(pair: Job) -> None:
    pair.hear(RemovalAsked("r", (0,), True, "the node is drained"))
    fails(pair, 3)
    pair.hear(PauseOver())
    assert pair.state.pending.members == (1, 5)


def test_a_redeal_that_fails_three_times_is_left_until_it_is_measured_anew(pair: Job) -> None:
    pair.hear(UnevenFound(0, {0: 30.0, 1: 10.0}, "uneven"))
    for _ in range(3):
        pair.hear(pair.post(0), pair.post(1), BuildFailed(0, pair.state.pending.generation, "no space"))
    assert (pair.state.pending, pair.state.speeds, pair.state.pause_s) == (None, {}, 0.0)


def test_a_build_that_fails_is_abandoned_by_all(pair: Job) -> None:
    pair.hear(ResizeAsked("r", 1))
    pair.hear(pair.post(0))
    generation = pair.state.pending.generation
    pair.hear(BuildFailed(0, generation, "no space"))
    assert pair.one(Abandon) == Abandon(generation, (0, 1))


# -- losses ----------------------------------------------------------------------------------------------------------


def test_survivors_form_a_generation_when_all_have_stopped() -> None:
    job = Job(3).train()
    job.hear(WorkerExited(2, -9))
    assert job.one(TellLost) == TellLost((2,), (0, 1))
    job.hear(Stopped(0, 0, 5))
    assert job.said == ()
    job.hear(Stopped(1, 0, 5))
    form = job.one(Form)
    assert (form.formation.generation, form.formation.members, form.at_once) == (1, (0, 1), True)
    assert job.reasons() == ["worker 2 lost: 2 workers go on"]
    job.regrouped()
    assert [c.worker for c in job.spoken(StartWorker)] == [3]  # the size that was asked for is still wanted


def test_a_survivor_may_notice_a_loss_before_the_master_does(pair: Job) -> None:
    pair.hear(Stopped(0, 0, 5))
    assert pair.phase is Phase.REGROUPING
    pair.hear(WorkerExited(1, -9))
    assert pair.one(Form).formation.members == (0,)


def test_another_loss_while_the_survivors_build_is_regrouped_again() -> None:
    job = Job(3).train()
    job.hear(WorkerExited(2, -9), Stopped(0, 0, 5), Stopped(1, 0, 5))
    job.hear(job.post(0), Stopped(0, 0, 5))  # it could not map worker 1's page
    job.hear(WorkerExited(1, -9))
    assert job.one(Form).formation.members == (0,)


def test_members_that_cannot_go_on_though_nobody_is_lost_begin_anew_but_not_for_ever(pair: Job) -> None:
    for times in range(MOST_LOSSES):
        pair.hear(Stopped(0, times, 5), Stopped(1, times, 5))
        assert pair.reasons() == ["worker 0, 1 could not go on: 2 workers go on"]
        pair.regrouped()
    pair.hear(Stopped(0, MOST_LOSSES, 5))
    assert pair.phase is Phase.STOPPING
    assert "could not go on at step 5, 12 times in a row" in pair.state.failure


def test_newcomers_survive_a_loss_that_comes_before_the_change(pair: Job) -> None:
    pair.hear(ResizeAsked("r", 3))
    pair.let_in()
    pair.hear(WorkerExited(1, -9), Stopped(0, 0, 5))
    assert pair.one(Abandon) == Abandon(1, (2,))
    assert pair.one(Form).formation.members == (0,)
    pair.regrouped()
    assert pair.state.pending.joiners == (2, 3)


def test_newcomers_are_survivors_when_the_loss_comes_after_the_change(pair: Job) -> None:
    pair.hear(ResizeAsked("r", 3))
    pair.let_in()
    pair.hear(Switched(0, 1, 5), Switched(2, 1, 5), WorkerExited(1, -9), Stopped(0, 1, 5), Stopped(2, 1, 5))
    assert pair.one(Form).formation.members == (0, 2)


def test_a_newcomer_that_was_not_in_yet_does_not_keep_the_survivors_waiting(pair: Job) -> None:
    pair.hear(ResizeAsked("r", 3))
    pair.let_in()
    pair.hear(Switched(1, 1, 5), WorkerExited(0, -9), Stopped(1, 1, 5))  # 0 was to hand the state over
    assert pair.one(Form).formation.members == (1,)
    assert pair.one(Dismiss) == Dismiss((2,))
    assert pair.hear(Switched(2, 1, 5), Stopped(2, 1, 5)) == ()


def test_the_loss_of_a_leaver_after_the_change_stops_nobody(pair: Job) -> None:
    pair.hear(ResizeAsked("r", 1))
    pair.let_in()
    pair.hear(Switched(0, 1, 5), WorkerExited(1, -9))
    assert (pair.phase, pair.members) == (Phase.TRAINING, (0,))


def test_members_that_needed_something_of_a_lost_leaver_are_formed_anew() -> None:
    job = Job(3).train()
    job.hear(ResizeAsked("r", 2))
    job.let_in()
    job.hear(Switched(0, 1, 5), Stopped(0, 1, 5), Switched(1, 1, 5), WorkerExited(2, -9))
    assert job.phase is Phase.REGROUPING
    job.hear(Stopped(1, 1, 5))
    assert job.one(Form).formation.members == (0, 1)


def test_the_loss_of_a_newcomer_before_the_change_stops_nobody(pair: Job) -> None:
    pair.hear(ResizeAsked("r", 3))
    pair.let_in()
    pair.hear(WorkerExited(2, -9))
    assert pair.phase is Phase.REGROUPING
    pair.hear(Dropped(0, 1))  # one is enough: without it there is no change
    assert pair.phase is Phase.TRAINING
    assert pair.one(StartWorker).worker == 3
    assert pair.hear(Dropped(1, 1)) == ()


def test_when_all_are_lost_the_newest_checkpoint_is_the_floor(pair: Job) -> None:
    pair.hear(WorkerExited(0, -9), WorkerExited(1, -9))
    assert [c.worker for c in pair.spoken(StartWorker)] == [2, 3]
    assert all(c.resume for c in pair.spoken(StartWorker))


def test_a_loss_before_training_starts_all_anew_but_not_for_ever() -> None:
    job = Job(2)
    for _ in range(MOST_LOSSES):
        job.hear(WorkerExited(job.members[0], -9))
        assert job.one(KillWorkers).workers
    job.hear(WorkerExited(job.members[0], -9))
    assert job.phase is Phase.STOPPING
    assert "has not helped" in job.state.failure


def test_going_back_to_a_checkpoint_again_and_again_ends() -> None:
    job = Job(1).train()
    for _ in range(MOST_LOSSES):
        job.hear(Progressed(job.members[0], 5, 0.1), WorkerExited(job.members[0], EXIT_STATE_LOST))
        job.train()
    job.hear(WorkerExited(job.members[0], EXIT_STATE_LOST))
    assert job.phase is Phase.FAILED


def test_with_fewer_than_the_minimum_survivors_wait_with_their_state() -> None:
    job = Job(3, minimum=2).train()
    job.hear(WorkerExited(1, -9), WorkerExited(2, -9), Stopped(0, 0, 5))
    assert job.one(Form).formation.parked
    assert "fewer than the minimum of 2; waiting for others" in job.reasons()[-1]
    job.regrouped()
    assert (job.state.pending.members, job.state.pending.hold_at) == ((0, 3, 4), 1)
    job.let_in().switch()
    assert job.members == (0, 3, 4)


def test_survivors_that_are_too_few_wait_for_others_and_say_so_however_often_none_come() -> None:
    job = Job(2, minimum=2, schedule=(Change(1000, 3),)).train()
    job.hear(WorkerExited(1, -9), Stopped(0, 0, 995))
    job.regrouped()
    fails(job, 2)
    for attempts, seconds in ((3, 5), (4, 10), (5, 20)):
        fails(job)
        said = f"waiting for others; tried {attempts} times, again in {seconds} s: worker {attempts + 1} was killed"
        assert job.reasons()[-1].startswith(f"1 worker left, fewer than the minimum of 2: {said}")
        assert job.phase is Phase.TRAINING
        assert job.hear(Progressed(0, 995, 0.1)) == ()  # though a planned change is near
        job.hear(PauseOver())
        assert job.state.pending.hold_at == 1
    job.let_in().switch()
    assert len(job.members) == 2


# -- checkpoints that are asked for -----------------------------------------------------------------------------------


def test_a_checkpoint_that_is_asked_for_is_everybodys_wish(pair: Job) -> None:
    before = pair.state
    pair.hear(CheckpointAsked("c"))
    assert pair.one(Save) == Save((0, 1))
    assert pair.one(Answer) == Answer("c", True, "a checkpoint will be written after the next step")
    assert pair.state == before


def test_nobody_writes_a_checkpoint_while_nobody_trains(pair: Job) -> None:
    refused = pair.hear(WorkerExited(1, -9), CheckpointAsked("c"))[-1]
    assert isinstance(refused, Answer)
    assert not refused.accepted
    assert "nobody trains at the moment (regrouping)" in refused.reason
    job = Job(1).train()
    assert job.hear(InterruptAsked(), CheckpointAsked("c"))[-1].accepted is False


# -- uneven workers --------------------------------------------------------------------------------------------------


def test_virtual_workers_are_dealt_by_measured_speed(pair: Job) -> None:
    pair.hear(UnevenFound(0, {0: 30.0, 1: 10.0}, "worker 1 takes 3 times as long"))
    pending = pair.state.pending
    assert (pending.members, pending.joiners, pending.shares) == ((0, 1), (), ((0, 1, 2), (3,)))
    assert pending.reason == "virtual workers dealt anew, 2+2 -> 3+1: worker 1 takes 3 times as long"
    pair.let_in().switch()
    assert pair.state.shares == ((0, 1, 2), (3,))
    assert pair.state.pending is None
    pair.hear(UnevenFound(1, {0: 20.0, 1: 20.0}, "worker 0 has too much"))
    assert pair.state.pending.shares == ((0, 1), (2, 3))


def test_speeds_of_another_generation_change_nothing(pair: Job) -> None:
    assert pair.hear(UnevenFound(7, {0: 30.0, 1: 10.0}, "late")) == ()


def test_a_slow_worker_is_removed_and_reported(pair: Job) -> None:
    pair.hear(SlowFound(1, "worker 1 takes 9 times as long"))
    assert pair.spoken(TellStory)[0].event == "worker_slow"
    assert pair.state.pending.leavers == (1,)
    assert "9 times" in pair.state.pending.reason


def test_the_minimum_protects_slow_workers() -> None:
    job = Job(2, minimum=2).train()
    assert job.hear(SlowFound(1, "slow")) == ()


def test_a_stuck_worker_is_ended(pair: Job) -> None:
    pair.hear(StuckFound(1, "no sign of life"))
    assert pair.one(KillWorkers) == KillWorkers((1,), "no sign of life")


# -- bad requests ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("event", "sentence"),
    [
        (ResizeAsked("r", 0), "at least 1 worker, not 0"),
        (ResizeAsked("r", -3), "at least 1 worker, not -3"),
        (ResizeAsked("r", 5), "more than the job's 4 virtual workers"),
        (ResizeAsked("r", 4), "more than the job's maximum of 3"),
        (ResizeAsked("r", 1), "fewer than the job's minimum of 2"),
        (RemovalAsked("r", (0, 1, 2), False, ""), "would remove all workers"),
        (RemovalAsked("r", (0, 1), False, ""), "1 worker would be left, fewer than the job's minimum of 2"),
        (RemovalAsked("r", (9,), False, ""), "worker 9 is not one of this job's (0, 1, 2)"),
        (RemovalAsked("r", (-1,), True, ""), "worker -1 is not one"),
        (RemovalAsked("r", (), False, ""), "no worker was named"),
    ],
)
def test_senseless_requests_are_refused_and_change_nothing(event: Event, sentence: str) -> None:
    job = Job(3, minimum=2, maximum=3).train()
    before = job.state
    job.hear(event)
    assert sentence in job.one(Answer).reason
    assert (job.one(Answer).accepted, job.state, len(job.said)) == (False, before, 1)


@pytest.mark.parametrize("event", [ResizeAsked("r", 1), RemovalAsked("r", (1,), False, "")])
def test_requests_while_the_job_ends_are_refused(pair: Job, event: Event) -> None:
    for ending in (InterruptAsked(), WorkerExited(0, EXIT_OK)):
        state, _ = handle(pair.state, ending)
        after, commands = handle(state, event)
        assert after == state
        assert [c.reason for c in commands if isinstance(c, Answer)] == [
            "the job is ending: nothing can be changed any more"
        ]
    assert handle(pair.exit_all(EXIT_OK).state, event)[1][0].accepted is False


def test_removing_a_worker_twice_counts_once() -> None:
    job = Job(3).train()
    job.hear(RemovalAsked("a", (2,), False, ""), RemovalAsked("b", (2,), False, ""))
    assert job.state.target == 2


def test_late_words_change_nothing(pair: Job) -> None:
    for event in (Built(9, 0), Built(0, 7), Synced(0, 3), Switched(0, 3, 1), Dropped(0, 3), Stopped(9, 0, 1)):
        assert pair.hear(event) == ()
    assert pair.phase is Phase.TRAINING
    pair.exit_all(EXIT_OK)
    assert pair.hear(Stopped(0, 0, 1), WorkerExited(0, 1), InterruptAsked()) == ()
