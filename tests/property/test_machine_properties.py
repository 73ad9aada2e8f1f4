"""Whatever dies or is cut off, whenever, however late words arrive: a job ends, no step counts in two generations."""

import json
import random
import sys
from collections import deque
from pathlib import Path

from hypothesis import example, given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parent))

from worker_model import Memory, ModelWorker

from concertina.master import machine_types as t
from concertina.master import state_json
from concertina.master.cut_links import Complaint, cut_off
from concertina.master.machine import OVER, Change, Phase, handle, start
from concertina.master.speed_watch import Sign, SpeedWatch

STEPS = 14
MOST_MOVES = 20_000
RARE = ("act_on", "change_over", "fetch", "come_in", "forming", "leave")  # short moments that kills should meet, too


class World:
    """A master, a launcher, workers, and what is on its way between them; chance decides who moves next."""

    def __init__(self, seed: int, kills: int, requests: int, cuts: int) -> None:
        self.chance = random.Random(seed)
        self.kills, self.requests, self.cuts = kills, requests, cuts
        self.virtual = self.chance.randint(2, 5)
        workers = self.chance.randint(1, self.virtual)
        self.minimum = self.chance.randint(1, workers)
        schedule = (Change(5, self.chance.randint(self.minimum, self.virtual)),) if self.chance.random() < 0.3 else ()
        self.memory = Memory()
        self.workers: dict[int, ModelWorker] = {}
        self.to_launcher: deque[t.Command] = deque()
        self.from_launcher: deque[t.Event] = deque()
        self.formations: dict[int, object] = {}
        self.newest = -1
        self.story: list[object] = []
        self.state, commands = start(self.virtual, workers, schedule, minimum=self.minimum)
        self.send(commands)

    # -- the master --------------------------------------------------------------------------------------------------

    def tell(self, event: t.Event) -> None:
        self.story.append(event)
        before = self.state
        self.state, commands = handle(before, event)
        if self.chance.random() < 0.2:  # a new master goes on with what the old one wrote down
            self.state = state_json.load(json.loads(json.dumps(state_json.dump(self.state))))
        self.story += commands
        self.send(commands)
        self.check(before)

    def check(self, before: t.State) -> None:
        state = self.state
        assert state.generation >= before.generation
        if state.phase is Phase.TRAINING and not state.exits:
            assert set(state.members) <= set(state.workers), "a lost worker is still a member"
        if state.pending is not None:
            assert state.pending.generation > state.generation
            assert set(state.pending.members) <= set(state.workers) | set(state.lost) | set(state.exits)
        sizes = sorted(v for block in state.shares for v in block)
        assert sizes == list(range(self.virtual))
        assert len(state.shares) == len(state.members)
        self.look_around()

    def look_around(self) -> None:
        """A master does so in any state; where one ends for it, so would each of its successors."""
        watch = SpeedWatch(silence_s=1.0, stall_s=1.0, arrive_s=1.0)
        for n in self.state.workers:
            watch.heard(n, 0.0, Sign(generation=self.state.generation, turn_s=0.1 + n, turns=9, met=n, in_round=True))
        for now in (0.5, 9.0):  # nobody is silent yet; all are
            watch.findings(self.state, now)

    def send(self, commands: t.Commands) -> None:
        for command in commands:
            if isinstance(command, t.StartWorker | t.KillWorkers | t.AskToStop):
                self.to_launcher.append(command)
                continue
            if isinstance(command, t.Form):
                known = self.formations.setdefault(command.formation.generation, command.formation)
                assert known == command.formation, "two formations of one generation"
            if not isinstance(command, t.TellStory | t.Answer):
                for n in command.to:
                    self.worker(n).inbox.append(command)

    def worker(self, number: int) -> ModelWorker:
        """Words to a worker wait for it, should it not have started yet."""
        if number not in self.workers:
            nobody = t.StartWorker(worker=number, generation=0, members=(), resume=False)
            self.workers[number] = ModelWorker(self.memory, nobody, STEPS, self.minimum)
            self.workers[number].doing = "wait_to_start"
        return self.workers[number]

    # -- moves -------------------------------------------------------------------------------------------------------

    def launch(self) -> None:
        command = self.to_launcher.popleft()
        if isinstance(command, t.StartWorker):
            if command.members and command.worker == min(command.members):
                self.memory.committed.clear()  # from the beginning
            early = self.workers.get(command.worker)
            self.workers[command.worker] = ModelWorker(self.memory, command, STEPS, self.minimum)
            if early is not None:
                self.workers[command.worker].inbox = early.inbox
        elif isinstance(command, t.KillWorkers):
            for n in command.workers:
                self.kill(n)

    def kill(self, number: int) -> None:
        worker = self.workers.get(number)
        if worker is not None and worker.exit is None:
            worker.exit = -9
            self.memory.dead.add(number)
            for _ in range(self.chance.randint(0, len(worker.outbox))):
                worker.outbox.pop()  # it had not come to say that
            self.story.append(f"kill {number}")

    def moves(self) -> list[tuple[str, int]]:
        """What could happen next. Whoever turns out to wait is asked again later."""
        found = [("launch", 0)] if self.to_launcher else []
        found += [("hear launcher", 0)] if self.from_launcher else []
        found += [("end pause", 0)] if self.state.pause_s else []
        for n, worker in self.workers.items():
            if worker.outbox:
                found.append(("hear", n))
            if worker.doing == "wait_to_start":
                continue
            if worker.exit is None:
                found += [("act", n), ("build", n)]
                if worker.inbox:
                    found.append(("deliver", n))
            elif not worker.reported:
                found.append(("reap", n))
        return found

    def move(self, what: str, n: int) -> bool:
        """False if that worker has to wait."""
        if what == "launch":
            self.launch()
        elif what == "hear launcher":
            self.tell(self.from_launcher.popleft())
        elif what == "end pause":
            self.tell(t.PauseOver())
        elif what == "hear":
            self.tell(self.workers[n].outbox.popleft())
        elif what == "deliver":
            self.workers[n].hear(self.workers[n].inbox.popleft())
        elif what == "reap":
            self.workers[n].reported = True
            self.from_launcher.append(t.WorkerExited(n, self.workers[n].exit))
        elif what == "build":
            return self.workers[n].build()
        elif what == "act":
            return self.workers[n].act()
        return True

    def disturb(self) -> None:
        alive = [n for n, w in self.workers.items() if w.exit is None and w.doing != "wait_to_start"]
        rare = [n for n in alive if self.workers[n].doing in RARE]
        if self.kills and alive and self.chance.random() < (0.15 if rare else 0.03):
            self.kills -= 1
            self.kill(self.chance.choice(rare or alive))
        if self.requests and self.chance.random() < 0.02:
            self.requests -= 1
            self.tell(self.request())

        if self.cuts and len(alive) > 1 and self.chance.random() < 0.02:
            self.cuts -= 1
            self.memory.cut.add(frozenset(self.chance.sample(alive, 2)))
            self.story.append(f"cut {self.memory.cut}")
        if self.memory.cut and self.chance.random() < 0.02:
            self.memory.cut.remove(self.chance.choice(sorted(self.memory.cut, key=sorted)))
        if self.memory.cut and self.chance.random() < 0.02:
            self.let_go()

    def let_go(self) -> bool:
        """Links have been down for long, and some wait for them; who is ended, if anybody is?"""
        told = {}
        for n, worker in self.workers.items():
            if worker.exit is None and worker.doing != "wait_to_start":
                cut = {m: 60.0 for pair in self.memory.cut if n in pair for m in pair if m != n}
                told[n] = Complaint(waits_s=60.0, cut=cut)
        found = cut_off(self.state, told, 10.0)
        for finding in found:
            self.tell(finding)
        return bool(found)

    def request(self) -> t.Event:
        kind = self.chance.randrange(4)
        some = self.chance.choice(self.state.members)
        if kind == 0:
            return t.RemovalAsked("m", (some,), self.chance.random() < 0.5, "a test")
        if kind == 1 and self.state.phase is Phase.TRAINING:
            speeds = {n: self.chance.choice([1.0, 3.0]) for n in self.state.members}
            return t.UnevenFound(self.state.generation, speeds, "a test")
        if kind == 2:
            return t.SlowFound(some, "a test")
        return t.ResizeAsked("r", self.chance.randint(-1, self.virtual + 1))

    def to_end(self) -> None:
        for _ in range(MOST_MOVES):
            if self.state.phase in OVER:
                return
            self.disturb()
            moves = self.moves()
            self.chance.shuffle(moves)
            moved = any(self.move(*move) for move in moves)
            assert moved or self.let_go(), f"deadlock: {self.explain()}"
        raise AssertionError(f"no end in sight: {self.explain()}")

    def explain(self) -> str:
        doing = {n: (w.doing, w.step, w.now and w.now.generation) for n, w in self.workers.items() if w.exit is None}
        return "\n".join(map(str, [self.state, doing, *self.story[-60:]]))


@settings(max_examples=1000, deadline=None, derandomize=True, database=None)
@given(seed=st.integers(0, 2**32), kills=st.integers(0, 8), requests=st.integers(0, 6), cuts=st.integers(0, 4))
@example(seed=0, kills=0, requests=0, cuts=0)
def test_a_job_ends_whatever_dies_or_is_cut_off_and_however_late_words_arrive(
    seed: int, kills: int, requests: int, cuts: int
) -> None:
    world = World(seed, kills, requests, cuts)
    world.to_end()
    assert world.state.phase is Phase.FINISHED, world.explain()
    assert max(world.memory.committed) == STEPS
