"""Whoever is let go: afterwards all reach each other, nobody goes in vain, and links that are up cost nobody."""

from itertools import combinations

from hypothesis import given, settings
from hypothesis import strategies as st

from concertina.master.cut_links import Pair, whom_to_let_go
from concertina.master.machine_types import Phase, State, StuckFound, Worker
from concertina.master.speed_watch import FRESH_SECONDS, Finding, Sign, SpeedWatch

SILENCE_S = 5.0
SIZE = 6
pairs_of_six = st.sets(st.sampled_from(list(combinations(range(SIZE), 2))), max_size=8)


@settings(max_examples=300, deadline=None)
@given(pairs=pairs_of_six, newcomers=st.sets(st.integers(1, SIZE - 1)), order=st.permutations(range(SIZE)))
def test_the_fewest_go_and_none_too_few(pairs: set[Pair], newcomers: set[int], order: list[int]) -> None:
    found = whom_to_let_go(pairs, tuple(order), newcomers)
    assert found == _by_trying_all(pairs, order, newcomers)


def _by_trying_all(pairs: set[Pair], order: list[int], newcomers: set[int]) -> tuple[int, ...]:
    def cost(gone: tuple[int, ...]) -> tuple[int, int, list[int]]:
        places = sorted((order.index(n) for n in gone), reverse=True)
        return len(set(gone) - newcomers), len(set(gone) & newcomers), [-place for place in places]

    every = (gone for size in range(SIZE + 1) for gone in combinations(order, size))
    return min((gone for gone in every if all(set(gone) & set(pair) for pair in pairs)), key=cost)


class Network:
    """Workers that stand still as soon as two cannot reach each other, and tell it; some are slow, some evaluate."""

    def __init__(self, size: int) -> None:
        self.watch = SpeedWatch(silence_s=SILENCE_S, stall_s=300.0, arrive_s=900.0)
        self.state = State(
            virtual=size,
            target=size,
            phase=Phase.TRAINING,
            members=tuple(range(size)),
            shares=tuple((n,) for n in range(size)),
            workers={n: Worker(desk="desk") for n in range(size)},
        )
        self.down: dict[Pair, float] = {}  # since when
        self.stands_since = 0.0

    def pass_time(self, now: float, slow: set[int]) -> list[Finding]:
        """Everybody says how it is; `slow` ones are busy in their script and make the others wait."""
        stands = bool(self.down) or bool(slow)
        self.stands_since = self.stands_since or now if stands else 0.0
        for n in self.state.workers:
            cut = tuple((m, now - since) for pair, since in self.down.items() if n in pair for m in pair if m != n)
            waits_s = now - self.stands_since if stands and n not in slow else 0.0
            self.watch.heard(n, now, Sign(met=0 if stands else int(10 * now), waits_s=waits_s, cut=cut))
        return self.watch.findings(self.state, now)

    def let_go(self, found: list[Finding]) -> None:
        gone = {finding.worker for finding in found if isinstance(finding, StuckFound)}
        left = {n: worker for n, worker in self.state.workers.items() if n not in gone}
        members = tuple(n for n in self.state.members if n in left)
        self.state = State(virtual=self.state.virtual, target=SIZE, phase=Phase.TRAINING, members=members, workers=left)
        self.down = {pair: since for pair, since in self.down.items() if not gone & set(pair)}


Moments = st.lists(st.tuples(st.sampled_from(list(combinations(range(SIZE), 2))), st.integers(1, 40)), max_size=6)


@settings(max_examples=200, deadline=None)
@given(slow=st.lists(st.tuples(st.integers(0, SIZE - 1), st.integers(0, 60), st.integers(1, 60)), max_size=6))
def test_while_all_links_are_up_nobody_goes_however_long_the_others_wait(slow: list[tuple[int, int, int]]) -> None:
    network = Network(SIZE)
    for tick in range(1, 300):
        now = tick / 2
        busy = {n for n, begins, lasts in slow if begins <= now < begins + lasts}
        assert network.pass_time(now, busy) == []


@settings(max_examples=200, deadline=None)
@given(cuts=Moments, heals=st.dictionaries(st.sampled_from(list(combinations(range(SIZE), 2))), st.integers(1, 60)))
def test_a_link_that_stays_down_ends_the_wait_and_one_that_heals_in_time_costs_nobody(
    cuts: list[tuple[Pair, int]], heals: dict[Pair, int]
) -> None:
    network, longest = Network(SIZE), 0.0
    for tick in range(1, 200):
        now = tick / 2
        for pair, at in cuts:
            if at == now and set(pair) <= set(network.state.workers):
                network.down.setdefault(pair, now)
        for pair, at in heals.items():
            if at == now:
                network.down.pop(pair, None)
        found = network.pass_time(now, set())
        for finding in found:
            assert isinstance(finding, StuckFound)
            worst = max(now - since for pair, since in network.down.items() if finding.worker in pair)
            assert worst >= SILENCE_S / 2, "nobody had missed it for long"
        network.let_go(found)
        longest = max([longest, *(now - since for since in network.down.values())])
    assert longest <= 2 * SILENCE_S + FRESH_SECONDS, "a link stayed down, and everybody stood still"
    assert network.state.workers, "somebody is always left"
