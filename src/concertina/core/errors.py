"""Every exception that concertina raises on purpose.

    ConcertinaError
    ├── UsageError              the caller asked for something that makes no sense; exit code 2
    │   ├── UnsupportedScript   the script does what cannot be done elastically with the right bits
    │   └── CheckpointError     a checkpoint is missing, torn, too new, or of another model
    ├── EnvironmentMismatch     a worker computes with other kernels than the rest would; exit code 2
    ├── DivergenceError         replicas that must be equal are not
    └── JobFailed               a worker ended in a way the job cannot go on from

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
