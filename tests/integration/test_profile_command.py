"""`concertina profile` as a user meets it."""

import json
from pathlib import Path

import pytest
import torch

from concertina.profile import Plan, measure_batch, measure_curve, try_batch
from concertina.runner import RunSettings
from conftest import SMALL, TRAIN

EXAMPLE = Path(__file__).parents[2] / "examples" / "mlp.py"


def test_an_example_is_measured_at_every_count_in_one_job(concertina) -> None:
    done = concertina("profile", "-P", 3, "--workers", "1,3,2", "--measure", 4, "--warm", 2, "--json", EXAMPLE)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert [(point["workers"], point["steps"]) for point in found["points"]] == [(1, 4), (3, 4), (2, 4)]
    per_step = found["samples_per_step"]
    assert 90 < per_step <= 3 * 32  # the last batch of an epoch is smaller
    assert all(p["samples_per_s"] == pytest.approx(per_step / p["mean_s"]) for p in found["points"])
    assert found["missing"] == []
    assert found["batch"] is None


def test_no_worker_that_stays_is_started_again(script) -> None:
    events = []
    settings = RunSettings(script=script(TRAIN, epochs=2000), virtual=2)
    found = measure_curve(settings, Plan(workers=(1, 2, 1), warm=1, measured=3), events.append)
    assert [point.workers for point in found.points] == [1, 2, 1]
    assert len([event for event in events if event["event"] == "worker_started"]) == 2
    assert events[-1]["event"] == "job_ended"


def test_a_paced_script_sees_its_own_name_and_arguments(script, tmp_path: Path) -> None:
    seen = tmp_path / "seen"
    writes = f"session = ct.join(); open({str(seen)!r}, 'w').write(' '.join([__file__, *sys.argv]))"
    path = script(TRAIN.replace("session = ct.join()", writes), epochs=2000)
    settings = RunSettings(script=path, args=["--flag"], virtual=2)
    found = measure_curve(settings, Plan(workers=(1,), warm=1, measured=5), paced=True)
    assert (found.script, found.samples_per_step) == (str(path), 2 * 4)
    assert seen.read_text() == f"{path} {path} --flag"


def test_the_table_says_what_a_script_was_too_short_for(script, concertina) -> None:
    done = concertina("profile", "-P", 2, "--max", 2, "--measure", 3, "--warm", 1, script(TRAIN, epochs=1))
    assert done.returncode == 0, done.stderr  # 8 steps: too few to start another worker in
    assert "ended after 8 steps, before 2 workers were measured: each count needs 5 steps, and more" in done.stdout
    assert "100%" in done.stdout


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--max", 8), "8 workers for 4 virtual workers"),
        (("--max", 2, "--workers", "1"), "--workers and --max: give one of them"),
        (("--workers", "1,x"), "give numbers of workers"),
        (("--measure", 1000), "ended after"),
    ],
)
def test_bad_requests_get_one_sentence(script, concertina, options: tuple[object, ...], words: str) -> None:
    done = concertina("profile", *options, script(TRAIN, epochs=1))
    assert done.returncode == 2
    assert words in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_a_script_that_fails_is_named_with_its_line(script, concertina) -> None:
    done = concertina("profile", "-P", 2, "--max", 1, script(TRAIN + "\nraise ValueError('no')\n", epochs=1))
    assert done.returncode == 1
    assert "ValueError: no at train.py:" in done.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what is said without a GPU")
def test_without_a_gpu_the_batch_is_estimated_from_memory_and_said_to_be(script) -> None:
    wide = SMALL.replace("randn(64, 8", "randn(640, 20000").replace("randn(64, 1", "randn(640, 1")
    wide = wide.replace("nn.Linear(8, 16)", "nn.Linear(20000, 16)")
    loop = TRAIN[len(SMALL) :].replace("batch_size=4", "batch_size=16")
    found = measure_batch(RunSettings(script=script(wide + loop), virtual=2))
    assert (found.script_batch, found.tried, found.device) == (16, (16, 64), "cpu")
    assert found.largest is not None
    assert found.largest > 64
    assert "estimated, not tried" in found.reason


def test_another_batch_is_given_to_the_script_and_nothing_else_changes(script, tmp_path: Path) -> None:
    seen = tmp_path / "seen"
    text = TRAIN.replace("loss.backward()", f"loss.backward(); print(len(x), *sys.argv, file=open({str(seen)!r}, 'a'))")
    path = script(text)
    outcome = try_batch(RunSettings(script=path, args=["--flag"], virtual=2), 12, lambda event: None)
    assert (outcome.batch, outcome.own, outcome.samples, outcome.fits) == (12, 4, 32, True)
    assert outcome.peak_bytes > 0
    # 32 samples of each virtual worker: two full batches and a rest
    assert seen.read_text().splitlines() == [f"{n} {path} --flag" for n in (12, 12, 12, 12, 8, 8)]
