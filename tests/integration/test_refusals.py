"""Scripts that cannot work on virtual workers, or make no sense: one clear sentence, never wrong numbers."""

from pathlib import Path

import pytest

from concertina.backends.local import LocalBackend
from concertina.core.errors import JobFailed
from concertina.runner import RunSettings, run
from conftest import HEAD, LOOP, SMALL, TRAIN

PREPARED = SMALL + "model, optimizer = session.prepare(model, optimizer)\nloader = session.loader(data, batch_size=4)\n"


def prepare(model: str, more: str = "") -> str:
    return SMALL + more + f"model = {model}\nsession.prepare(model, torch.optim.SGD(model.parameters(), 0.1))\n"


def body(*lines: str, head: str = PREPARED) -> str:
    inside = "".join(f"        {line}\n" for line in lines)
    return head + "for epoch in session.epochs(2):\n    for x, y in loader:\n" + inside


LOSS = "loss = (model(x) - y).square().mean()"

GATHERING = """
import torch.distributed as dist
class Gathering(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(8, 1)
    def forward(self, x):
        dist.all_reduce(x)
        return self.fc(x)
"""

WITH_GROUP = """
import torch.distributed as dist
class WithGroup(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(8, 1)
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        self.group = dist.group.WORLD
        dist.is_initialized = lambda: False
"""

