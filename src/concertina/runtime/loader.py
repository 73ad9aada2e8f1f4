"""What `session.loader(...)` returns: an iterable whose loop body runs once per virtual worker and step."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from concertina.core.cut_plan import CutPlan
from concertina.core.errors import UsageError
from concertina.runtime.data import Feed
from concertina.runtime.fabric import PeersLost

if TYPE_CHECKING:
    from concertina.runtime.loop import Loop
    from concertina.runtime.session import Session


class SessionLoader:
    """Batches of all local virtual workers, in turn."""

    def __init__(self, session: "Session", feed: Feed, number: int) -> None:
        self._session = session
        self.feed = feed
        self.number = number
        self.passes = 0  # completed passes of this epoch
        self.index = 0  # batch of the current step within the pass, the same for all virtual workers
        self._skip = 0  # passes of this epoch that were completed before a restart
        self._resume_at = 0  # batch to go on with after a restart
        self._mid_pass = False  # the checkpoint was taken inside a pass

    def __len__(self) -> int:
        """Batches per epoch and virtual worker, as under DDP: of `batch_size` samples, even while they are larger."""
        return self.feed.batches_per_epoch

    def __iter__(self) -> Iterator[Any]:
        loop = self._session.loop
        loop.check_may_iterate()
        if loop.follows:
            return loop.come_in(self)
        if self._skip:
            self._skip -= 1
            return iter(())
        return loop.resume_at_end(self) if self._resumes_at_end else self.start()

    def start(self) -> Iterator[Any]:
        return Pass(self._session.loop, self)

    @property
    def resumes(self) -> bool:
        """Whether the next pass goes on where a checkpoint was taken."""
        return self._mid_pass

    @property
    def _resumes_at_end(self) -> bool:
        """Whether the checkpoint was written after the last batch of its pass: no turn is left."""
        return self._mid_pass and self._resume_at >= self.feed.batches

    def begin_pass(self) -> int:
        """The batch to begin with; a new pass also seeds the data workers of every virtual worker."""
        if self._mid_pass:
            self._mid_pass = False
            return self._resume_at
        engine = self._session.engine
        for v in engine.order:
            engine.contexts.make_resident(v)
            self.feed.new_pass(v)
        return 0

    def begin_round(self) -> None:
        """What all workers have to agree on before a round; here, everybody knows."""

    def advance(self) -> None:
        """The batches of a round have been used."""
        self.index += 1

    def epoch_done(self) -> None:
        self.passes = self._skip = 0

    def cut(self, batch: int) -> None:
        """Batches from `batch` on are as large as the job's batches are now."""
        scale = self._session.loop.course.scale
        self.feed.cut_from(batch, scale.size(self.feed.options.batch_size, self.feed.samples))

    def state(self, active: bool) -> dict[str, Any]:
        state: dict[str, Any] = {"passes": self.passes, "batch": self.index, "mid_pass": active}
        if self.feed.plan is not None:
            state["cuts"] = [list(cut) for cut in self.feed.plan.cuts]
        return state

    def join(self, state: dict[str, Any]) -> None:
        """A newcomer stands where the others stand: it has been past every pass that they have."""
        self.load(state)
        self._skip = 0

    def load(self, state: dict[str, Any]) -> None:
        self.passes = self._skip = state["passes"]
        self._resume_at, self._mid_pass = state["batch"], state["mid_pass"]
        cuts = state.get("cuts")
        feed = self.feed
        feed.plan = None if cuts is None else CutPlan.load(feed.samples, feed.options.drop_last, cuts)


