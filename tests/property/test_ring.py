"""The virtual ring as arithmetic: every element is summed once, in gloo's order, with no more traffic than DDP's."""

from itertools import pairwise

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from concertina.core.placement import VirtualPlacement
from concertina.runtime.buckets import BucketLayout, DdpOptions
from concertina.runtime.gloo_contexts import ring_sum
from concertina.runtime.reduce import LocalFold
from concertina.runtime.ring_order import chunk_elements, fold_order, ring_chunks
from concertina.runtime.virtual_ring import plan_pieces

sizes = st.integers(1, 3000)
virtuals = st.integers(1, 9)


@given(n=sizes, virtual=virtuals, item=st.sampled_from([2, 4, 8]))
def test_chunks_cover_a_bucket_once(n: int, virtual: int, item: int) -> None:
    chunks = ring_chunks(n, virtual, item)
    assert [c.lo for c in chunks] == [0, *[c.hi for c in chunks[:-1]]]
    assert chunks[-1].hi == n
    assert all(sorted(c.order) == list(range(virtual)) for c in chunks)


@given(virtual=virtuals)
def test_a_chunk_ends_where_it_is_gathered_from(virtual: int) -> None:
    for c in range(virtual):
        assert fold_order(c, virtual)[-1] == c


def test_large_buckets_are_cut_at_gloos_segment_size() -> None:
    # 26 MB over 4 ranks: 25 segments of at most 1 MiB, rounded up to 28, so 7 per chunk.
    n = 6_500_000
    assert chunk_elements(n, 4, 4) == 7 * -(-n * 4 // 28 // 4)


@given(n=sizes, virtual=st.integers(1, 8), seed=st.integers(0, 1000))
@settings(max_examples=60, deadline=None)
def test_the_streaming_fold_is_the_ring_sum(n: int, virtual: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    terms = [torch.randn(n, generator=generator) for _ in range(virtual)]
    terms[0][::3] = -0.0
    fold = LocalFold(BucketLayout.initial([torch.empty(n)], DdpOptions()), virtual)
    for _ in range(2):  # memory is reused from step to step
        for v in fold.order:
            fold.buffer(v, 0).copy_(terms[v])
            fold.ready(v, 0) if seed % 2 else fold.all_ready(v)
        fold.fold()
        total = fold.results()[0]
        assert torch.equal(total.view(torch.int32), ring_sum(terms).view(torch.int32))


@st.composite
def placements(draw: st.DrawFn) -> VirtualPlacement:
    virtual = draw(st.integers(2, 9))
    workers = draw(st.integers(2, virtual))
    if draw(st.booleans()):
        return VirtualPlacement.blocks(virtual, workers)
    order = draw(st.permutations(range(virtual)))
    cuts = sorted(draw(st.sets(st.integers(1, virtual - 1), min_size=workers - 1, max_size=workers - 1)))
    edges = [0, *cuts, virtual]
    return VirtualPlacement(tuple(tuple(order[a:b]) for a, b in pairwise(edges)))


@given(placement=placements(), n=sizes, piece=st.integers(1, 700))
def test_the_stays_of_all_workers_make_the_ring(placement: VirtualPlacement, n: int, piece: int) -> None:
    chunks = ring_chunks(n, placement.virtual, 4)
    plans = [plan_pieces(chunks, placement, w, piece) for w in range(len(placement.workers))]
    for same_piece in zip(*plans, strict=True):
        assert len({(p.tag, p.lo, p.hi, p.owner) for p in same_piece}) == 1
        stays = sorted((visit.step, w, visit) for w, p in enumerate(same_piece) for visit in p.visits)
        terms = [v for _, _, visit in stays for v in visit.terms]
        chunk = next(c for c in chunks if c.lo <= same_piece[0].lo < c.hi)
        assert tuple(terms) == chunk.order
        assert [visit.target for _, _, visit in stays] == [*[w for _, w, _ in stays[1:]], None]
        assert [visit.source for _, _, visit in stays] == [None, *[w for _, w, _ in stays[:-1]]]
        assert stays[-1][1] == same_piece[0].owner


@given(virtual=st.integers(2, 12), data=st.data())
def test_a_worker_never_sends_more_than_under_ddp(virtual: int, data: st.DataObject) -> None:
    """Contiguous blocks, chunks of equal size: at most 2(P-1)/P buckets per worker."""
    workers = data.draw(st.integers(2, virtual))
    placement = VirtualPlacement.blocks(virtual, workers)
    chunks = ring_chunks(virtual * 100, virtual, 4)
    per_chunk = 1 / virtual
    for w in range(workers):
        plan = plan_pieces(chunks, placement, w, 10**9)
        reducing = sum(per_chunk for p in plan for visit in p.visits if visit.target is not None)
        handing_round = sum(per_chunk for p in plan if (w + 1) % workers != p.owner)
        assert reducing + handing_round <= 2 * (virtual - 1) / virtual + 1e-9
