"""The installed build of gloo adds in the order that we add in. With two ranks there is only one order."""

from pathlib import Path

import pytest

from concertina.runtime.gloo_contexts import GlooContexts, follows_ring_order


@pytest.mark.parametrize("ranks", [3, 4])
def test_gloo_adds_in_ring_order(ranks: int, tmp_path: Path) -> None:
    assert follows_ring_order(GlooContexts(tmp_path / "meet", ranks, tuple(range(ranks))))
