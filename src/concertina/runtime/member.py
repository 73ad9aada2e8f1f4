"""A worker from prepare() on: its engine, and what ties it to the other workers of the job.

Here the first generation comes together, and here is said what a member brings into every later one.
"""

import json
from itertools import accumulate
from typing import Any

import torch

from concertina.core.env import WorkerEnv
from concertina.core.errors import StateLost
from concertina.runtime import environment
from concertina.runtime.buckets import DdpOptions
from concertina.runtime.context_record import tensor_from_bytes, tensor_to_bytes
from concertina.runtime.course import Course
from concertina.runtime.desk import Desk
from concertina.runtime.determinism import may_mix_gpus
from concertina.runtime.elastic import Elastic
from concertina.runtime.events import EventPipe
from concertina.runtime.fabric import PeersLost
from concertina.runtime.gates import gate_optimizer, gate_scaler, gate_scheduler
from concertina.runtime.membership import Generation, Membership
from concertina.runtime.prepared import Prepared
from concertina.runtime.reducers import ReducerFactory
from concertina.runtime.rng import RandomState
from concertina.runtime.scaling import gate_rate
from concertina.runtime.scan import check_nothing_forgotten
from concertina.runtime.segments import Segment, connect
from concertina.runtime.virtual import VirtualEngine
from concertina.runtime.wire import WireThread

CONTEXT_BYTES = 1 << 20  # room on the desk for a virtual worker's random states and data lanes