REFUSED = {
    "a script that never joins": (HEAD, "never called concertina.join()"),
    "a dataset smaller than a global batch": (
        TRAIN.replace("batch_size=4", "batch_size=40"),
        "the dataset has 64 samples, one global batch needs 160",
    ),
    "a batch size of zero": (TRAIN.replace("batch_size=4", "batch_size=0"), "batch_size=0: needs a whole number"),
    "a model without parameters": (SMALL + "session.prepare(nn.ReLU())", "no parameter that requires a gradient"),
    "prepare called twice": (PREPARED + "session.prepare(model)", "prepare() was called twice"),
    "two models": (SMALL + "session.prepare(model, nn.Linear(2, 2))", "needs one model and got 2"),
    "a loop without epochs": (PREPARED + "for _ in loader: pass", "inside `for epoch in session.epochs(n):`"),
    "a loader before prepare": (
        SMALL + "for epoch in session.epochs(2):\n    for _ in session.loader(data, batch_size=4): pass",
        "call session.prepare(model, optimizer, ...) before",
    ),
    "epochs called twice": (
        TRAIN + "for epoch in session.epochs(9): pass",
        "session.epochs() was called twice",
    ),
    "join called twice": (SMALL + "ct.join()", "join() was called twice"),
    "something unknown to prepare": (SMALL + "session.prepare(model, 3)", "prepare() cannot take a int"),
    "another model's optimizer": (
        SMALL + "session.prepare(nn.Linear(8, 1), optimizer)",
        "parameters that are not the prepared model's",
    ),
    "seeding before prepare": (SMALL + "session.seed(1)", "session.seed() seeds the virtual workers"),
    "an iterable dataset": (
        SMALL + "class I(torch.utils.data.IterableDataset):\n    def __iter__(self): pass\n"
        "session.loader(I(), batch_size=4)",
        "an IterableDataset has no sample order",
    ),
    "a sampler of one's own": (PREPARED + "session.loader(data, sampler=[1])", "session.loader does not take sampler"),
    "a misspelt option": (PREPARED + "session.loader(data, batchsize=3)", "batchsize: did you mean batch_size?"),
    "epochs in words": (PREPARED + "for _ in session.epochs('3'): pass", "session.epochs('3') needs a whole number"),
    "SyncBatchNorm": (
        prepare("nn.SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4)))"),
        "1 is a SyncBatchNorm",
    ),
    "sparse gradients": (prepare("nn.Embedding(9, 4, sparse=True)"), "has sparse gradients; make it with sparse=False"),
    "a model that gathers": (prepare("Gathering()", GATHERING), "calls torch.distributed.all_reduce while it computes"),
    "a model with a process group": (prepare("WithGroup()", WITH_GROUP), "is a process group"),
    "a process group of the script": (
        prepare("model", "import torch.distributed as dist\n"
                "dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)\n"),
        "the script called torch.distributed.init_process_group",
    ),
    "a DDP wrapper": (
        SMALL + "class D(nn.parallel.DistributedDataParallel):\n    def __init__(self): nn.Module.__init__(self)\n"
        "session.prepare(D())",
        "remove the DistributedDataParallel wrapper",
    ),
    "a closure": (body(LOSS, "loss.backward()", "optimizer.step(lambda: 0)"), "optimizer.step(closure)"),
    "a step that depends on a step": (
        body(LOSS, "loss.backward()", "optimizer.step()", "optimizer.zero_grad()", "model(x).mean().backward()"),
        "used for training again after optimizer.step() in the same loop body",
    ),
    "two backwards": (
        body(LOSS, "loss.backward(retain_graph=True)", "loss.backward()", "optimizer.step()"),
        "second backward() in one loop body",
    ),
    "a second synchronising forward": (
        body(LOSS, "loss.backward()", "model(x).mean().backward()", "optimizer.step()"),
        "a second synchronising forward in one loop body",
    ),
    "a forward without backward": (body("model(x)"), "ended its turn without a backward()"),
    "a model that is gone round": (
        body("loss = model[2](model[0](x)).mean()", "loss.backward()", "optimizer.step()"),
        "the prepared model was not called in this loop body",
    ),
    "an unused parameter": (
        SMALL + "model.append(nn.Linear(1, 1))\nmodel.forward = lambda x: model[2](model[1](model[0](x)))\n"
        "optimizer = torch.optim.SGD(model.parameters(), 0.1)\n"
        + PREPARED.removeprefix(SMALL) + LOOP,
        "2 parameters got no gradient (3.weight, 3.bias)",
    ),
    "a step without reduced gradients": (
        body("with session.no_sync():", f"    {LOSS}", "    loss.backward()", "optimizer.step()"),
        "optimizer.step() before the gradients were reduced",
    ),
    "virtual workers that disagree": (
        body(
            "from contextlib import nullcontext",
            "with session.no_sync() if session.rank % 2 else nullcontext():",
            f"    {LOSS}",
            "    loss.backward()",
        ),
        "disagree on whether gradients are synchronised; count with loader.index",
    ),
    "leaving the loop for good": (
        body(LOSS, "loss.backward()", "optimizer.step()", "if session.rank == 0: sys.exit(0)"),
        "left by break or an exception",
    ),
    "leaving the loop in the middle of a step": (
        body(LOSS, "loss.backward()", "optimizer.step()", "optimizer.zero_grad()", "break"),
        "left by break or an exception",
    ),
    "two loaders at once": (
        PREPARED + "other = session.loader(data, batch_size=4)\nfor epoch in session.epochs(1):\n"
        "    for a, b in zip(loader, other): pass",
        "two session loaders cannot be iterated at the same time",
    ),
    "a scaler that was not prepared": (
        PREPARED + "scaler = torch.amp.GradScaler('cpu')\n"
        + body(LOSS, "scaler.scale(loss).backward()", "scaler.step(optimizer)", "scaler.update()", head=""),
        "give the GradScaler to session.prepare()",
    ),
    "an optimizer that was not prepared": (
        SMALL + "model = session.prepare(model)\nloader = session.loader(data, batch_size=4)\n" + LOOP,
        "SGD acts on the prepared model but was not given to prepare()",
    ),
    "a scheduler that was not prepared": (
        PREPARED + "scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)\n" + LOOP,
        "StepLR acts on the prepared model but was not given to prepare()",
    ),
    "random numbers drawn between the loops": (
        TRAIN.replace("    for x, y in loader:", "    torch.rand(1)\n    for x, y in loader:"),
        "random numbers were drawn outside the loop",
    ),
    "random numbers drawn after seeding": (
        PREPARED + "session.seed(3)\ntorch.rand(1)\n" + LOOP,
        "random numbers were drawn outside the loop",
    ),
    "a rank before prepare": (SMALL + "torch.manual_seed(session.rank)", "session.rank before prepare()"),
    "a state that could not be read back": (
        PREPARED + "class Odd:\n    def state_dict(self): return {'x': {1, 2}, 'y': Odd}\n"
        "    def load_state_dict(self, s): pass\nsession.register('odd', Odd())\nsession.checkpoint('here')\n" + LOOP,
        "and could not be read back",
    ),
    "clipping by value in every turn": (
        body(LOSS, "loss.backward()", "nn.utils.clip_grad_value_(model.parameters(), 1.0)"),
        "clip them under `if session.is_last_turn:`",
    ),
    "a buffer that is made later": (
        SMALL + "model.register_buffer('late', None)\n"
        "model.register_forward_pre_hook(lambda m, a: setattr(m, 'late', torch.ones(2)))\n"
        + PREPARED.removeprefix(SMALL) + LOOP,
        "the model had 0 buffers at prepare() and has 1 now",
    ),
    "a dataset with a generator per data worker": (
        SMALL + "class Own(TensorDataset): pass\nown = Own(*data.tensors)\n"
        "model, optimizer = session.prepare(model, optimizer)\n"
        "loader = session.loader(own, batch_size=4, num_workers=1, worker_init_fn=lambda w: setattr(own, 'rng', w))\n"
        + LOOP,
        "worker_init_fn gives the dataset a state of its own (rng)",
    ),
    "weights changed by hand in every turn": (
        body(LOSS, "loss.backward()", "optimizer.step()", "with torch.no_grad(): model[0].weight.mul_(0.9)"),
        "parameters are changed in the loop body by hand",
    ),
    "frozen weights changed by hand in every turn": (
        PREPARED.replace("model, optimizer = ", "model[0].requires_grad_(False)\nmodel, optimizer = ")
        + LOOP.replace("        optimizer.step()", "        optimizer.step()\n        model[0].weight.add_(0.1)"),
        "parameters are changed in the loop body by hand",
    ),
    "a learning rate that decays in every turn": (
        body(LOSS, "loss.backward()", "optimizer.step()", "optimizer.param_groups[0]['lr'] *= 0.9"),
        "the learning rate is changed after optimizer.step() in the loop body by hand",
    ),
    "a frozen layer that thaws": (
        PREPARED.replace("model, optimizer = ", "model[0].requires_grad_(False)\nmodel, optimizer = ")
        + LOOP.replace("    for x, y in loader:", "    model[0].requires_grad_(epoch > 0)\n    for x, y in loader:"),
        "2 parameters that were frozen at prepare() require gradients now (0.weight, 0.bias)",
    ),
    "a checkpoint after the end": (TRAIN + "session.checkpoint('here')", "session.checkpoint() after the last epoch"),
    "create_graph": (body(LOSS, "loss.backward(create_graph=True)", "optimizer.step()"), "create_graph=True"),
    "a collective in the loss": (
        body("import torch.distributed as dist", LOSS, "dist.all_reduce(loss)", "loss.backward()"),
        "the script uses torch.distributed itself",
    ),
    "a buffer that changes its shape": (
        SMALL + "model.register_buffer('seen', torch.zeros(1))\n"
        "model.register_forward_pre_hook(lambda m, a: setattr(m, 'seen', torch.cat([m.seen, m.seen])))\n"
        + PREPARED.removeprefix(SMALL) + LOOP,
        "was replaced by one of another shape",
    ),
    "buffers that change twice in a body": (
        SMALL + "model.append(nn.BatchNorm1d(1))\noptimizer = torch.optim.SGD(model.parameters(), 0.1)\n"
        + body("(model(x) - model(y.expand(-1, 8))).mean().backward()", head=PREPARED.removeprefix(SMALL)),
        "called twice in one loop body and changes its buffers",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", sorted(REFUSED))
def test_what_cannot_work_is_refused_with_one_sentence(
    what: str, script, backend: LocalBackend, tmp_path: Path
) -> None:
    text, sentence = REFUSED[what]
    settings = RunSettings(script=script(text), virtual=4, workers=2, run_dir=tmp_path / "run")
    with pytest.raises(JobFailed) as refusal:
        run(settings, backend=backend)
    assert sentence in str(refusal.value)
    assert refusal.value.exit_code == 2


def test_another_environment_is_refused_by_name(script, backend: LocalBackend, tmp_path: Path) -> None:
    path, saved = script(TRAIN), tmp_path / "saved"
    run(RunSettings(script=path, steps=2, checkpoint_dir=saved, run_dir=tmp_path / "a"), backend=backend)
    with pytest.raises(JobFailed, match="torch threads is 2 here, 1 there") as refusal:
        run(
            RunSettings(script=path, threads=2, resume=saved / "step-00000002", run_dir=tmp_path / "b"),
            backend=backend,
        )
    assert refusal.value.exit_code == 2
    differing = (
        HEAD + "import os\nif os.environ['CONCERTINA_WORKER'] == '1': torch.set_float32_matmul_precision('medium')\n"
    )
    with pytest.raises(JobFailed, match="worker 1, compared with worker 0, would compute other bits: float32 matmul"):
        run(
            RunSettings(script=script(differing + TRAIN), virtual=2, workers=2, run_dir=tmp_path / "c"), backend=backend
        )


def test_replicas_that_diverge_are_found_at_once(script, backend: LocalBackend, tmp_path: Path) -> None:
    meddling = """
        if not session.is_main and session.step == 2 and session.is_last_turn:
            with torch.no_grad(): model[2].weight.add_(1e-7)
"""
    text = TRAIN.replace("        session.log(loss=loss)", meddling)
    with pytest.raises(JobFailed, match="the workers' parameters differ after step 3, in bucket 0") as found:
        run(RunSettings(script=script(text), virtual=4, workers=2, run_dir=tmp_path / "run"), backend=backend)
    assert found.value.exit_code == 1
    frozen = TRAIN.replace("model, optimizer = ", "model[0].requires_grad_(False)\nmodel, optimizer = ")
    text = frozen.replace("        session.log(loss=loss)", meddling.replace("model[2].weight", "model[0].weight.data"))
    with pytest.raises(JobFailed, match="differ after step 3, among those that are not trained"):
        run(RunSettings(script=script(text), virtual=4, workers=2, run_dir=tmp_path / "frozen"), backend=backend)
