"""The whole state of a job: gathered for checkpoints and newcomers, and taken up again from a checkpoint."""

import time
from pathlib import Path
from typing import Any

from concertina.core.checkpoints import Manifest, folder_name
from concertina.core.env import WorkerEnv
from concertina.runtime import environment
from concertina.runtime.checkpoint import copy_checkpoint, pack_parts, read_checkpoint, to_bytes, unpack_parts
from concertina.runtime.checkpoint_writer import CheckpointWriter
from concertina.runtime.course import Course
from concertina.runtime.desk import is_final
from concertina.runtime.events import EventPipe
from concertina.runtime.member import Member
from concertina.runtime.wishes import STOP, Wishes

CHECKPOINT_SHARE = 20  # training waits for checkpoints by time for at most one part in so many of it


class Saving:
    """One worker's part in it."""

    def __init__(self, env: WorkerEnv, member: Member, course: Course, wishes: Wishes, events: EventPipe) -> None:
        self._env = env
        self._member = member
        self._course = course
        self._wishes = wishes
        self._events = events
        self._loaded: tuple[Any, dict[int, Any]] | None = None  # what was resumed from, until the first pass
        self._written = (-1, time.monotonic(), 0.0)  # step of the last checkpoint, when, and how long all waited for it
        self.writer = CheckpointWriter(self._told_of_checkpoint)
        member.elastic.rest_of_state = lambda: self.rest_of_state(light=True)

    def rest_of_state(self, light: bool = False) -> dict[str, Any]:
        """What is equal on all workers besides the user's own objects."""
        engine = self._member.engine
        return {
            "engine": engine.shared_state(light),
            "point": engine.point,
            "stop": self._wishes.now[STOP],
            **self._course.state(),
        }

    # -- writing -----------------------------------------------------------------------------------------------------

    @property
    def is_due(self) -> bool:
        """Whether it is time for a checkpoint; where they take long, less often, so that training hardly waits."""
        if not self._env.checkpoint_seconds or not self._member.is_main:
            return False
        step, at, cost = self._written
        patience = max(self._env.checkpoint_seconds, cost * CHECKPOINT_SHARE)
        return self._course.step != step and self.writer.is_idle and time.monotonic() - at >= patience

    def write_requested(self) -> None:
        """The checkpoint that some worker asked for with session.checkpoint(path), or the one that is due by time."""
        asked = str(self._wishes.path or "").encode()
        paths = self._member.elastic.generation.fabric.gather_bytes(asked)
        self._wishes.forget_checkpoint()
        self.write(Path(next((path for path in paths if path), str(self._usual()).encode()).decode()))

    def write_regular(self) -> None:
        """The one that comes every so many steps."""
        every = self._env.checkpoint_every
        if every and self._course.step % every == 0:
            self.write(self._usual())

    def write_final(self) -> None:
        if self._env.checkpoint_dir:
            self.write(self._usual())

    def _usual(self) -> Path:
        return Path(self._env.checkpoint_dir) / folder_name(self._course.step)

    def write(self, folder: Path) -> None:
        """The worker that hosts virtual worker 0 writes; it finds the others' virtual workers on their desks."""
        if self._loaded is not None:
            self._write_again(folder)
            return
        member, course = self._member, self._course
        began = time.monotonic()
        contexts = self._gather_contexts()
        self._written = (course.step, began, 0.0)
        if not member.is_main:
            return
        if course.current is not None:
            course.current.account()  # whoever goes on from here knows nothing of what was trained on before
        shared = {**member.prepared.state(), **self.rest_of_state()}
        manifest = Manifest(
            step=course.step,
            epoch=course.epoch,
            virtual=self._env.virtual,
            environment=member.environment,
            files={},
        )
        self.writer.write(folder, shared, contexts, manifest)
        self._written = (course.step, began, time.monotonic() - began)

    def _write_again(self, folder: Path) -> None:
        """Nothing was trained since the job was resumed. Where in its pass it stands is known again only when the
        script comes there; so what it was resumed from is the checkpoint, as it is."""
        known = Path(self._env.resume)
        if self._member.is_main and folder.resolve() != known.resolve():
            copy_checkpoint(known, folder)
            self._told_of_checkpoint(self._course.step, folder)

    def _told_of_checkpoint(self, step: int, folder: Path) -> None:
        self._events.emit("checkpoint", step=step, path=str(folder))

    def _gather_contexts(self) -> dict[int, bytes]:
        """All virtual workers' contexts as file contents; complete on the main worker only."""
        member, engine = self._member, self._member.engine
        generation = member.elastic.generation
        own = {v: to_bytes(self._own_context(v)) for v in engine.order}
        if generation.fabric.size == 1:
            return own
        if engine.contexts.accumulates:  # gradients in between steps are not on the desks
            packed = generation.fabric.gather_bytes(pack_parts(own))
            return {v: data for part in packed for v, data in unpack_parts(part).items()}
        if not member.is_main:
            return {}
        feeds = self._course.feeds()
        for v in range(self._env.virtual):
            if v in own:
                continue
            owner = generation.formation.members[generation.placement.host(v)]
            desk = generation.desks[owner]
            generation.fabric.wait_for(owner, lambda desk=desk, v=v: is_final(desk, v, engine.point))  # type: ignore[misc]
            record = desk.context(v, engine.point)
            assert record is not None
            state, parts = engine.contexts.state_of_record(record[0], feeds)
            own[v] = to_bytes({**state, "loaders": parts})
        return own

    def _own_context(self, v: int) -> dict[str, Any]:
        loaders = [feed.context_state(v) for feed in self._course.feeds()]
        return {**self._member.engine.contexts.state(v), "loaders": loaders}

    # -- going on from a checkpoint ----------------------------------------------------------------------------------

    def resume(self) -> None:
        """Before the first epoch."""
        member, folder = self._member, Path(self._env.resume)
        manifest, shared, contexts = read_checkpoint(folder, member.engine.order, self._env.virtual)
        environment.require_same(
            member.environment, manifest.environment, f"this machine, compared with the checkpoint {folder},"
        )
        member.prepared.check_fits(shared, str(folder))
        self._loaded = (shared, contexts)
        self._apply(shared, contexts)
        self._course.load(shared, contexts, member.workers)

    @property
    def resumed(self) -> bool:
        """Whether nothing was trained since."""
        return self._loaded is not None

    def resume_pass(self) -> None:
        """In the pass in which the checkpoint was taken: what code above the loop did was done in the generation
        before, too."""
        assert self._loaded is not None
        self._apply(*self._loaded)
        shared = self._loaded[0]
        self._course.load_scale(shared, self._member.workers)
        self._wishes.now[STOP] = shared["stop"]  # takes effect after the next step, as it would have there

    def forget_resumed(self) -> None:
        """Training goes on from here."""
        self._loaded = None

    def _apply(self, shared: Any, contexts: dict[int, Any]) -> None:
        engine = self._member.engine
        self._member.prepared.load(shared)
        engine.load_shared_state(shared["engine"])
        for v, state in contexts.items():
            engine.contexts.load(v, state)
        engine.contexts.go_outside()
