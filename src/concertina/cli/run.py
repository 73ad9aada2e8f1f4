"""`concertina run`: one job on this machine, to its end."""

import contextlib
import glob
import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import IO, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from concertina.cli.hosts import SeveralHosts, open_backend
from concertina.cli.shared import Script
from concertina.core.checkpoints import checkpoints_in, newest_whole, read_manifest
from concertina.core.errors import JobFailed, UsageError
from concertina.core.messages import EXIT_USAGE
from concertina.report import Report
from concertina.runner import Run, RunSettings, parse_changes, write_json

DEFAULT_VIRTUAL = 4

EXAMPLES = """

[bold]Examples[/bold]

concertina run train.py --epochs 10                      [dim]# 4 virtual workers on what this machine has[/dim]

concertina run --workers 1 --resize "40=4,80=2" train.py [dim]# 1 worker, 4 from step 40 on, 2 from step 80 on[/dim]

concertina run --checkpoint ckpt --checkpoint-every 100 train.py

concertina run --checkpoint ckpt --resume --workers 2 train.py

concertina run --backend ray --workers 6 train.py        [dim]# on the machines of a Ray cluster[/dim]
"""


def run(
    context: typer.Context,
    script: Script,
    virtual: Annotated[
        int | None,
        typer.Option(
            "--virtual",
            "-P",
            help="Virtual workers: the number of DDP processes whose result you want. It decides the result and never "
            f"changes during a job. Default {DEFAULT_VIRTUAL}, or what the checkpoint has.",
        ),
    ] = None,
    workers: Annotated[
        int | None,
        typer.Option("--workers", "-W", help="Processes to start with. Default: one per GPU or core, at most P."),
    ] = None,
    minimum: Annotated[
        int, typer.Option("--min", help="With fewer workers left after a loss, wait for others before training on.")
    ] = 1,
    maximum: Annotated[
        int | None, typer.Option("--max", help="Never more workers than this. Default: P, the virtual workers.")
    ] = None,
    steps: Annotated[int, typer.Option(help="Stop after this many optimizer steps; 0 means when the script ends.")] = 0,
    resize: Annotated[
        str, typer.Option(help='Change the number of workers during training: "STEP=N,STEP=N".', metavar="PLAN")
    ] = "",
    checkpoint: Annotated[Path | None, typer.Option(help="Folder for checkpoints.")] = None,
    checkpoint_every: Annotated[int, typer.Option(help="Steps between checkpoints; 0 means only at the end.")] = 0,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the newest whole checkpoint.")] = False,
    report: Annotated[Path | None, typer.Option(help="Write a JSON report here at the end.")] = None,
    events: Annotated[Path | None, typer.Option(help="Write events here as JSON lines, while training.")] = None,
    level: Annotated[
        str,
        typer.Option(
            help="Determinism: D0 repeatable, D1 the same bits for any number of workers, D2 also for any GPU model."
        ),
    ] = "D1",
    threads: Annotated[
        int, typer.Option(help="torch threads per worker. Part of the result; torchrun uses 1 too.")
    ] = 1,
    reduction: Annotated[
        str,
        typer.Option(
            help="How gradients are summed: auto, shared (memory), ring, or contexts (P gloo contexts; slow)."
        ),
    ] = "auto",
    scaling: Annotated[
        str,
        typer.Option(
            help="What a change of workers does to the batch. consistent: nothing, the bits stay those of DDP. strong: "
            "the total batch stays. weak: it grows with the workers. hybrid: it grows as little as keeps them busy. "
            "With weak and hybrid the result depends on the workers, and the learning rate follows the batch.",
            metavar="MODE",
        ),
    ] = "consistent",
    ramp: Annotated[
        int, typer.Option(help="Steps in which the learning rate follows a change of the batch (weak, hybrid).")
    ] = 100,
    largest_batch: Annotated[
        int, typer.Option(help="Samples that a device takes at once, for scripts that use session.parts(); 0: any.")
    ] = 0,
    run_dir: Annotated[
        Path | None, typer.Option(help="Folder for logs. Default: below the user's state folder.")
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="Only what the script itself prints.")] = False,
    backend: Annotated[
        str,
        typer.Option(
            help="Where workers run. local: this machine. ray: the machines of the Ray cluster that this one belongs "
            "to, with script and checkpoints under the same paths on all of them.",
            metavar="NAME",
        ),
    ] = "local",
) -> None:
    """Train a script on this machine, on any number of workers, with the bits that DDP would give."""
    changes = parse_changes(resize)
    start = _find_checkpoint(checkpoint, resume)
    if start is not None:
        virtual = virtual or read_manifest(start).virtual
    virtual = DEFAULT_VIRTUAL if virtual is None else virtual
    folder = run_dir or _new_run_dir(script)
    existed = folder.exists()
    with open_backend(backend, folder / "logs", threads) as place:
        slots = place.seats.room if place is not None else _slots()
        first = _first_workers(slots, virtual, minimum, maximum) if workers is None else workers
        settings = RunSettings(
            script=script,
            args=context.args,
            virtual=virtual,
            workers=first,
            minimum=minimum,
            maximum=_checked_maximum(maximum, virtual),
            steps=steps,
            changes=changes,
            checkpoint_dir=checkpoint,
            checkpoint_every=checkpoint_every,
            resume=start,
            threads=threads,
            level=level,
            reduction=reduction,
            scaling=scaling,
            ramp=ramp,
            largest_batch=largest_batch,
            run_dir=folder,
        )
        result = _run_and_show(settings, events, steps, quiet, place)
    if result.exit == EXIT_USAGE and not existed:
        shutil.rmtree(folder, ignore_errors=True)
    if report is not None and result.exit != EXIT_USAGE:
        write_json(report, result.to_json())
    if result.exit:
        where = "" if result.exit == EXIT_USAGE else f" (logs: {folder / 'logs'})"
        raise JobFailed(f"{result.error}{where}", result.exit)


