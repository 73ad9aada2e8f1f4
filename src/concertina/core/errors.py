"""Every exception that concertina raises on purpose.

    ConcertinaError
    ├── UsageError              the caller asked for something that makes no sense; exit code 2
    │   ├── UnsupportedScript   the script does what cannot be done elastically with the right bits
    │   └── CheckpointError     a checkpoint is missing, torn, too new, or of another model
    ├── EnvironmentMismatch     a worker computes with other kernels than the rest would; exit code 2
    ├── DivergenceError         replicas that must be equal are not
    ├── JobFailed               a worker ended in a way the job cannot go on from
    ├── InvalidJobError         a job specification that can not be right
    ├── InvalidClusterError     a cluster description that can not be right
    ├── IllegalMoveError        a job asked to change phase in a way the table forbids
    ├── UnknownNameError        a policy, overhead model or curve nobody has heard of
    ├── NoCurveError            no throughput is known for this job on this device type
    ├── SimulationError         the simulated cluster was asked for something impossible
    ├── TraceError              a trace or table that can not be read (simulator/readers/problems.py)
    │   └── BadRowsError        some of its rows can not be used, and skipping them was not asked for
    ├── NoPlotlyError           a page was asked for and plotly is missing (simulator/report_html.py)
    └── UnwritableError         a file that was asked for can not be written (cli/simulate.py)

A message says what was seen, what was needed and what to try.
"""


class ConcertinaError(Exception):
    """Root of all of them."""


class UsageError(ConcertinaError):
    """Bad input. Nothing was started or changed."""


class UnsupportedScript(UsageError):
    """The training script does something that would give wrong numbers on virtual workers."""


class CheckpointError(UsageError):
    """A checkpoint that cannot be used."""


class EnvironmentMismatch(ConcertinaError):
    """Two workers, or a worker and a checkpoint, differ in something that changes the bits."""


class DivergenceError(ConcertinaError):
    """Workers hold different values of what must be one state."""


class JobFailed(ConcertinaError):
    """The job ended before its time; `exit_code` is what the command line should return."""

    def __init__(self, message: str, exit_code: int = 1) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class InvalidJobError(ConcertinaError, ValueError):
    """A field of a job has a value it can not have."""

    def __init__(self, *, job_id: str, field: str, seen: object, needed: str) -> None:
        super().__init__(f"job {job_id!r}: {field} is {seen!r}, needed {needed}")
        self.job_id, self.field, self.seen, self.needed = job_id, field, seen, needed


class InvalidClusterError(ConcertinaError, ValueError):
    """A description of nodes and devices that makes no sense."""

    def __init__(self, *, seen: str, needed: str) -> None:
        super().__init__(f"cluster {seen!r}: needed {needed}")
        self.seen, self.needed = seen, needed


class IllegalMoveError(ConcertinaError):
    """A job was asked to change to a phase that may not follow its present one."""

    def __init__(self, *, job_id: str, history: tuple[str, ...], wanted: str) -> None:
        super().__init__(f"job {job_id!r} can not become {wanted!r} after {' -> '.join(history)}")
        self.job_id, self.history, self.wanted = job_id, history, wanted


class UnknownNameError(ConcertinaError, KeyError):
    """A name that is in no list of ours."""

    def __init__(self, *, kind: str, seen: str, known: tuple[str, ...]) -> None:
        super().__init__(f"no {kind} named {seen!r}; known: {', '.join(known)}")
        self.kind, self.seen, self.known = kind, seen, known

    def __str__(self) -> str:  # KeyError would print the repr
        return str(self.args[0])


class NoCurveError(ConcertinaError):
    """The throughput table does not cover this job, and nothing else says how fast it is."""

    def __init__(self, *, job_id: str, wanted: str, nearest: str) -> None:
        super().__init__(f"job {job_id!r}: no throughput for {wanted}; {nearest}")
        self.job_id, self.wanted, self.nearest = job_id, wanted, nearest


class SimulationError(ConcertinaError):
    """The simulated cluster was asked for something impossible: a defect in a policy or in the engine."""
