"""How far a worker is in its job: steps, epochs, where its loaders stand, and the size of the batches."""

from typing import TYPE_CHECKING, Any

from concertina.runtime.scaling import BatchScale

if TYPE_CHECKING:
    from concertina.runtime.loader import Pass, SessionLoader


class Course:
    """Equal on all workers whenever they meet."""

    def __init__(self, scale: BatchScale) -> None:
        self.scale = scale
        self.step = 0  # optimizer steps that are complete
        self.rounds = 0  # that counted, in the whole job: steps, accumulation and evaluation
        self.epoch = 0
        self.finishing = False
        self.loaders: list[SessionLoader] = []
        self.current: Pass | None = None  # the loop over data that is under way
        self._states: dict[int, dict[str, Any]] = {}  # restored, of loaders that the script has not made yet
        self._contexts: dict[int, dict[int, Any]] = {}

    def add(self, loader: "SessionLoader") -> None:
        self.loaders.append(loader)
        self._restore(loader)

    def feeds(self) -> list[Any]:
        return [loader.feed for loader in self.loaders]

    def state(self) -> dict[str, Any]:
        active = None if self.current is None else self.current.loader
        return {
            "step": self.step,
            "rounds": self.rounds,
            "epoch": self.epoch,
            "scaling": self.scale.state(),
            "loaders": [loader.state(active=loader is active) for loader in self.loaders],
        }

    # -- of a checkpoint ---------------------------------------------------------------------------------------------

    def load(self, shared: Any, contexts: dict[int, Any], workers: int) -> None:
        """Goes on where a checkpoint was taken, with so many workers now."""
        self.step, self.epoch = shared["step"], shared["epoch"]
        self.rounds = shared.get("rounds", 0)
        self.load_scale(shared, workers)
        self._states = dict(enumerate(shared["loaders"]))
        self._contexts = {v: state["loaders"] for v, state in contexts.items()}
        for loader in self.loaders:
            self._restore(loader)

    def load_scale(self, shared: Any, workers: int) -> None:
        state = shared.get("scaling")
        if state is not None:
            self.scale.load(state)
            if self.scale.workers != workers:
                self.scale.by_workers(workers, self.step)

    def _restore(self, loader: "SessionLoader") -> None:
        state = self._states.pop(loader.number, None)
        if state is not None:
            loader.load(state)
            for v, contexts in self._contexts.items():
                loader.feed.load_context(v, contexts[loader.number])

    # -- of a newcomer -----------------------------------------------------------------------------------------------

    def join(self, rest: dict[str, Any], workers: int) -> None:
        """Stands where the others stand."""
        self.step, self.epoch, self.rounds = rest["step"], rest["epoch"], rest["rounds"]
        for loader, state in zip(self.loaders, rest["loaders"], strict=True):
            loader.join(state)
        self.scale.load(rest["scaling"])
        self.scale.by_workers(workers, self.step)
