"""What `concertina run` shows while a job trains: a progress line, its story, and what the script prints."""

import json
import sys
from collections.abc import Mapping
from typing import IO, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from concertina.report import Report
from concertina.runner import Run

OURS = "concertina: "  # how a worker begins the sentence that it ends with


class Display:
    """The live progress line, the one-line story of each generation, and the script's own output."""

    def __init__(self, steps: int, quiet: bool, sink: IO[str] | None) -> None:
        self.job: Run | None = None
        self._sink = sink
        self._quiet = quiet
        self._asked_to_stop = False
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
            self._progress.update(self._task, description=f"{event['workers']} worker{'s' * (event['workers'] != 1)}")
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
        elif kind == "interrupt_asked":
            self._say(
                "ending at once"
                if self._asked_to_stop
                else "asked to stop: the job ends after the step under way; ask again (Ctrl-C) to end it at once"
            )
            self._asked_to_stop = True
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

    def forward_output(self, to_the_end: bool = False, told: str = "") -> None:
        """Shows what the main worker's script has printed since: whole lines, and at the end what is left. A last line
        of our own waits for the end, since it is left out there if it is the sentence that will be told anyhow."""
        if self.job is None:
            return
        path = self.job.log_path(self._shown)
        if not path.exists():
            return
        with path.open("rb") as file:
            file.seek(self._read)
            text = file.read()
        whole = len(text) if to_the_end else text.rfind(b"\n") + 1
        last = text.rfind(b"\n", 0, max(whole - 1, 0)) + 1
        ours = text[last:whole].decode(errors="replace")
        if ours.startswith(OURS) and (ours.strip() == f"{OURS}{told}" if to_the_end else True):
            whole = last
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
        changed = (
            f", {len(pauses)} change{'s' * (len(pauses) > 1)} (longest pause {max(pauses):.2f} s)" if pauses else ""
        )
        self._say(f"finished: {report.steps} steps, {report.virtual} virtual workers, {report.reduction}{changed}")
