"""What a script asks of its session keeps its meaning at every number of workers and across changes."""

import json
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from concertina.backends.local import LocalBackend
from concertina.runner import Report, RunSettings, parse_changes, run
from conftest import SMALL

PREPARED = SMALL + "model, optimizer = session.prepare(model, optimizer)\nloader = session.loader(data, batch_size=4)\n"
STEP = ["loss = (model(x) - y).square().mean()", "loss.backward()", "optimizer.step()", "optimizer.zero_grad()"]
SAVE = """
if session.is_main:
    torch.save({"model": model.state_dict(), "step": session.step, "extra": extra}, sys.argv[1])
"""


def job(*lines: str, head: str = "", top: str = "pass", after: str = "pass", extra: str = "0") -> str:
    """A script whose loop body is a step and then `lines`."""
    inside = "".join(f"        {line}\n" for line in [*STEP, *lines])
    loop = f"for epoch in session.epochs(3):\n    {top}\n    for x, y in loader:\n{inside}    {after}\n"
    return PREPARED + head + loop + f"extra = {extra}\n" + SAVE


def result(text: str, script, backend: LocalBackend, folder: Path, workers: int, changes: str = "", **more) -> tuple:
    name = f"{workers}-{changes}".replace(",", "_")
    out = folder / f"{name}.pt"
    settings = RunSettings(
        script=script(text, name=f"{name}.py"),
        args=[str(out)],
        virtual=4,
        workers=workers,
        changes=parse_changes(changes),
        run_dir=folder / f"run-{name}",
        **more,
    )
    report: Report = run(settings, backend=backend)
    return report, torch.load(out)


def equal(a: object, b: object) -> bool:
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(equal(a[k], b[k]) for k in a)
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


AVERAGE = """
average = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))
session.register("average", average)
"""

