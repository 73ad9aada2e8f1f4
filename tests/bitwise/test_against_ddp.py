"""Parameters, buffers, optimizer state and every virtual worker's loss, compared with torchrun + DDP to the bit."""

from pathlib import Path

import pytest
from harness import Reference, differences, run_elastic
from matrix import JOBS, MODELS, OPTIONS

from concertina.backends.local import LocalBackend

CASES = [
    # P = 2, 8: three and more changes, from one worker to several and back
    *[(job.name, 2, 2, "3=1,6=2,9=1") for job in MODELS],
    *[(job.name, 8, 4, "2=1,5=3,9=2") for job in MODELS[:3]],
    # P = 4: W = 1..4 fixed, and schedules
    *[(job.name, 4, w, "") for job in MODELS[:2] for w in (1, 2, 3, 4)],
    *[(job.name, 4, 4, "1=2,4=1,7=3,10=4") for job in MODELS],
    # P = 3 is no power of two, so that the place where gradients are scaled matters
    *[(job.name, 3, 2, "1=3,2=1,6=2") for job in [*MODELS, *OPTIONS]],
]
MORE = [  # the same again with other numbers: `make test-all`
    *[(job.name, 2, 1, "") for job in MODELS],
    *[(job.name, 8, 3, "") for job in MODELS[:4]],
    (MODELS[3].name, 8, 4, "2=1,5=3,9=2"),
    *[(job.name, 4, w, "") for job in MODELS[2:4] for w in (1, 2, 3, 4)],
    *[(job.name, 4, 3, "5=2") for job in OPTIONS],
]


@pytest.mark.parametrize(
    ("name", "virtual", "workers", "changes"),
    [*CASES, *(pytest.param(*case, marks=pytest.mark.slow) for case in MORE)],
)
def test_elastic_run_has_the_bits_of_ddp(
    name: str,
    virtual: int,
    workers: int,
    changes: str,
    reference: Reference,
    backend: LocalBackend,
    tmp_path: Path,
) -> None:
    job = JOBS[name][0]
    report = run_elastic(job, virtual, workers, changes, tmp_path / "out", backend)
    assert report.steps == job.steps
    assert len(report.generations) == 1 + len([c for c in changes.split(",") if c])
    assert differences(reference(job, virtual), job, virtual, tmp_path / "out") == []


@pytest.mark.parametrize("virtual", [3, pytest.param(4, marks=pytest.mark.slow), 8])
@pytest.mark.parametrize(
    ("reduction", "name"),
    [("ring", "virtual ring"), ("shared", "shared-memory fold"), ("contexts", "gloo contexts")],
)
@pytest.mark.parametrize("job_name", ["lm-adamw-clip", "cnn-sgd"])
def test_every_way_to_sum_has_the_bits_of_ddp(
    job_name: str,
    reduction: str,
    name: str,
    virtual: int,
    reference: Reference,
    backend: LocalBackend,
    tmp_path: Path,
) -> None:
    job = JOBS[job_name][0]
    report = run_elastic(job, virtual, 2, f"6={min(3, virtual - 1)}", tmp_path / "out", backend, reduction=reduction)
    assert report.reduction == name
    assert differences(reference(job, virtual), job, virtual, tmp_path / "out") == []


def test_stopping_everything_and_resuming_with_other_workers_keeps_the_bits(
    reference: Reference, backend: LocalBackend, tmp_path: Path
) -> None:
    job = JOBS["cnn-sgd"][0]
    checkpoints = tmp_path / "checkpoints"
    run_elastic(job, 4, 3, "", tmp_path / "a", backend, steps=5, checkpoint_dir=checkpoints)
    resumed = run_elastic(
        job, 4, 2, "", tmp_path / "b", backend, checkpoint_dir=checkpoints, resume=checkpoints / "step-00000005"
    )
    for v in range(4):  # the losses of both halves
        whole = (tmp_path / "a" / f"loss-{v}").read_text() + (tmp_path / "b" / f"loss-{v}").read_text()
        (tmp_path / "b" / f"loss-{v}").write_text(whole)
    assert resumed.steps == job.steps
    assert differences(reference(job, 4), job, 4, tmp_path / "b") == []
