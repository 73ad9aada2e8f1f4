"""Running a user's script as a worker process, from its first line to an exit code that means something."""

import contextlib
import os
import random
import runpy
import sys
import traceback
from pathlib import Path

import numpy as np
import torch

from concertina.core.env import WorkerEnv
from concertina.core.errors import ConcertinaError, EnvironmentMismatch, StateLost, UsageError
from concertina.core.messages import (
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    EXIT_LEFT,
    EXIT_OK,
    EXIT_STATE_LOST,
    EXIT_USAGE,
)
from concertina.runtime import session as session_module
from concertina.runtime.events import EventPipe
from concertina.runtime.interrupts import EndOfRun, Left, stop_request
from concertina.runtime.unhurried import give_way


def run_script(script: str, args: list[str]) -> int:
    """Executes `script` as `__main__` and returns the worker's exit code."""
    env = WorkerEnv.from_environ(os.environ)
    events = EventPipe(env.events_fd, env.worker)
    stop_request.install()
    _as_fresh_process(env)
    sys.argv = [script, *args]
    sys.path[0] = str(Path(script).resolve().parent)
    code = EXIT_OK
    try:
        runpy.run_path(script, run_name="__main__")
    except EndOfRun as end:
        code = _code_of_end(end)
        if isinstance(end, Left):
            give_way()
    except SystemExit as end:
        code = _code_of(end)
    except BaseException as error:
        code = _explain(error, events)
    finally:
        code = _close_session(code, events)
        sys.stdout.flush()
        sys.stderr.flush()
    return code


def _as_fresh_process(env: WorkerEnv) -> None:
    """A forked process has its parent's random states; a script without seeds expects its own."""
    random.seed()
    np.random.seed()
    if env.threads:
        torch.set_num_threads(env.threads)


def _code_of_end(end: EndOfRun) -> int:
    return EXIT_LEFT if isinstance(end, Left) else EXIT_INTERRUPTED


def _code_of(end: SystemExit) -> int:
    if end.code is None:
        return EXIT_OK
    if isinstance(end.code, int):
        return end.code
    print(end.code, file=sys.stderr)
    return EXIT_FAILED


def _explain(error: BaseException, events: EventPipe) -> int:
    """One clear sentence for what we know, a traceback for what only the script's author can know."""
    if isinstance(error, ConcertinaError):
        print(f"concertina: {error}", file=sys.stderr)
        usage = isinstance(error, UsageError | EnvironmentMismatch)
        if isinstance(error, StateLost):
            return EXIT_STATE_LOST
        events.emit("failed", error=str(error), usage=usage, kind=type(error).__name__)
        return EXIT_USAGE if usage else EXIT_FAILED
    traceback.print_exception(error)
    hint = _hint(error)
    at = _last_line_of_script(error)
    trained = session_module.current() is not None and session_module.current().step > 0  # type: ignore[union-attr]
    missing = isinstance(error, ImportError | SyntaxError) and not trained
    message = f"{type(error).__name__}: {error}{at}" + (f" ({hint})" if hint else "")
    if missing:
        message = f"the script cannot be imported: {message}"
    events.emit("failed", error=message, usage=missing or bool(hint and not trained), kind=type(error).__name__)
    return EXIT_USAGE if missing or (hint and not trained) else EXIT_FAILED


def _hint(error: BaseException) -> str:
    text = str(error)
    if isinstance(error, torch.OutOfMemoryError):
        return "the batch does not fit into the device's memory: lower batch_size"
    if "Default process group has not been initialized" in text:
        return "the script uses torch.distributed itself; virtual workers cannot wait for each other inside a step"
    if "No inf checks were recorded for this optimizer" in text:
        return "give the GradScaler to session.prepare() together with the optimizer"
    if "nested_tensorlist" in text:
        return "gradients exist in the last turn of a step only: clip them under `if session.is_last_turn:`"
    if "Connection closed by peer" in text:
        return "the connection to another worker broke: that worker has ended"
    if "does not have a deterministic implementation" in text:
        return "replace that operation, or run with --level D0 and without the promise of equal bits"
    return ""


def _last_line_of_script(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    script = sys.argv[0]
    for frame in reversed(frames):
        if frame.filename == script:
            return f" at {Path(script).name}:{frame.lineno}"
    return ""


def _close_session(code: int, events: EventPipe) -> int:
    current = session_module.current()
    if current is None:
        if code == EXIT_OK:
            print("concertina: the script never called concertina.join()", file=sys.stderr)
            events.emit("failed", error="the script never called concertina.join()", usage=True, kind="UsageError")
            return EXIT_USAGE
        return code
    if current.end is not None:  # also where the script has caught it
        code = _code_of_end(current.end)
    elif code == EXIT_OK:
        try:
            current.close_pass()
        except BaseException as error:
            code = _explain(error, events)
    with contextlib.suppress(Exception):
        current.close()
    return code
