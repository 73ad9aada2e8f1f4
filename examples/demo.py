"""Trains the digits on 1, then 4, then 2, then 3 workers, and shows that plain DDP gives the same model.

`make demo` runs it. It ends with an error if a single bit differs.
"""

import argparse
import os
import shutil
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import matplotlib as mpl
import torch
from rich.console import Console
from rich.table import Table

from concertina.core.errors import ConcertinaError
from concertina.core.placement import VirtualPlacement
from concertina.runner import RunSettings, parse_changes, run
from digits import evaluate, make_model

HERE = Path(__file__).resolve().parent
VIRTUAL = 4
FIRST, CHANGES = 1, "30=4,80=2,130=3"


def train_elastically(args, weights, console):
    """Runs digits.py under concertina; returns its report and the loss of virtual worker 0 by step."""
    losses = {}
    workers = FIRST
    with console.status("starting") as status:

        def listen(event):
            nonlocal workers
            if event["event"] == "generation_started":
                workers = event["workers"]
            elif event["event"] == "step":
                losses[event["step"]] = event["log"]["loss"]
                count = "1 worker" if workers == 1 else f"{workers} workers"
                status.update(f"training on {count}, step {event['step']}, loss {event['log']['loss']:.3f}")

        settings = RunSettings(
            script=HERE / "digits.py",
            args=["--epochs", str(args.epochs), "--out", str(weights)],
            virtual=VIRTUAL,
            workers=FIRST,
            changes=parse_changes(CHANGES),
            run_dir=args.out / "run",
        )
        return run(settings, listen), losses


def train_with_ddp(args, weights, console):
    """Runs the twin under torchrun, one process per virtual worker."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(VIRTUAL)]
    command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0"]  # a free port, this machine only
    command += [str(HERE / "digits_ddp.py"), "--epochs", str(args.epochs), "--out", str(weights)]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    with console.status(f"training with DistributedDataParallel on {VIRTUAL} processes, for comparison"):
        errors = run_to_end(command, env)
    # The exit code says less than the file: a rank's gloo threads can abort it at exit, when all is saved.
    if not weights.exists():
        raise SystemExit(f"the DDP run failed:\n{errors[-2000:]}")


def run_to_end(command, env):
    """What a command says on standard error; Ctrl-C waits until torchrun has ended its ranks."""
    process = subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    try:
        return process.communicate()[1]
    except KeyboardInterrupt:
        process.terminate()
        process.communicate()
        raise


def different_tensors(ours, theirs):
    """Names of the tensors that differ in any bit (the sign of a zero counts too)."""
    if ours.keys() != theirs.keys():
        return sorted(ours.keys() ^ theirs.keys())
    return [name for name in ours if not torch.equal(_bits(ours[name]), _bits(theirs[name]))]


def _bits(tensor):
    return tensor.reshape(-1).view(torch.uint8)


def show_generations(report, console):
    table = Table(title=f"One job, {report.virtual} virtual workers")
    for heading in ("generation", "steps", "workers", "pause", "reason"):
        table.add_column(heading, justify="left" if heading == "reason" else "right")
    ends = [g.step for g in report.generations[1:]] + [report.steps]
    for g, end in zip(report.generations, ends, strict=True):
        pause = f"{g.stop_s:.1f} s" if g.generation else ""
        table.add_row(str(g.generation), f"{g.step + 1}-{end}", str(g.workers), pause, g.reason)
    console.print(table)


def draw(report, losses, verdict, path):
    """The loss above, and below it which worker ran which virtual workers."""
    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, (top, bottom) = plt.subplots(
        2, 1, sharex=True, figsize=(8, 4.6), height_ratios=[3, 2], layout="constrained"
    )
    steps = sorted(losses)
    top.plot(steps, [losses[s] for s in steps], color="tab:blue", linewidth=1.2)
    top.set(ylabel="loss (virtual worker 0)", ylim=(0, None), title=verdict)
    edges = [*(g.step for g in report.generations), report.steps]
    for g, (start, end) in zip(report.generations, pairwise(edges), strict=True):
        for worker, block in enumerate(VirtualPlacement.blocks(report.virtual, g.workers).workers):
            shade = 0.1 + 0.45 * len(block) / report.virtual
            bottom.broken_barh([(start, end - start)], (worker - 0.4, 0.8), color=plt.cm.Oranges(shade), ec="white")
            names = " ".join(map(str, block))
            bottom.text((start + end) / 2, worker, names, ha="center", va="center", fontsize=9)
        if start:
            top.axvline(start, color="grey", linestyle=":", linewidth=1)
    most = max(g.workers for g in report.generations)
    bottom.set(xlabel="step", ylabel="worker", yticks=range(most), ylim=(most - 0.4, -0.6), xlim=(0, report.steps))
    bottom.set_title("which worker runs which virtual workers", fontsize=10)
    figure.savefig(path, dpi=110)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--out", type=Path, default=Path("demo-output"), help="folder for logs, weights and picture")
    args = parser.parse_args()
    console = Console()
    shutil.rmtree(args.out / "run", ignore_errors=True)
    args.out.mkdir(parents=True, exist_ok=True)
    elastic, ddp = (args.out / name for name in ("elastic.pt", "ddp.pt"))
    ddp.unlink(missing_ok=True)

    report, losses = train_elastically(args, elastic, console)
    show_generations(report, console)
    train_with_ddp(args, ddp, console)
    ours, theirs = torch.load(elastic), torch.load(ddp)
    different = different_tensors(ours, theirs)
    if different:
        console.print(f"[bold red]{len(different)} of {len(ours)} tensors differ from DDP's:[/] {', '.join(different)}")
        return 1

    model = make_model()
    model.load_state_dict(ours)
    way = " → ".join(str(g.workers) for g in report.generations)
    draw(report, losses, f"{way} workers, the same bits as DDP on {VIRTUAL}", args.out / "demo.png")
    console.print(
        f"\nAgainst DistributedDataParallel on {VIRTUAL} processes:\n"
        f"[bold green]all {len(ours)} tensors equal, bit for bit[/].\n"
        f"Test accuracy: {evaluate(model):.1%}. Picture: {args.out / 'demo.png'}\n\n"
        "What next:\n"
        "  the lines that make a DDP script elastic\n"
        "    diff examples/digits_ddp.py examples/digits.py\n"
        "  the same by hand, with other numbers of workers\n"
        '    .venv/bin/concertina run --workers 2 --resize "50=3,90=1" examples/digits.py\n'
        "  is a script of your own elastic, to the bit?\n"
        "    .venv/bin/concertina verify SCRIPT\n"
        "  a cluster with a dashboard, deadlines that are kept, and some jobs to look at\n"
        "    .venv/bin/concertina up --demo",
        highlight=False,
    )
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except ConcertinaError as error:
        sys.exit(f"concertina: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