class Pass:
    """One run over the data: an iterator that moves the engine from turn to turn."""

    def __init__(self, loop: "Loop", loader: SessionLoader) -> None:
        self._loop = loop
        self._loader = loader
        self._turn = -1  # position in the engine's order; -1 between rounds
        self.ended = self._exhausted = False
        loop.enter_pass(self)
        fresh = not loader.resumes
        self._number = loader.passes  # of this pass within its epoch
        self._first = loader.begin_pass()
        loader.index = self._first
        loader.cut(self._first)
        if fresh:
            loop.elastic.begin_pass(self._first)
        else:
            loop.elastic.point_batch = self._first
        loader.feed.open(loop.course.epoch, self._first, loop.engine.order)

    @property
    def loader(self) -> SessionLoader:
        return self._loader

    @property
    def begun(self) -> bool:
        """Whether some virtual worker has had a turn."""
        return self._turn >= 0 or self._loader.index > self._first

    def __iter__(self) -> "Pass":
        return self

    def __next__(self) -> Any:
        loop, loader = self._loop, self._loader
        if self.ended:
            if self._exhausted:
                raise StopIteration
            raise UsageError("two session loaders cannot be iterated at the same time: combine the datasets")
        while self._turn < 0 or self._turn == len(loop.engine.order):
            if self._turn >= 0:
                self.complete_round()
            if loop.course.finishing or loader.index >= loader.feed.batches:
                self._exhausted = True
                self.end(completed=loader.index >= loader.feed.batches)
                raise StopIteration
            try:
                loader.begin_round()
                loop.boundary.begin_round()
                self._turn = 0
            except PeersLost:
                loop.boundary.recover()
        v = loop.engine.order[self._turn]
        loop.engine.enter(v)
        batch = loader.feed.take(v, loader.index)
        if loop.story.recorder is not None:
            loop.story.recorder.saw_batch(batch, loader.feed.dataset)
        self._turn += 1
        return batch

    def complete_round(self) -> None:
        """Every local virtual worker has had its turn. If a worker was lost, the round will be run again."""
        self._turn = -1
        loop = self._loop
        loop.engine.end_round()
        if loop.engine.round_failed:
            loop.boundary.recover()
            return
        self._loader.advance()
        loop.course.rounds += 1
        try:
            loop.boundary.end_round()
        except PeersLost:
            loop.boundary.recover()

    def rewind(self, batch: int) -> None:
        """Goes on with `batch`, for the virtual workers that live here now."""
        self._turn = -1
        self._loop.course.rounds -= self._loader.index - batch
        self._loader.index = batch
        self._loader.cut(batch)
        self._loader.feed.open(self._loop.course.epoch, batch, self._loop.engine.order, new_pass=False)

    def end(self, completed: bool) -> None:
        self.ended = True
        if completed:
            self._loader.passes += 1
        if self._loop.member.is_main:
            self.account()
        else:
            self.stand_by()
        self._loader.feed.close()
        self._loop.leave_pass()

    def account(self, end: int | None = None) -> None:
        """Reports the batches that counted since this worker came into this pass, for all virtual workers."""
        self._loop.story.events.emit("samples", **self._account_up_to(self._loader.index if end is None else end))

    def stand_by(self) -> None:
        """Is ready to report in the place of the main worker."""
        self._loop.story.owe_samples(self._account_up_to(self._loader.index))

    def _account_up_to(self, end: int) -> dict[str, Any]:
        """Virtual workers all have equally many batches. `round` says at which round of the job the first was trained
        on: so the same report by several workers, or again after a return to a checkpoint, is known to be the same.
        """
        loader, loop = self._loader, self._loop
        counts = loader.feed.sample_counts()
        return {
            "loader": loader.number,
            "epoch": loop.course.epoch,
            "turn": self._number,
            "virtual": loop.engine.virtual,
            "first": self._first,
            "end": end,
            "round": loop.course.rounds - (loader.index - self._first),
            "batches": loader.feed.batches,
            "size": loader.feed.options.batch_size,
            "seen": sum(counts[self._first : end]),
            "expected": sum(counts),
            **({} if loader.feed.plan is None else {"cuts": [n for cut in loader.feed.plan.cuts for n in cut]}),
        }
