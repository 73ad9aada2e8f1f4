"""How a job ends, fails, or starts again from its newest checkpoint."""

from dataclasses import replace

from concertina.core.messages import EXIT_INTERRUPTED, EXIT_OK, EXIT_USAGE
from concertina.master.machine_generation import start_afresh, trainers
from concertina.master.machine_types import Command, Commands, KillWorkers, Phase, Result, State

MOST_LOSSES = 12  # without coming farther: then it is the script or the machine, and starting again is no help


def fail(state: State, code: int, why: str) -> Result:
    """The job cannot go on. `code` is how a worker ended, negative for a signal."""
    code = code if code > 0 else 128 - code  # as shells report a signal
    early = [worker for worker, ended in state.exits.items() if ended == EXIT_OK]
    if early and code != EXIT_USAGE:
        why = f"worker {early[0]} left the training early, with exit code 0, and the others could not go on; {why}"
    failed = replace(state, phase=Phase.STOPPING, failure=why, exit_code=code)
    if failed.workers:
        return failed, (KillWorkers(tuple(failed.workers), why),)
    return settle(failed)


def settle(state: State) -> Result:
    """The job is over when all who trained have ended."""
    if state.phase is Phase.STOPPING:
        return (state, ()) if state.workers else (replace(state, phase=Phase.FAILED), ())
    members = trainers(state)
    if any(n in state.workers for n in members):
        return state, ()
    if state.exits.get(members[0], -1) < 0 and not state.interrupted:
        return restart(state, "the main worker was lost after the last step")
    spare = tuple(state.workers)
    kill: Commands = (KillWorkers(spare, "the job is over"),) if spare else ()
    over = replace(state, workers={}, pending=None)
    codes = {code for n in members if (code := state.exits.get(n, -1)) >= 0}
    if codes == {EXIT_OK}:
        return replace(over, phase=Phase.FINISHED), kill
    if codes <= {EXIT_INTERRUPTED}:
        return replace(over, phase=Phase.INTERRUPTED), kill
    why = f"workers ended in different ways: {dict(sorted(state.exits.items()))}"
    return replace(over, phase=Phase.FAILED, failure=state.failure or why, exit_code=1), kill


def restart(state: State, reason: str, *before: Command) -> Result:
    """Nobody is left who has the state: all workers anew, as often as it helps."""
    rest = tuple(state.workers)
    kill: Commands = (KillWorkers(rest, reason),) if rest else ()
    if state.interrupted:
        return replace(state, phase=Phase.INTERRUPTED, workers={}, pending=None), (*before, *kill)
    if state.losses >= MOST_LOSSES:
        state, commands = fail(state, 1, f"{reason}, and starting again has not helped {MOST_LOSSES} times")
        return state, (*before, *commands)
    losses = state.losses + (state.phase is not Phase.REGROUPING)  # there, the loss that led to it has been counted
    state = replace(state, resume=True, step=0, losses=losses)  # the workers will say where they go on
    state, commands = start_afresh(state, f"{reason}: starting again from the newest checkpoint")
    return state, (*before, *kill, *commands)
