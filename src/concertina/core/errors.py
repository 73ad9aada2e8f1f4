"""Every exception that concertina raises on purpose.

    ConcertinaError
    ├── UsageError              the caller asked for something that makes no sense; exit code 2
    │   ├── UnsupportedScript   the script does what cannot be done elastically with the right bits
    │   ├── CheckpointError     a checkpoint is missing, torn, too new, or of another model
    │   └── StoreAddressError   the address of a store that can not be understood or opened
    ├── EnvironmentMismatch     a worker computes with other kernels than the rest would; exit code 2
    ├── DivergenceError         replicas that must be equal are not
    ├── StateLost               what only a lost worker had cannot be made again: go back to a checkpoint
    ├── JobFailed               a worker ended in a way the job cannot go on from
    ├── InvalidJobError         a job specification that can not be right
    ├── InvalidClusterError     a cluster description that can not be right
    ├── IllegalMoveError        a job asked to change phase in a way the table forbids
    ├── UnknownNameError        a policy, overhead model or curve nobody has heard of
    ├── NoCurveError            no throughput is known for this job on this device type
    ├── NoAllocationError       jobs and devices that no allocation can be found for (policies/allocation_model.py)
    ├── NoSolverError           an exact allocation was asked for and highspy is missing (policies/milp.py)
    ├── SolverError             the solver gave up on an allocation (policies/milp.py)
    ├── SimulationError         the simulated cluster was asked for something impossible
    ├── TraceError              a trace or table that can not be read (simulator/readers/problems.py)
    │   └── BadRowsError        some of its rows can not be used, and skipping them was not asked for
    ├── StoreError              the store refused or failed (store/)
    │   ├── StoreRequestError   a key, value or time no store takes
    │   ├── StoreUnavailable    no answer in time; a write may or may not have been done
    │   ├── LeaseGone           the lease ran out or was revoked
    │   └── HistoryGone         a watch asked for changes that are no longer kept: list again
    ├── Deposed                 this leader's time is over; whatever it wanted to write was not written
    ├── ClusterUnreachable      no cluster answers, or not in time (cli/client.py)
    │   └── TokenRefused        it answers nobody without a token, or not with this one
    ├── RequestRefused          the cluster understood and said no; exit code 3 (cli/client.py)
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


class StoreAddressError(UsageError):
    """A store's address that makes no sense, or a place where no store can be opened."""


class EnvironmentMismatch(ConcertinaError):
    """Two workers, or a worker and a checkpoint, differ in something that changes the bits."""


class DivergenceError(ConcertinaError):
    """Workers hold different values of what must be one state."""


class StateLost(ConcertinaError):
    """What only a lost worker had cannot be made again; the job can go back to its newest checkpoint."""


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


class StoreError(ConcertinaError):
    """A store could not do what was asked."""


class StoreRequestError(StoreError, ValueError):
    """A key, a value or a time to live that no store takes."""


class StoreUnavailable(StoreError):
    """The store gave no answer in time. A write that ends like this may or may not have been done."""


class LeaseGone(StoreError):
    """A lease that ran out or was revoked; the keys attached to it are gone too."""

    def __init__(self, lease: int) -> None:
        super().__init__(f"lease {lease} ran out or was revoked; its keys are gone: grant a new one")
        self.lease = lease


class HistoryGone(StoreError):
    """Changes that were asked for are no longer kept."""

    def __init__(self, *, after: int, oldest: int) -> None:
        super().__init__(
            f"changes after revision {after} were asked for, but only those from {oldest} on are kept: "
            "list the prefix again and watch on from the listing's revision"
        )
        self.after, self.oldest = after, oldest


class Deposed(ConcertinaError):
    """A leader whose lease is over, or nearly so. It may not act any more and can not come back under this number."""

    def __init__(self, *, name: str, fence: int, reason: str) -> None:
        super().__init__(f"leader {fence} of {name!r} is deposed: {reason}")
        self.name, self.fence, self.reason = name, fence, reason


class ClusterUnreachable(ConcertinaError):
    """A live cluster was asked for something and gave no answer, or none to this caller."""


class TokenRefused(ClusterUnreachable):
    """A live cluster does not know who asks. To ask again changes nothing."""


class RequestRefused(ConcertinaError):
    """The live cluster understood the request and refused it."""