SAME_AT_ANY_SIZE = {
    "a stop asked for in the step before a change": job("if loader.index == 1 and epoch == 0: session.stop('enough')"),
    "a stop asked for by one virtual worker": job("if session.rank == 3 and session.step == 5: session.stop('enough')"),
    "a stop asked for by one that leaves after that step": job(
        "if session.rank == 3 and session.step == 4: session.stop('enough')"
    ),
    "an average of the weights": job(
        "average.update_parameters(model)", head=AVERAGE, extra="{k: v for k, v in average.state_dict().items()}"
    ),
    "an average that is registered before prepare()": job(
        "average.update_parameters(model)", extra="{k: v for k, v in average.state_dict().items()}"
    ).replace("model, optimizer = session.prepare", AVERAGE + "model, optimizer = session.prepare"),
    "something done once per step": job(
        "if session.is_last_turn: count += 1", head="count = torch.zeros(())\n"
        "class Count:\n    def state_dict(self): return {'n': count}\n"
        "    def load_state_dict(self, s): count.copy_(s['n'])\n"
        "session.register('count', Count())\n",
        extra="count",
    ),
    "the learning rate changed above the inner loop": job(top="optimizer.param_groups[0]['lr'] *= 0.5"),
    "evaluation between the loops": job(
        after="with torch.no_grad(), torch.random.fork_rng(): model.eval()(torch.randn(4, 8)); model.train()"
    ),
    "evaluation that draws": job(
        after="with session.aside(): [0 for _ in torch.utils.data.DataLoader(data, shuffle=True)]"
    ),
    "accumulated gradients cleared between epochs": job(after="model.zero_grad()").replace(
        "        loss = ", "        if loader.index == 3: session.no_sync().__enter__()\n        loss = "
    ).replace("        optimizer.step()\n        optimizer.zero_grad()\n",
              "        if loader.index < 3: optimizer.step(); optimizer.zero_grad()\n"
              "        session.engine.sync_allowed = True\n"),
    "processes of the script's own": job(
        head="import multiprocessing as mp\nwith mp.get_context('fork').Pool(2) as pool: pool.map(abs, [1, 2])\n"
    ),
    "random numbers drawn before the first loop": job(head="torch.rand(3)\n"),
    "two passes in an epoch": job(after="[None for x, y in ()]").replace(
        "    for x, y in loader:\n", "    for x, y in __import__('itertools').chain(loader, loader):\n"
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", sorted(SAME_AT_ANY_SIZE))
def test_a_script_means_the_same_at_any_size(what: str, script, backend: LocalBackend, tmp_path: Path) -> None:
    text = SAME_AT_ANY_SIZE[what]
    _, wanted = result(text, script, backend, tmp_path, 4)
    for workers, changes in ((1, ""), (2, "2=3,5=1,6=4")):
        _, got = result(text, script, backend, tmp_path, workers, changes)
        assert equal(got, wanted), f"{workers} workers, {changes or 'fixed'}"


def test_layers_may_be_frozen_for_an_evaluation_right_after_a_change(script, backend, tmp_path: Path) -> None:
    evaluation = "model.requires_grad_(False)\n    for x, y in loader:\n        with torch.no_grad(): model(x)\n"
    text = job(after=f"{evaluation}    model.requires_grad_(True)")
    _, wanted = result(text, script, backend, tmp_path, 4)
    _, got = result(text, script, backend, tmp_path, 1, "4=2,8=1")
    assert equal(got, wanted)


def test_a_checkpoint_asked_for_by_any_virtual_worker_is_written_and_resumes(
    script, backend: LocalBackend, tmp_path: Path
) -> None:
    saved = tmp_path / "saved"
    text = job(f"if session.rank == 3 and session.step == 4: session.checkpoint({str(saved)!r})")
    _, wanted = result(text, script, backend, tmp_path, 2)
    manifest = json.loads((saved / "manifest.json").read_text())
    assert (manifest["step"], manifest["virtual"]) == (6, 4)
    (tmp_path / "again").mkdir()
    _, got = result(text, script, backend, tmp_path / "again", 3, resume=saved)
    assert equal(got, wanted)


def test_a_checkpoint_asked_for_in_the_last_step_is_written(script, backend: LocalBackend, tmp_path: Path) -> None:
    saved = tmp_path / "saved"
    text = job(f"if session.step == 2: session.checkpoint({str(saved)!r})")
    result(text, script, backend, tmp_path, 2, steps=3)
    assert json.loads((saved / "manifest.json").read_text())["step"] == 3


def test_a_checkpoint_asked_for_by_one_that_leaves_is_written(script, backend: LocalBackend, tmp_path: Path) -> None:
    saved = tmp_path / "saved"
    text = job(f"if session.rank == 3 and session.step == 2: session.checkpoint({str(saved)!r})")
    result(text, script, backend, tmp_path, 2, "3=1")
    assert json.loads((saved / "manifest.json").read_text())["step"] == 3


DIES = "import os; session.workers == 2 and os.kill(os.getpid(), 9)"


def test_a_stop_between_two_epochs_outlives_the_worker_that_asked_for_it(script, backend, tmp_path: Path) -> None:
    text = job(after=f"if session.is_main and epoch == 0: session.stop('enough'); {DIES}")
    _, wanted = result(text, script, backend, tmp_path, 1)
    _, got = result(text, script, backend, tmp_path, 2)
    assert wanted["step"] < 12
    assert equal(got, wanted)


def test_a_stop_outlives_the_worker_that_asked_for_it(script, backend: LocalBackend, tmp_path: Path) -> None:
    """Once in the step that it is lost in, and that is run again; once in the one before."""
    for asked in (4, 5):
        text = job(f"if session.rank == 3 and session.step == {asked}: session.stop('enough')")
        text = text.replace(
            "        loss = ", f"        if session.rank == 3 and session.step == 5: {DIES}\n        loss = "
        )
        (tmp_path / str(asked)).mkdir()
        _, wanted = result(text, script, backend, tmp_path / str(asked), 1)
        _, got = result(text, script, backend, tmp_path / str(asked), 2)
        assert got["step"] == asked + 2
        assert equal(got, wanted)


DONE_IN_AN_EARLIER_EPOCH = {
    "a layer thaws": job(top="if epoch == 1: model[0].requires_grad_(True)").replace(
        "prepare(model, optimizer)\n",
        "prepare(model, optimizer, find_unused_parameters=True)\nmodel[0].requires_grad_(False)\n",
    ),
    "a layer is put to evaluation": job(top="if epoch == 1: model[3].eval()").replace(
        "model, optimizer = session.prepare", "model.append(nn.Dropout(0.5))\nmodel, optimizer = session.prepare"
    ),
}


@pytest.mark.parametrize("what", sorted(DONE_IN_AN_EARLIER_EPOCH))
def test_what_was_done_to_the_model_in_an_earlier_epoch_is_so_for_newcomers_and_after_a_resume(
    what: str, script, backend: LocalBackend, tmp_path: Path
) -> None:
    text = DONE_IN_AN_EARLIER_EPOCH[what]
    saved = tmp_path / "saved"
    _, wanted = result(text, script, backend, tmp_path, 1, checkpoint_dir=saved, checkpoint_every=10)
    report, got = result(text, script, backend, tmp_path, 1, "2=2,10=4")
    assert [generation.workers for generation in report.generations] == [1, 2, 4]
    assert equal(got, wanted)
    (tmp_path / "again").mkdir()
    _, got = result(text, script, backend, tmp_path / "again", 1, resume=saved / "step-00000010")
    assert equal(got, wanted)


def test_logging_never_ends_a_run(script, backend: LocalBackend, tmp_path: Path) -> None:
    odd = "session.log(phase='train', vector=torch.ones(3), none=None, **{f'n{i}': i for i in range(300)})"
    report, _ = result(job(odd), script, backend, tmp_path, 2)
    assert report.steps == 12


def test_a_job_of_one_virtual_worker_may_break(script, backend: LocalBackend, tmp_path: Path) -> None:
    text = job("if loader.index == 1: break")
    settings = RunSettings(script=script(text), args=[str(tmp_path / "x.pt")], run_dir=tmp_path / "run")
    assert run(settings, backend=backend).steps == 6


def test_a_body_that_breaks_in_the_rehearsal_of_a_resume_loses_no_epoch(script, backend, tmp_path: Path) -> None:
    text, saved = job("if session.rehearsing: break"), tmp_path / "saved"
    settings = RunSettings(script=script(text), args=[str(tmp_path / "x.pt")], run_dir=tmp_path / "run")
    whole = run(replace(settings, checkpoint_dir=saved, checkpoint_every=16), backend=backend)
    assert whole.steps == 48, "16 an epoch"
    wanted = torch.load(tmp_path / "x.pt")
    again = replace(settings, resume=saved / "step-00000016", run_dir=tmp_path / "again")
    assert run(again, backend=backend).steps == 48
    assert equal(torch.load(tmp_path / "x.pt"), wanted)


def test_what_a_script_started_ends_with_its_worker(script, backend: LocalBackend, tmp_path: Path) -> None:
    started = (
        "import subprocess\nchild = subprocess.Popen(['sleep', '600'])\n"
        "open(sys.argv[1] + '.pid', 'w').write(str(child.pid))\n"
    )
    result(job(head=started), script, backend, tmp_path, 1)
    pid = int((tmp_path / "1-.pt.pid").read_text())
    for _ in range(100):
        if not Path(f"/proc/{pid}").exists() or "Z" in Path(f"/proc/{pid}/stat").read_text().split()[2]:
            return
        time.sleep(0.05)
    pytest.fail(f"process {pid} of the script is still there")


NOTES = (
    "note = dict(by=session.rehearsing, main=session.is_main, last=session.is_last_turn)",
    "print(json.dumps(note | dict(drawn=torch.rand(1).item())), file=seen, flush=True)",
    "if session.rehearsing: session.stop('never'); session.checkpoint('nowhere')",
)


def test_a_newcomer_rehearses_the_loops_body_once_and_nothing_comes_of_it(script, backend, tmp_path: Path) -> None:
    """Two newcomers; the job draws random numbers in its body and ends with the bits that it has without them."""
    head = "import json, os\nsession.seed(3)\nseen = open(f'{sys.argv[1]}.{os.getpid()}', 'a')\n"
    text = job(*NOTES, head=head)
    _, alone = result(text, script, backend, tmp_path, 1)
    report, elastic = result(text, script, backend, tmp_path, 1, "4=3")
    assert equal(alone, elastic)
    assert [row.workers for row in report.generations] == [1, 3]
    by_worker = [[json.loads(line) for line in path.read_text().splitlines()] for path in tmp_path.glob("1-4=3.pt.*")]
    rehearsed = [[note for note in notes if note["by"]] for notes in by_worker]
    assert sorted(map(len, rehearsed)) == [0, 1, 1]
    for (note,) in filter(None, rehearsed):
        assert (note["main"], note["last"]) == (False, False)
    assert not (tmp_path / "nowhere").exists()
