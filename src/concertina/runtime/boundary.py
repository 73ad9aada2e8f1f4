"""The boundary between two steps: what all workers agree on there, and what they then do, all at the same step.

That is where a job changes its members, loses some, writes checkpoints and ends.
"""

import time
from typing import NoReturn

from concertina.core.env import WorkerEnv
from concertina.runtime.course import Course
from concertina.runtime.elastic import Agreement, Elastic
from concertina.runtime.fabric import PeersLost
from concertina.runtime.interrupts import EndOfRun, Interrupted, stop_request
from concertina.runtime.member import Member
from concertina.runtime.saving import Saving
from concertina.runtime.story import Story
from concertina.runtime.wishes import CHECKPOINT, INTERRUPT, STOP, Wishes


class Boundary:
    """One worker's side of it."""

    def __init__(
        self, env: WorkerEnv, member: Member, course: Course, wishes: Wishes, saving: Saving, story: Story
    ) -> None:
        self._env = env
        self._member = member
        self._course = course
        self._wishes = wishes
        self._saving = saving
        self._story = story
        self._step_began = 0.0
        self.end: EndOfRun | None = None  # why this generation left the loop
        member.engine.commit = self._commit
        member.elastic.wishes = lambda: wishes.of_round

    @property
    def _elastic(self) -> Elastic:
        return self._member.elastic

    # -- around a round ----------------------------------------------------------------------------------------------

    def begin_round(self) -> None:
        """Starts a step. Raises PeersLost if a worker that is needed for it is gone."""
        course = self._course
        assert course.current is not None
        loader = course.current.loader
        self._member.desk.place = (course.epoch, loader.number, loader.passes, loader.index)
        self._elastic.agreement = None
        self._note_wishes()
        self._elastic.fingerprint()
        self._member.engine.begin_round()
        self._step_began = time.monotonic()

    def _note_wishes(self) -> None:
        asked = self._member.membership.take_wish_to_save()
        self._wishes.begin_round(stop_request.asked, asked or self._saving.is_due)

    def _commit(self) -> None:
        """Inside the last backward of a round: from here on its step counts, on all workers or on none."""
        current = self._course.current
        assert current is not None
        self._elastic.agree(advances=True, next_batch=current.loader.index + 1, steps=1)

    def end_round(self) -> None:
        """A round is complete on this worker: act on what was agreed. Raises PeersLost if it does not count."""
        current, engine, elastic = self._course.current, self._member.engine, self._elastic
        assert current is not None
        stepped, agreed = engine.step_done, elastic.agreement
        if agreed is None:  # without a reduction, nobody has met yet
            advances = not engine.contexts.accumulates
            agreed = elastic.agree(advances, current.loader.index, steps=0)
        self._story.met()
        if stepped:
            self._count_step()
        if not engine.contexts.accumulates:
            engine.syncs_at_point = engine.syncs_buffers
            if elastic.needs_final():
                elastic.make_final()
        elastic.show_state()
        self._saving.writer.check()
        self._act_until_done(agreed, stepped)

    def _count_step(self) -> None:
        course = self._course
        assert course.current is not None
        feed = course.current.loader.feed
        course.step += 1
        course.scale.stepped(time.monotonic(), feed.options.batch_size, feed.samples)
        self._member.at_step(course.step)
        self._member.membership.pace = time.monotonic() - self._step_began
        self._story.step(self._member.is_main)
        if self._story.recorder is not None:
            self._story.recorder.stepped(course.step)

    def meet(self) -> None:
        """An agreement outside any step."""
        if self._story.recorder is not None:
            self._story.recorder.met()
        self._member.desk.place = (self._course.epoch, -1, 0, 0)
        while True:
            try:
                self._note_wishes()
                self._elastic.fingerprint()
                agreed = self._elastic.agree(advances=False, next_batch=0, steps=0)
                self._story.met()
                break
            except PeersLost:
                self.recover()
        self._act_until_done(agreed, stepped=False)

    # -- acting on what was agreed -----------------------------------------------------------------------------------

    def _act_until_done(self, agreed: Agreement, stepped: bool) -> None:
        """The round counts; should a worker be lost while the others act on it, they act again without it."""
        while True:
            try:
                self._act_on(agreed, stepped)
                return
            except PeersLost:
                self.recover()

    def _act_on(self, agreed: Agreement, stepped: bool) -> None:
        course, saving = self._course, self._saving
        if agreed.wishes[INTERRUPT]:
            saving.write_final()
            self._account()
            self._leave(Interrupted())
        if agreed.wishes[CHECKPOINT]:
            saving.write_requested()
        if agreed.wishes[STOP] or (self._env.steps and course.step >= self._env.steps):
            course.finishing = True
            self._serve_late_wishes()  # no further step comes to agree on them
            saving.write_final()  # here, while it is known where in the pass training stands
        if stepped and not course.finishing:
            saving.write_regular()
            if agreed.change_to > self._elastic.generation.formation.generation:
                if self._elastic.somebody_leaves:
                    self._serve_late_wishes()  # the wishes of those who leave would leave with them
                self._change_over(agreed.change_to)
            self._learn_step_time()
        self._member.membership.confirm_dropped()

    def _serve_late_wishes(self) -> None:
        """What was asked for in the step that has just ended; as a rule the next one's meeting carries it."""
        rows = self._elastic.generation.fabric.exchange(self._wishes.now)
        self._wishes.now[STOP] = max(row[STOP] for row in rows)
        if any(row[CHECKPOINT] for row in rows):
            self._saving.write_requested()

    def _change_over(self, generation: int) -> None:
        current = self._course.current
        assert current is not None
        self._elastic.announce(generation)
        self._account()
        try:
            self._elastic.change_over(generation)
        except EndOfRun as end:
            self._leave(end)
        self.scale_to_workers()
        current.rewind(current.loader.index)
        self._story.generation("changed_over", self._member)

    def stop_asked(self) -> None:
        """The script has asked for the end of training; the others hear it in the next meeting, or find it here."""
        desk, engine = self._member.desk, self._member.engine
        undecided = engine.turn is not None and self._elastic.agreement is None  # whether this round counts
        desk.stop_asked = desk.stop_asked or max(engine.point + undecided, 1)

    def recover(self) -> None:
        """Goes on without those who are gone."""
        elastic, current = self._elastic, self._course.current
        desks = elastic.generation.desks
        self._story.events.emit("recovering", step=self._course.step, lost=list(elastic.generation.fabric.lost))
        self._story.tell_owed()
        if current is not None:
            current.account(elastic.point_batch)  # for all, since those who are gone cannot
        try:
            elastic.recover(current)
        except EndOfRun as end:  # the others have long gone on without this worker
            self._leave(end)
        gone = desks.keys() - set(elastic.generation.formation.members)
        if any(0 < desks[worker].stop_asked <= self._member.engine.point for worker in gone):
            self._wishes.now[STOP] = 1  # in a round that counts, so nobody will ask again
        self.scale_to_workers()
        if current is not None:
            current.rewind(elastic.point_batch)
        self._story.generation("recovered", self._member)

    def _leave(self, end: EndOfRun) -> NoReturn:
        """Out of the user's loop; remembered, should the script catch what it ought to let pass."""
        self._saving.writer.wait()
        self.end = end
        raise end

    def _account(self) -> None:
        self._story.flush_step()
        if self._course.current is not None:
            self._course.current.account()

    # -- the size of the batches -------------------------------------------------------------------------------------

    def scale_to_workers(self) -> None:
        if self._course.scale.by_workers(self._member.workers, self._course.step):
            self._story.batch(self._member.is_main)

    def _learn_step_time(self) -> None:
        """Hybrid scaling, some steps after a change: the slowest member's time decides whether the batch grows."""
        course, scale = self._course, self._course.scale
        if not scale.due(course.step):
            return
        times = [row[0] for row in self._elastic.generation.fabric.exchange([scale.microseconds])]
        if min(times) > 0 and scale.learn(course.step, max(times) * 1e-6):
            assert course.current is not None
            course.current.rewind(course.current.loader.index)
            self._story.batch(self._member.is_main)