run.__doc__ = (run.__doc__ or "") + EXAMPLES


def _run_and_show(
    settings: RunSettings, events: Path | None, steps: int, quiet: bool, place: SeveralHosts | None
) -> Report:
    with contextlib.ExitStack() as stack:
        sink = stack.enter_context(events.open("w")) if events is not None else None
        display = stack.enter_context(Display(steps, quiet, sink))
        job = stack.enter_context(_run_on(place, settings, display))
        display.job = job
        display.warn_of_scaling(settings.scaling)
        job.on_idle = display.forward_output
        stack.enter_context(_interruptible(job))
        result = job.to_end()
        display.forward_output(to_the_end=True)
        display.close_story(result)
        return result


def _run_on(place: SeveralHosts | None, settings: RunSettings, display: "Display") -> Run:
    if place is None:
        return Run(settings, display)
    place.seats.check_room(settings.workers)
    job = Run(settings, display, place.backend, place.seats)
    place.seats.taken = job.seats
    return job


@contextlib.contextmanager
def _interruptible(job: Run) -> Iterator[None]:
    """Ctrl-C and SIGTERM ask the job to stop at a step boundary; a second one ends it at once. SIGUSR1 asks for a
    checkpoint, as batch systems send it some time before they end a job."""

    def ask(number: int, frame: FrameType | None) -> None:
        if number != signal.SIGUSR1:
            job.interrupt()
        elif job.settings.checkpoint_dir is not None:
            job.save_soon()
        else:
            print(
                "concertina: SIGUSR1 asks for a checkpoint, and there is no folder for it (--checkpoint DIR)",
                file=sys.stderr,
            )

    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _find_checkpoint(folder: Path | None, resume: bool) -> Path | None:
    if not resume:
        if folder is not None and folder.is_dir() and checkpoints_in(folder):
            raise UsageError(f"{folder} already holds checkpoints: add --resume to go on, or choose another folder")
        return None
    if folder is None:
        raise UsageError("--resume needs --checkpoint DIR: the folder to resume from")
    found, passed_over = newest_whole(folder)
    for sentence in passed_over:
        print(f"concertina: passed over: {sentence}", file=sys.stderr)
    return found


def _new_run_dir(script: Path) -> Path:
    state = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state")
    stamp = time.strftime("%Y%m%d-%H%M%S")
    return state / "concertina" / "runs" / f"{script.stem}-{stamp}-{os.getpid()}"


def _first_workers(slots: int, virtual: int, minimum: int, maximum: int | None) -> int:
    """As many as there are places, within what the user wants."""
    return max(1, min(max(slots, minimum), maximum or virtual, virtual))


