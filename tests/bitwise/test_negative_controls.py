"""Each ingredient of the recipe left out must make the comparison fail; otherwise the comparison proves nothing."""

from pathlib import Path

import pytest
from harness import Reference, differences, run_elastic
from matrix import JOBS

from concertina.backends.local import LocalBackend

P = 3

CONTROLS = [
    ("no_rebuild", "small-buckets", ""),
    ("random_state_lost_at_change", "lm-adamw-clip", "5=2"),
    ("divide_by_p", "small-buckets", ""),
    ("scale_after_the_sum", "small-buckets", ""),
    ("one_shared_random_state", "lm-adamw-clip", ""),
    ("one_shared_set_of_buffers", "own-buffers", ""),
    ("rank_order_sum", "small-buckets", ""),
    ("static_graph_rebuilt_early", "static-graph", ""),
    ("rebuild_although_find_unused", "unused-sgd", ""),
    ("buffers_synced_at_every_micro_batch", "accumulate-2", ""),
    ("multiply_although_in_bucket", "bucket-view-zeroed-in-place", ""),
    ("zeros_for_unused", "unused", ""),
    ("data_workers_share_random_state", "cnn-sgd", ""),
]


@pytest.mark.parametrize(("leave_out", "name", "changes"), CONTROLS)
def test_leaving_an_ingredient_out_changes_the_bits(
    leave_out: str,
    name: str,
    changes: str,
    reference: Reference,
    backend: LocalBackend,
    tmp_path: Path,
) -> None:
    job = JOBS[name][0]
    run_elastic(job, P, 1, changes, tmp_path / "out", backend, leave_out=leave_out)
    assert differences(reference(job, P), job, P, tmp_path / "out") != []


@pytest.mark.slow
def test_another_number_of_threads_changes_the_bits(
    reference: Reference, backend: LocalBackend, tmp_path: Path
) -> None:
    job = JOBS["cnn-sgd"][0]
    run_elastic(job, P, 1, "", tmp_path / "out", backend, threads=2)
    assert differences(reference(job, P), job, P, tmp_path / "out") != []