class Member:
    """One worker among the others. What it is made of does not change any more."""

    def __init__(
        self, env: WorkerEnv, prepared: Prepared, options: DdpOptions, course: Course, events: EventPipe
    ) -> None:
        self._env = env
        self._course = course
        self._random = RandomState.capture()  # as the script has left it; what we draw is not part of the job
        self._searched = False  # for optimizers and schedulers that were not prepared
        self.prepared = prepared
        self._factory = ReducerFactory(env)
        self.engine = VirtualEngine(prepared.model, options, env.virtual, self._factory.make)
        self.environment = environment.record(prepared.optimizers, any(p.is_cuda for p in self.engine.params))
        self._may_mix_gpus = self._may_mix(events)
        buffers = sum(flat.numel() * flat.element_size() for flat in self.engine.buffers.flats)
        wire = WireThread(env.host, env.key, env.worker) if env.host else None
        connect(wire)
        self.desk = Desk.create(env.virtual, CONTEXT_BYTES + 2 * buffers)
        self.desk.say_rack(env.rack)
        self.membership = Membership(env, self.desk, wire)
        self.elastic = Elastic(self.engine, self.membership, self.desk)
        self.membership.introduce = self._introduction
        self.membership.furnish = self._furnish
        self.elastic.prepared = prepared
        self.elastic.feeds = course.feeds
        self.engine.on_take_up = self.membership.enter

    def _may_mix(self, events: EventPipe) -> bool:
        """Whether GPU models may differ: only at level D2, and only if the model's modules allow it."""
        if self._env.level != "D2":
            return False
        verdict = may_mix_gpus(self.prepared.model)
        if is_first(self._env):
            events.emit("gpu_mix", may_mix=verdict.may_mix, reason=verdict.reason)
        return verdict.may_mix

    # -- who and where -----------------------------------------------------------------------------------------------

    @property
    def is_main(self) -> bool:
        """Whether virtual worker 0 lives here."""
        if self.engine.rehearses:
            return False
        return is_first(self._env) if self.engine.generation is None else self.elastic.is_main

    @property
    def workers(self) -> int:
        if self.engine.generation is None:
            return max(1, len(self._env.members))
        return self.engine.generation.fabric.size

    # -- coming together ---------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Forms the first generation with those who start together; a newcomer is let in later."""
        if not self._env.joins:
            try:
                self._start_together()
            except PeersLost as loss:
                raise StateLost(f"{loss} before training began") from None
        self._random.restore()
        if self.engine.generation is not None:
            self.engine.contexts.begin(self.engine.order, self._random)
        self._gate()

    def _start_together(self) -> None:
        generation = self.membership.first()
        self.engine.take_up(generation)
        if generation.fabric.size > 1 and not self._env.resume:
            self._take_parameters_of_first(generation)

    def _take_parameters_of_first(self, generation: Generation) -> None:
        """As DDP does: what the worker of virtual worker 0 has initialised is what all start with."""
        home, fabric = generation.placement.host(0), generation.fabric
        tensors = [*self.prepared.model.parameters(), *self.engine.buffers.flats]
        sizes = [tensor.numel() * tensor.element_size() for tensor in tensors]
        segment = Segment.create(sum(sizes)) if generation.rank == home else None
        if segment is not None:
            for at, tensor in zip(accumulate(sizes, initial=0), tensors, strict=False):
                data = tensor_to_bytes(tensor)
                segment.memory[at : at + len(data)] = data
        address = fabric.gather_bytes(segment.address.encode() if segment is not None else b"")[home]
        if segment is None:
            try:
                theirs = Segment.open(address.decode()).memory
            except OSError:
                raise PeersLost([generation.formation.members[home]]) from None
            with torch.no_grad():
                for at, size, tensor in zip(accumulate(sizes, initial=0), sizes, tensors, strict=False):
                    tensor.copy_(tensor_from_bytes(memoryview(theirs[at : at + size]), tensor.detach()))
        fabric.meet()  # everybody has taken them

    def _gate(self) -> None:
        engine, course = self.engine, self._course
        for optimizer in self.prepared.optimizers:
            gate_optimizer(optimizer, engine)
            gate_rate(optimizer, engine, lambda: course.scale.rate_factor(course.step))
        for scheduler in self.prepared.schedulers:
            gate_scheduler(scheduler, engine)
        for scaler in self.prepared.scalers:
            gate_scaler(scaler, engine)
        held = {id(p) for o in self.prepared.optimizers for group in o.param_groups for p in group["params"]}
        engine.covers_all_params = all(id(p) in held for p in engine.params)

    # -- what it brings into a generation ----------------------------------------------------------------------------

    def _introduction(self) -> bytes:
        """A newcomer has nothing to tell that the others do not know better."""
        if self._env.joins and self.engine.generation is None:
            return b""
        return self.elastic.introduction(self.environment)

    def _furnish(self, generation: Generation) -> Any:
        """In every member of a new generation, maybe beside training: what the step of that generation needs."""
        engine = self.engine
        known = [json.loads(said) for said in generation.introductions if said]
        told = [
            member for member, said in zip(generation.formation.members, generation.introductions, strict=True) if said
        ]
        if known and told[0] != self._env.worker:
            who = f"worker {self._env.worker}, compared with worker {told[0]},"
            environment.require_same(self.environment, known[0]["environment"], who, mixed_gpus=self._may_mix_gpus)
        layout = engine.layout.copy()  # while this is built, DDP's rebuild may change the one in use
        if known:
            layout.load(known[0]["layout"])
        generation.buckets = layout.buckets
        reducer = self._factory.make(layout, generation)
        if engine.generation is not None or self._env.joins:
            self.membership.set_aside(reducer.warm)
            for loader in list(self._course.loaders):
                loader.feed.get_ready(self._course.epoch, generation.placement.workers[generation.rank])
        return reducer

    # -- later -------------------------------------------------------------------------------------------------------

    def search_once(self) -> None:
        """For what the script forgot to prepare. A newcomer does so before anybody waits for it."""
        if not self._searched:
            check_nothing_forgotten(self.prepared.model, self.prepared.optimizers, self.prepared.schedulers)
            self._searched = True

    def at_step(self, step: int) -> None:
        """So many steps are complete."""
        self.elastic.step = self.membership.step = step

    def stands_at(self, step: int) -> None:
        """Goes on from a state after so many steps that it has not made itself."""
        self.at_step(step)
        self.desk.clock = 2 * step


def is_first(env: WorkerEnv) -> bool:
    """Whether virtual worker 0 begins on this worker."""
    return env.members[:1] == (env.worker,)
