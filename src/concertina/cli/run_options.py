"""What can be said on the command line of `concertina run`: every option, and the sentence that explains it."""

from pathlib import Path
from typing import Annotated

import typer

DEFAULT_VIRTUAL = 4

Virtual = Annotated[
    int | None,
    typer.Option(
        "--virtual",
        "-P",
        help="Virtual workers: the number of DDP processes whose result you want. It decides the result and never "
        f"changes during a job. Default {DEFAULT_VIRTUAL}, or what the checkpoint has.",
    ),
]

Workers = Annotated[
    int | None,
    typer.Option("--workers", "-W", help="Processes to start with. Default: one per GPU or core, at most P."),
]

Minimum = Annotated[
    int, typer.Option("--min", help="With fewer workers left after a loss, wait for others before training on.")
]

Maximum = Annotated[
    int | None, typer.Option("--max", help="Never more workers than this. Default: P, the virtual workers.")
]

Steps = Annotated[int, typer.Option(help="Stop after this many optimizer steps; 0 means when the script ends.")]

Resize = Annotated[
    str, typer.Option(help='Change the number of workers during training: "STEP=N,STEP=N".', metavar="PLAN")
]

Checkpoint = Annotated[Path | None, typer.Option(help="Folder for checkpoints.")]

CheckpointEvery = Annotated[int, typer.Option(help="Steps between checkpoints; 0 means only at the end.")]

Resume = Annotated[bool, typer.Option("--resume", help="Go on from the newest whole checkpoint.")]

ReportFile = Annotated[Path | None, typer.Option(help="Write a JSON report here at the end.")]

EventsFile = Annotated[Path | None, typer.Option(help="Write events here as JSON lines, while training.")]

Level = Annotated[
    str,
    typer.Option(
        help="Determinism: D0 repeatable, D1 the same bits for any number of workers, D2 also for any GPU model."
    ),
]

Threads = Annotated[int, typer.Option(help="torch threads per worker. Part of the result; torchrun uses 1 too.")]

Reduction = Annotated[
    str,
    typer.Option(help="How gradients are summed: auto, shared (memory), ring, or contexts (P gloo contexts; slow)."),
]

ScalingMode = Annotated[
    str,
    typer.Option(
        help="What a change of workers does to the batch. consistent: nothing, the bits stay those of DDP. strong: "
        "the total batch stays. weak: it grows with the workers. hybrid: it grows as little as keeps them busy. "
        "With weak and hybrid the result depends on the workers, and the learning rate follows the batch.",
        metavar="MODE",
    ),
]

Ramp = Annotated[
    int, typer.Option(help="Steps in which the learning rate follows a change of the batch (weak, hybrid).")
]

LargestBatch = Annotated[
    int, typer.Option(help="Samples that a device takes at once, for scripts that use session.parts(); 0: any.")
]

RunDir = Annotated[Path | None, typer.Option(help="Folder for logs. Default: below the user's state folder.")]

Quiet = Annotated[bool, typer.Option("--quiet", help="Only what the script itself prints.")]

BackendName = Annotated[
    str,
    typer.Option(
        help="Where workers run. local: this machine. ray: the machines of the Ray cluster that this one belongs "
        "to, with script and checkpoints under the same paths on all of them.",
        metavar="NAME",
    ),
]
