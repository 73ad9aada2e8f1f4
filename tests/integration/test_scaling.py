"""Batches that change while a job trains: the same cut everywhere, every sample once, the rate behind the batch."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from concertina.backends.local import LocalBackend
from concertina.runner import Report, Run, RunSettings, parse_changes, run
from conftest import HEAD

SAMPLES = 64

# Notes which samples each virtual worker was given, and the rates that the optimizer really used.
JOB = (
    HEAD
    + """
import json, os, signal, time
session = ct.join()
number = int(os.environ.get("CONCERTINA_WORKER", 0))
model = nn.Linear(4, 1)

class Watched(torch.optim.SGD):
    used = []
    def step(self, closure=None):
        Watched.used.append(self.param_groups[0]["lr"])
        return super().step(closure)

optimizer = Watched(model.parameters(), lr=0.25, momentum=0.9)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1000)
g = torch.Generator().manual_seed(1)
data = TensorDataset(torch.randn(SAMPLES, 4, generator=g), torch.arange(SAMPLES))
loader = session.loader(data, batch_size=2, shuffle=True, seed=3, num_workers=LANES)
model, optimizer, scheduler = session.prepare(model, optimizer, scheduler)
seen = open(f"{sys.argv[1]}.{number}", "a")
for epoch in session.epochs(EPOCHS):
    TOP
    for x, y in loader:
        BODY
        session.log(size=len(y), rate=Watched.used[-1] if Watched.used else 0)
        if not session.rehearsing:
            print(json.dumps([epoch, loader.index, session.rank, y.tolist()]), file=seen, flush=True)
if session.is_main:
    torch.save({"model": model.state_dict(), "rates": Watched.used, "schedule": scheduler.state_dict()}, sys.argv[1])
