"""The user's two loops, over epochs and over data, as the job sees them."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from concertina.core.env import WorkerEnv
from concertina.core.errors import UsageError
from concertina.runtime.boundary import Boundary
from concertina.runtime.course import Course
from concertina.runtime.elastic import Elastic
from concertina.runtime.interrupts import Left
from concertina.runtime.member import Member
from concertina.runtime.newcomer import Newcomer
from concertina.runtime.rehearsal import rehearse
from concertina.runtime.saving import Saving
from concertina.runtime.story import Story
from concertina.runtime.virtual import VirtualEngine
from concertina.runtime.wishes import Wishes

if TYPE_CHECKING:
    from concertina.runtime.loader import Pass, SessionLoader


class Loop:
    """From prepare() on."""

    def __init__(self, env: WorkerEnv, member: Member, course: Course, wishes: Wishes, story: Story) -> None:
        self._env = env
        self._wishes = wishes
        self._newcomer: Newcomer | None = None  # while this worker is one
        self._let_in = False  # a newcomer that has just become a member
        self._saving = Saving(env, member, course, wishes, story.events)
        self.member = member
        self.course = course
        self.story = story
        self.boundary = Boundary(env, member, course, wishes, self._saving, story)
        self.started = False
        self.over = False  # the loop over epochs has ended

    @property
    def engine(self) -> VirtualEngine:
        return self.member.engine

    @property
    def elastic(self) -> Elastic:
        return self.member.elastic

    # -- over epochs -------------------------------------------------------------------------------------------------

    def epochs(self, count: int) -> Iterator[int]:
        course, story = self.course, self.story
        self._start()
        story.plan(count)
        while course.epoch < count:
            if not self.follows:
                self.boundary.meet()
            if self._must_end():
                break
            story.events.emit("epoch", epoch=course.epoch, epochs=count, step=course.step)
            yield course.epoch
            self.close_pass()
            if self._must_end():
                break
            for loader in course.loaders:
                loader.epoch_done()
            course.epoch += 1
        self._finish()

    def _must_end(self) -> bool:
        return self.course.finishing

    def _start(self) -> None:
        if self.started:
            raise UsageError("session.epochs() was called twice: use one loop over epochs")
        self.started = True
        if self._env.joins:
            self._newcomer = Newcomer(self.member, self.course, self._wishes, self.story)
            self._newcomer.wait_for_the_others()
            return
        member, course = self.member, self.course
        if self._env.resume:
            self._saving.resume()
        if course.scale.workers != member.workers:
            self.boundary.scale_to_workers()
        member.stands_at(course.step)
        if not member.elastic.alone:
            self._keep_contexts()
        self.story.call_hooks(member.elastic.generation.formation.generation, member.workers)
        if self.story.recorder is not None:
            self.story.recorder.began(course.step)
        if self._env.steps and course.step >= self._env.steps:
            course.finishing = True
        begun = {"generation": self._env.generation, "rounds": course.rounds}
        self.story.events.emit("training", step=course.step, epoch=course.epoch, **begun)

    def _keep_contexts(self) -> None:
        """So that a worker lost before the first pass can be made up for. What the script has drawn meanwhile is not
        part of it: the pass will look at that."""
        contexts = self.engine.contexts
        live, contexts.resident = contexts.resident, None
        self.elastic.make_final()
        contexts.resident = live

    def _finish(self) -> None:
        if self.follows:
            raise Left()  # the others have finished before they let us in
        if self.engine.turn is None and not self.course.finishing:
            self.boundary.meet()
        if not self.course.finishing:
            self._saving.write_final()
        self._saving.writer.wait()
        self.over = True
        self.story.flush_step()
        reason = self._wishes.reason
        self.story.events.emit("finished", step=self.course.step, epoch=self.course.epoch, reason=reason)

    # -- over data: one pass at a time -------------------------------------------------------------------------------

    def check_may_iterate(self) -> None:
        current = self.course.current
        if not self.started:
            raise UsageError("iterate over session.loader(...) inside `for epoch in session.epochs(n):`")
        if current is not None and not current.begun:
            raise UsageError("two session loaders cannot be iterated at the same time: combine the datasets")
        self.close_pass()

    def enter_pass(self, new: "Pass") -> None:
        if self._let_in:
            self._let_in = False  # state and contexts are those of the step at which the others let us in
        elif self._saving.resumed and new.loader.resumes:
            self._saving.resume_pass()
        else:
            self.engine.contexts.come_inside()
        self.member.search_once()
        self._saving.forget_resumed()
        self.course.current = new

    def leave_pass(self) -> None:
        self.course.current = None
        self.engine.contexts.go_outside()

    def close_pass(self) -> None:
        """Settles a loop that was left by `break`, which only a single virtual worker may do.

        What it counted were turns, of which there are more or fewer with every number of workers.
        """
        current = self.course.current
        if current is None:
            return
        if self._env.virtual > 1:
            raise UsageError(
                "the loop over the loader was left by break or an exception: how many virtual workers had had their "
                "turn depends on the number of workers. Use session.stop(reason) to end training after a step"
            )
        if self.engine.turn is not None:
            current.complete_round()
        if not current.ended:
            current.end(completed=True)

    def resume_at_end(self, loader: "SessionLoader") -> Iterator[Any]:
        """A rehearsal, for what the script does with the body's variables after the loop; then what was resumed from is
        taken up once more, and the loop is over."""
        try:
            yield from rehearse(self.engine, loader.feed)
        except GeneratorExit:  # the body has left the loop by `break`; it is over all the same
            next(loader.start(), None)
            raise
        yield from loader.start()

    # -- a newcomer's ------------------------------------------------------------------------------------------------

    @property
    def follows(self) -> bool:
        return self._newcomer is not None

    def come_in(self, loader: "SessionLoader") -> Iterator[Any]:
        """A rehearsal, and then the rest of the pass that the others let it into."""
        newcomer = self._newcomer
        assert newcomer is not None
        yield from newcomer.rehearse(loader)
        if not newcomer.follow(loader):
            loader.passes += 1
            return
        self._newcomer, self._let_in = None, True
        newcomer.tell_of_arrival()
        yield from loader.start()

    def close(self) -> None:
        """Ends what was started; the process may go on."""
        self._saving.writer.close()
        self.member.membership.close()
