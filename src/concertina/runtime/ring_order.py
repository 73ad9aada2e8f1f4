"""The order in which gloo's ring all-reduce adds, as arithmetic.

One all-reduce of n elements over P ranks cuts the elements into P chunks. The sum of chunk c starts with the
contribution of rank c-1, then adds those of c-2, c-3, ... (modulo P) and ends with that of rank c: one rounding per
addition. Everything in concertina that sums gradients follows this table, so the result does not depend on how many
processes did the work. Nothing here knows about torch.
"""

from dataclasses import dataclass

MAX_SEGMENT_BYTES = 1 << 20  # gloo's bound on one ring segment


@dataclass(frozen=True, slots=True)
class Chunk:
    """Elements [lo, hi) of a bucket, added up in `order` (virtual workers, first term first)."""

    index: int
    lo: int
    hi: int
    order: tuple[int, ...]


def chunk_elements(n: int, virtual: int, item_bytes: int) -> int:
    """How many elements one chunk has (the last ones may have fewer, or none)."""
    if n == 0 or virtual == 1:
        return n
    total = n * item_bytes
    segment_bound = item_bytes * max(1, MAX_SEGMENT_BYTES // item_bytes)
    segments = max(_ceil_div(total, segment_bound), 2 * virtual)
    segments = _ceil_div(segments, virtual) * virtual
    segment_bytes = _ceil_div(_ceil_div(total, segments), item_bytes) * item_bytes
    return (segments // virtual) * segment_bytes // item_bytes


def fold_order(chunk: int, virtual: int) -> tuple[int, ...]:
    """Virtual workers in the order in which their terms enter the sum of `chunk`."""
    return tuple((chunk - k) % virtual for k in range(1, virtual + 1))


def ring_chunks(n: int, virtual: int, item_bytes: int) -> tuple[Chunk, ...]:
    """The non-empty chunks of an all-reduce of n elements."""
    size = chunk_elements(n, virtual, item_bytes)
    bounds = ((c, min(c * size, n), min((c + 1) * size, n)) for c in range(virtual))
    return tuple(Chunk(c, lo, hi, fold_order(c, virtual)) for c, lo, hi in bounds if hi > lo)


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)