"""
)
STEP = """(0.01 * model(x).square().mean()).backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()"""


def text(top: str = "pass", body: str = STEP, epochs: int = 4, lanes: int = 0) -> str:
    made = JOB.replace("SAMPLES", str(SAMPLES)).replace("EPOCHS", str(epochs)).replace("LANES", str(lanes))
    return made.replace("TOP", top).replace("BODY", body)


def result(
    what: str, script: Any, backend: LocalBackend, folder: Path, workers: int = 1, changes: str = "", **more: Any
) -> tuple[Report, Any, list[Any], list[dict[str, Any]]]:
    """Report, what the script saved, what its virtual workers saw, and the step events."""
    folder.mkdir(exist_ok=True)
    out, events = folder / "out", []
    settings = RunSettings(
        script=script(what, name=f"{folder.name}.py"),
        args=[str(out)],
        virtual=more.pop("virtual", 4),
        workers=workers,
        changes=parse_changes(changes),
        run_dir=folder / "run",
        ramp=more.pop("ramp", 3),
        **more,
    )
    report = run(settings, events.append, backend=backend)
    seen = [json.loads(line) for path in sorted(folder.glob("out.*")) for line in path.read_text().splitlines()]
    return report, torch.load(out), seen, [e for e in events if e["event"] == "step"]


def assert_every_sample_once(report: Report, seen: list[Any], epochs: int) -> None:
    for row in report.samples:
        assert (row["expected"], row["seen"], row["duplicated"], row["missed"]) == (SAMPLES, SAMPLES, 0, 0)
    assert [row["epoch"] for row in report.samples] == list(range(epochs))
    for epoch in range(epochs):
        assert sorted(y for e, _, _, ys in seen if e == epoch for y in ys) == list(range(SAMPLES))


def sizes(events: list[dict[str, Any]]) -> list[int]:
    return [int(event["log"]["size"]) for event in events]


@pytest.mark.parametrize("lanes", [0, 2])
def test_weak_scaling_cuts_the_rest_of_the_epoch_anew_on_all_workers(
    lanes: int, script: Any, backend: LocalBackend, tmp_path: Path
) -> None:
    """From 2 workers to 4 in the middle of the second epoch, to 1 in the middle of the third."""
    report, out, seen, events = result(
        text(lanes=lanes), script, backend, tmp_path / "job", 2, "10=4,14=1", scaling="weak"
    )
    assert_every_sample_once(report, seen, 4)
    assert sizes(events) == [2] * 10 + [4] * 3 + [4] + [1] * 12 + [1] * 16
    assert [(b["step"], b["total"]) for b in report.batches] == [(10, 16), (14, 4)]
    assert report.scaling == "weak"
    assert [e["log"]["rate"] for e in events][-1] == 0.125
    assert out["schedule"]["_last_lr"] == [0.25]


def test_the_rate_follows_the_batch_step_by_step(script: Any, backend: LocalBackend, tmp_path: Path) -> None:
    _, out, _, events = result(text(), script, backend, tmp_path / "job", 2, "10=4", scaling="weak", ramp=4)
    assert out["rates"][:16] == [0.25] * 11 + [0.3125, 0.375, 0.4375, 0.5, 0.5]
    assert len(out["rates"]) == len(events)


@pytest.mark.parametrize("mode", ["consistent", "strong"])
def test_consistent_and_strong_keep_the_bits_at_any_number_of_workers(
    mode: str, script: Any, backend: LocalBackend, tmp_path: Path
) -> None:
    _, wanted, _, _ = result(text(), script, backend, tmp_path / "fixed", 4)
    report, got, seen, _ = result(text(), script, backend, tmp_path / "job", 1, "5=3,9=2", scaling=mode)
    assert_every_sample_once(report, seen, 4)
    assert torch.equal(got["model"]["weight"], wanted["model"]["weight"])
    assert report.batches == []


DOUBLING = "session.scale_batch(2 ** (epoch // 2), ramp=3)"


def test_a_batch_that_the_script_doubles_has_the_bits_of_plain_torch(
    script: Any, backend: LocalBackend, tmp_path: Path
) -> None:
    """And so at any number of workers: the place in the data decides, not who works on it."""
    report, alone, seen, _ = result(text(DOUBLING), script, backend, tmp_path / "one", 1, virtual=1)
    assert_every_sample_once(report, seen, 4)
    assert torch.equal(alone["model"]["weight"], doubled_by_hand())
    _, wanted, _, _ = result(text(DOUBLING), script, backend, tmp_path / "four", 4)
    report, got, seen, _ = result(text(DOUBLING), script, backend, tmp_path / "job", 1, "5=4,18=2")
    assert_every_sample_once(report, seen, 4)
    assert torch.equal(got["model"]["weight"], wanted["model"]["weight"])
    assert [(b["step"], b["total"]) for b in report.batches] == [(16, 16)]


def doubled_by_hand() -> torch.Tensor:
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.25, momentum=0.9)
    g = torch.Generator().manual_seed(1)
    data = TensorDataset(torch.randn(SAMPLES, 4, generator=g), torch.arange(SAMPLES))
    step = 0
    for epoch in range(4):
        sampler = DistributedSampler(data, 1, 0, shuffle=True, seed=3)
        sampler.set_epoch(epoch)
        for x, _ in DataLoader(data, batch_size=4 if epoch >= 2 else 2, sampler=sampler):
            done = min(1.0, max(0, step - 64) / 3)
            optimizer.param_groups[0]["lr"] = 0.25 * (1.0 + done)
            (0.01 * model(x).square().mean()).backward()
            optimizer.step()
            optimizer.zero_grad()
            step += 1
    return model.weight.detach()


def test_a_checkpoint_inside_a_changed_epoch_goes_on_with_the_same_cut(
    script: Any, backend: LocalBackend, tmp_path: Path
) -> None:
    _, wanted, _, whole = result(
        text(), script, backend, tmp_path / "job", 2, "10=4", scaling="weak", ramp=9,
        checkpoint_dir=tmp_path / "saved", checkpoint_every=12,
    )  # fmt: skip
    _, got, _, rest = result(
        text(), script, backend, tmp_path / "again", 4, scaling="weak", ramp=9, resume=tmp_path / "saved/step-00000012"
    )
    assert sizes(rest) == sizes(whole)[12:]
    assert torch.equal(got["model"]["weight"], wanted["model"]["weight"])
    assert got["rates"] == wanted["rates"][12:]


KILLED = (
    """if number == 1 and session.step == 11 and session.rank == 3: os.kill(os.getpid(), signal.SIGKILL)
        """
    + STEP
)


def test_a_worker_that_is_killed_leaves_no_sample_out_though_the_batch_shrinks(
    script: Any, backend: LocalBackend, tmp_path: Path
) -> None:
    report, _, _, events = result(text(body=KILLED), script, backend, tmp_path / "job", 2, scaling="weak")
    assert [row["missed"] + row["duplicated"] for row in report.samples] == [0, 0, 0, 0]
    assert [row["seen"] for row in report.samples] == [SAMPLES] * 4
    assert sizes(events)[:12] == [2] * 11 + [1]
    assert report.batches[0]["step"] == 11


ALL_KILLED = (
    """if session.step == 20 and sum(n.startswith("out-dead") for n in os.listdir(os.path.dirname(sys.argv[1]))) < 2:
            open(f"{sys.argv[1]}-dead-{number}", "w").close()
            os.kill(os.getpid(), signal.SIGKILL)
        """
    + STEP
)


def test_when_all_are_killed_only_what_is_trained_anew_counts(
    script: Any, backend: LocalBackend, tmp_path: Path
) -> None:
    """The job begins again with the 2 workers it had, so with twice the batch from the first step on."""
    report, _, _, _ = result(text(body=ALL_KILLED), script, backend, tmp_path / "job", 1, "10=2", scaling="weak")
    assert len(list((tmp_path / "job").glob("out-dead-*"))) == 2
    assert [(row["seen"], row["missed"], row["duplicated"]) for row in report.samples] == [(SAMPLES, 0, 0)] * 4


# On more workers, a step takes longer, whatever the batch: only a larger batch is worth having them.
SLOW = (
    """if session.is_last_turn: time.sleep(0.01 * session.workers**3)
        """
    + STEP
)


def test_hybrid_scaling_measures_and_doubles_the_batch_where_workers_would_idle(
    script: Any, backend: LocalBackend, tmp_path: Path
) -> None:
    report, _, seen, events = result(
        text(body=SLOW, epochs=12), script, backend, tmp_path / "job", 1, "30=2", scaling="hybrid"
    )
    assert_every_sample_once(report, seen, 12)
    assert [(b["step"], b["total"]) for b in report.batches] == [(50, 16)]
    assert "hybrid scaling, 1 -> 2 workers" in report.batches[0]["reason"]
    assert set(sizes(events)[:50]) == {2}
    assert set(sizes(events)[50:]) <= {2, 4}  # the last batch of an epoch may hold less


def test_parts_give_the_gradient_of_the_whole_batch(script: Any, backend: LocalBackend, tmp_path: Path) -> None:
    in_parts = """for weight, (px, py) in session.parts((x, y)):
            (weight * 0.01 * model(px).square().mean()).backward()
        """ + STEP.split("\n", 1)[1].strip()
    big = "session.scale_batch(3, ramp=0)"
    _, whole, _, events = result(text(big), script, backend, tmp_path / "whole", 2)
    assert 6 in sizes(events)
    report, parts, seen, _ = result(text(big, in_parts), script, backend, tmp_path / "parts", 2, "4=3", largest_batch=4)
    assert_every_sample_once(report, seen, 4)
    torch.testing.assert_close(parts["model"]["weight"], whole["model"]["weight"])
    _, same, _, _ = result(text(big, in_parts), script, backend, tmp_path / "one", 2, largest_batch=6)
    assert torch.equal(same["model"]["weight"], whole["model"]["weight"])


EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "adabatch.py"


def test_the_example_ends_with_the_same_weights_whether_workers_come_or_not(
    backend: LocalBackend, tmp_path: Path
) -> None:
    found = []
    for workers, ask in ((1, "yes"), (4, "no")):
        out = tmp_path / f"{workers}.json"
        args = ["--epochs", "5", "--every", "2", "--ask", ask, "--out", str(out)]
        settings = RunSettings(script=EXAMPLE, args=args, virtual=4, workers=workers, run_dir=tmp_path / str(workers))
        report = run(settings, backend=backend)
        assert [(b["step"], b["total"]) for b in report.batches] == [(88, 64), (132, 128)]
        assert not any(row["duplicated"] + row["missed"] for row in report.samples)
        found.append(json.loads(out.read_text()))
    assert found[0] == found[1]
    assert found[0]["accuracy"] > 0.8


def test_a_script_may_ask_for_workers(script: Any, backend: LocalBackend, tmp_path: Path) -> None:
    body = STEP + "\n        if session.workers == 3: session.stop('they came')\n        time.sleep(0.002)"
    report, _, _, _ = result(
        text("session.request_workers(3)", body, epochs=100_000), script, backend, tmp_path / "job", 1
    )
    assert [g.workers for g in report.generations] == [1, 3]


def test_a_script_is_told_what_was_refused(script: Any, backend: LocalBackend, tmp_path: Path) -> None:
    answers = []
    settings = RunSettings(
        script=script(text("session.request_workers(1)", epochs=30)), args=[str(tmp_path / "out")], virtual=4,
        workers=2, minimum=2, run_dir=tmp_path / "run",
    )  # fmt: skip
    with Run(settings, answers.append, backend) as job:
        job.to_end()
    refused = [e for e in answers if e["event"] == "script_answered"]
    assert refused
    assert not any(e["accepted"] for e in refused)
    assert "fewer than the job's minimum of 2" in refused[0]["reason"]


@pytest.mark.parametrize(
    ("top", "body", "sentence"),
    [
        ("session.request_workers(9)", STEP, "takes 1 to 4 workers"),
        (
            "session.request_workers(session.size / 2)",
            STEP,
            "request_workers(2.0): workers are counted in whole numbers",
        ),
        ("session.scale_batch(0)", STEP, "needs a number above 0"),
        ("pass", "session.scale_batch(2)", "call it above that loop"),
    ],
)
def test_senseless_wishes_of_a_script_are_refused(
    top: str, body: str, sentence: str, script: Any, concertina: Any, tmp_path: Path
) -> None:
    done = concertina("run", "--workers", 1, script(text(top, body)), tmp_path / "out")
    assert done.returncode == 2
    assert sentence in done.stderr


def test_the_command_says_what_is_not_promised(script: Any, concertina: Any, tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    done = concertina(
        "run", "--workers", 1, "--scaling", "weak", "--report", file, script(text(epochs=1)), tmp_path / "out"
    )
    assert done.returncode == 0
    assert "the promise of equal bits does not hold" in done.stderr
    assert json.loads(file.read_text())["scaling"] == "weak"
    done = concertina("run", "--scaling", "sideways", script(text()), tmp_path / "out")
    assert done.returncode == 2
    assert "not one of consistent, strong, weak, hybrid" in done.stderr
