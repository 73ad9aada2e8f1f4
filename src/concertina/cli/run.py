"""`concertina run`: one job on this machine, to its end."""

import contextlib
import glob
import os
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import typer

from concertina.cli.hosts import SeveralHosts, open_backend
from concertina.cli.outputs import check_output_file, check_output_folder, check_two_files
from concertina.cli.run_display import Display
from concertina.cli.run_options import (
    DEFAULT_VIRTUAL,
    BackendName,
    Checkpoint,
    CheckpointEvery,
    EventsFile,
    LargestBatch,
    Level,
    Maximum,
    Minimum,
    Quiet,
    Ramp,
    Reduction,
    ReportFile,
    Resize,
    Resume,
    RunDir,
    ScalingMode,
    Steps,
    Threads,
    Virtual,
    Workers,
)
from concertina.cli.shared import Script
from concertina.core.checkpoints import checkpoints_in, newest_whole, read_manifest
from concertina.core.errors import JobFailed, UsageError
from concertina.core.messages import EXIT_USAGE
from concertina.report import Report
from concertina.runner import Run, RunSettings, parse_changes, write_json

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
    virtual: Virtual = None,
    workers: Workers = None,
    minimum: Minimum = 1,
    maximum: Maximum = None,
    steps: Steps = 0,
    resize: Resize = "",
    checkpoint: Checkpoint = None,
    checkpoint_every: CheckpointEvery = 0,
    resume: Resume = False,
    report: ReportFile = None,
    events: EventsFile = None,
    level: Level = "D1",
    threads: Threads = 1,
    reduction: Reduction = "auto",
    scaling: ScalingMode = "consistent",
    ramp: Ramp = 100,
    largest_batch: LargestBatch = 0,
    run_dir: RunDir = None,
    quiet: Quiet = False,
    backend: BackendName = "local",
) -> None:
    """Train a script on this machine, on any number of workers, with the bits that DDP would give."""
    changes = parse_changes(resize)
    check_output_file("--report", report)
    check_output_file("--events", events)
    check_two_files("--report", report, "--events", events)
    check_output_folder("--checkpoint", checkpoint)
    check_output_folder("--run-dir", run_dir)
    start = _find_checkpoint(checkpoint, resume)
    if virtual is None:
        virtual = DEFAULT_VIRTUAL if start is None else read_manifest(start).virtual
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
    refused = result.exit == EXIT_USAGE and result.steps == (0 if start is None else read_manifest(start).step)
    if refused and not existed:
        shutil.rmtree(folder, ignore_errors=True)
    if report is not None and not refused:
        write_json(report, result.to_json())
    if result.exit:
        where = "" if refused else f" (logs: {folder / 'logs'})"
        raise JobFailed(f"{result.error}{where}", result.exit)


run.__doc__ = (run.__doc__ or "") + EXAMPLES


def _run_and_show(
    settings: RunSettings, events: Path | None, steps: int, quiet: bool, place: SeveralHosts | None
) -> Report:
    with contextlib.ExitStack() as stack:
        if events is not None:
            events.parent.mkdir(parents=True, exist_ok=True)
        sink = stack.enter_context(events.open("w")) if events is not None else None
        display = stack.enter_context(Display(steps, quiet, sink))
        job = stack.enter_context(_run_on(place, settings, display))
        display.job = job
        display.warn_of_scaling(settings.scaling)
        job.on_idle = display.forward_output
        stack.enter_context(_interruptible(job))
        result = job.to_end()
        display.forward_output(to_the_end=True, told=result.error)
        display.close_story(result)
        return result


def _run_on(place: SeveralHosts | None, settings: RunSettings, display: Display) -> Run:
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
