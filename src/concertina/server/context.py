"""What every route needs, kept with the app; and who is asking, as the gate found out."""

from dataclasses import dataclass
from typing import Annotated, Any

from fastapi import Depends, Request

from concertina.cluster.mirror import Job
from concertina.server.asks import Asker
from concertina.server.auth import Caller, Doorkeeper
from concertina.server.board import Board
from concertina.server.discretion import discreet, discreet_job
from concertina.server.errors import no_job, not_admin
from concertina.server.events import Hub
from concertina.server.metrics import Meters
from concertina.server.oracle import Bench
from concertina.server.parts import Parts
from concertina.server.progress import Progress
from concertina.server.submit import Submitter
from concertina.server.views import job_json


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    parts: Parts
    board: Board
    hub: Hub
    submitter: Submitter
    asker: Asker
    bench: Bench
    meters: Meters
    doorkeeper: Doorkeeper
    progress: Progress

    def job(self, job_id: str, caller: Caller) -> Job:
        """Raises ApiError 404, the same for what is not there and what is somebody else's."""
        card = self.board.card(job_id)
        if card is None or not caller.may_see(card.job.request.user):
            raise no_job(job_id)
        return card.job

    def whole(self, job: Job, caller: Caller) -> dict[str, Any]:
        """A job that this caller may see, as JSON."""
        return discreet_job(job_json(job, brief=False), caller, self.parts.mirror.requests)

    def told(self, sentence: str, caller: Caller) -> str:
        """As this caller may hear it."""
        return discreet(sentence, caller, self.parts.mirror.requests)


# None of these waits for anything; but plain functions would be sent to a thread, and that takes longer than they do.


async def context_of(request: Request) -> Context:
    context = request.app.state.context
    assert isinstance(context, Context)
    return context


async def caller_of(request: Request) -> Caller:
    caller = request.scope["state"]["caller"]
    assert isinstance(caller, Caller)
    return caller


async def admin_of(request: Request) -> Caller:
    caller = await caller_of(request)
    if not caller.admin:
        raise not_admin("do this")
    return caller


Here = Annotated[Context, Depends(context_of)]
Who = Annotated[Caller, Depends(caller_of)]
Admin = Annotated[Caller, Depends(admin_of)]