def _checked_maximum(maximum: int | None, virtual: int) -> int:
    if maximum is not None and maximum < 1:
        raise UsageError(f"--max {maximum}: needs 1 to {virtual} (--virtual)")
    return maximum or 0


def _slots() -> int:
    """Places for one worker each: GPUs, or else cores."""
    return len(glob.glob("/dev/nvidia[0-9]*")) or len(os.sched_getaffinity(0))


class Display:
    """The live progress line, the one-line story of each generation, and the script's own output."""

    def __init__(self, steps: int, quiet: bool, sink: IO[str] | None) -> None:
        self.job: Run | None = None
        self._sink = sink
        self._quiet = quiet
        self._console = Console(stderr=True, highlight=False)
        self._progress = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[detail]}"),
            TimeElapsedColumn(),
            console=self._console,
            transient=True,
            disable=quiet or not self._console.is_terminal,
        )
        self._task: TaskID = self._progress.add_task("starting", total=steps or None, detail="")
        self._shown = 0  # the worker whose output is shown: the one that runs virtual worker 0
        self._read = 0  # bytes of its log already shown

    def __enter__(self) -> "Display":
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def __call__(self, event: Mapping[str, Any]) -> None:
        if self._sink is not None:
            self._sink.write(json.dumps(event) + "\n")
            self._sink.flush()
        kind = event["event"]
        if kind == "generation_started":
            self._follow_main(event["members"][0])
            self._say(f"step {event['step']}: {event['reason']}")
            self._progress.update(self._task, description=f"{event['workers']} workers")
        elif kind == "step":
            values = "  ".join(f"{name} {value:.4g}" for name, value in event["log"].items())
            self._progress.update(self._task, completed=event["step"], detail=f"epoch {event['epoch']}  {values}")
        elif kind == "gpu_mix":
            verdict = "may mix GPU models" if event["may_mix"] else "must stay on one GPU model"
            self._say(f"the model {verdict}: {event['reason']}")
        elif kind == "batch":
            self._say(f"step {event['step']}: the total batch is {event['total']} from here on: {event['reason']}")
        elif kind == "script_answered" and not event["accepted"]:
            self._say(f"the script's wish for workers was refused: {event['reason']}")
        elif kind in ("worker_lost", "change_abandoned", "change_paused"):
            self._say(f"step {event.get('step', '')}: {event['reason']}" if "step" in event else event["reason"])
        elif kind == "checkpoint":
            self._say(f"step {event['step']}: checkpoint {event['path']}")
        if kind in ("step", "worker_exited", "epoch"):
            self.forward_output()

    def _follow_main(self, worker: int) -> None:
        """Virtual worker 0 may live elsewhere now; what its new worker printed before is not shown."""
        if worker == self._shown or self.job is None:
            return
        self.forward_output(to_the_end=True)
        path = self.job.log_path(worker)
        self._shown, self._read = worker, path.stat().st_size if path.exists() else 0

    def forward_output(self, to_the_end: bool = False) -> None:
        """Shows what the main worker's script has printed since: whole lines, and at the end what is left."""
        if self.job is None:
            return
        path = self.job.log_path(self._shown)
        if not path.exists():
            return
        with path.open("rb") as file:
            file.seek(self._read)
            text = file.read()
        whole = len(text) if to_the_end else text.rfind(b"\n") + 1
        if whole:
            self._read += whole
            sys.stdout.write(text[:whole].decode(errors="replace"))
            sys.stdout.flush()

    def _say(self, text: str) -> None:
        if not self._quiet:
            self._console.print(f"[dim]concertina[/dim] {text}", soft_wrap=True)

    def warn_of_scaling(self, scaling: str) -> None:
        if scaling in ("weak", "hybrid"):
            self._say(
                f"--scaling {scaling}: the batch follows the number of workers, so the promise of equal bits does not "
                "hold; every sample is still trained once per epoch"
            )
        elif scaling == "strong":
            self._say(
                "--scaling strong: equal bits are not promised (today virtual workers cut the same total batch in the "
                "same way as --scaling consistent)"
            )

    def close_story(self, report: Report) -> None:
        if report.exit:
            return
        pauses = [g.stop_s for g in report.generations[1:]]
        changed = f", {len(pauses)} changes (longest pause {max(pauses):.2f} s)" if pauses else ""
        self._say(f"finished: {report.steps} steps, {report.virtual} virtual workers, {report.reduction}{changed}")
