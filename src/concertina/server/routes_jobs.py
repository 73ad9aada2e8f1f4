"""Jobs: submit, list, look at, change, end."""

import asyncio
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Header, Path, Query, Response

from concertina.cluster.mirror import Job
from concertina.cluster.records import Op
from concertina.core.job import JobPhase
from concertina.server import files
from concertina.server.answers import ERRORS, STREAM, json_response
from concertina.server.auth import Caller
from concertina.server.context import Context, Here, Who
from concertina.server.errors import ApiError
from concertina.server.models import (
    JOB_ID,
    KEY,
    JobAsk,
    JobBody,
    JobPage,
    LinePage,
    LogPage,
    MetricsBody,
    Name,
    ResizeAsk,
)
from concertina.server.streams import EventStream, job_stream
from concertina.server.views import encode

router = APIRouter(prefix="/api/v1/jobs", tags=["jobs"], responses=ERRORS)

Id = Annotated[str, Path(pattern=JOB_ID)]
MOST_OFFSET = 1 << 60
Offset = Annotated[int, Query(ge=0, le=MOST_OFFSET)]


def _whole(here: Context, job: Job, who: Caller, status: int = 200) -> Response:
    return json_response(encode(here.whole(job, who)), status)


@router.post(
    "",
    status_code=201,
    response_model=JobBody,
    responses={202: {"model": JobBody, "description": "Written down; the controller has not answered yet"}},
)
async def submit(
    ask: JobAsk,
    here: Here,
    who: Who,
    wait: Annotated[float, Query(ge=0, le=30, allow_inf_nan=False, description="seconds to wait for an answer")] = 5.0,
    idempotency_key: Annotated[str | None, Header(pattern=KEY)] = None,
) -> Response:
    """Take a job, or refuse it: look at `phase` and `reason`. The same Idempotency-Key gives the same job again."""
    job_id = await here.submitter.submit(ask, who, idempotency_key or "")
    answered = await here.submitter.answer(job_id, wait)
    return _whole(here, here.job(job_id, who), who, 201 if answered else 202)


@router.get("", response_model=JobPage)
async def list_jobs(
    here: Here,
    who: Who,
    phase: Annotated[
        list[Literal["submitted", "rejected", "waiting", "running", "finished", "cancelled", "failed"]],
        Query(max_length=7),
    ] = [],  # noqa: B006
    user: Annotated[Name | None, Query()] = None,
    limit: Annotated[int, Query(ge=1, le=500)] = 50,
    after: Annotated[str | None, Query(pattern=JOB_ID, description="`next` of the page before")] = None,
    order: Annotated[Literal["newest", "oldest"], Query(description="by submission")] = "newest",
) -> Response:
    """One page of jobs. `phase` may be given several times."""
    phases = frozenset(JobPhase(value) for value in phase)
    owner = user if who.admin else who.name
    if user is not None and not who.may_see(user):
        return json_response(b'{"items":[],"total":0,"next":null}')

    def wanted(job: Job) -> bool:
        return (not phases or job.state.phase in phases) and (owner is None or job.request.user == owner)

    if after is not None:
        here.job(after, who)
    every = not phases and owner is None
    found, total, following = here.board.page(
        None if every else wanted, after=after, limit=limit, newest_first=order == "newest"
    )
    items = b",".join([card.brief(who) for card in found])
    return json_response(b'{"items":[%b],"total":%d,"next":%b}' % (items, total, encode(following)))


@router.get("/{job_id}", response_model=JobBody)
async def describe(job_id: Id, here: Here, who: Who) -> Response:
    return _whole(here, here.job(job_id, who), who)


@router.delete("/{job_id}", response_model=JobBody)
async def cancel(job_id: Id, here: Here, who: Who) -> Response:
    """End it now. Cancelling twice is no error."""
    job = here.job(job_id, who)
    if job.state.phase is JobPhase.CANCELLED:
        return _whole(here, job, who)
    _check_live(job)
    await here.asker.ask(Op.CANCEL, who, target=job_id)
    await here.hub.until(lambda: _phase(here, job_id) is not job.state.phase, 1.0)
    return _whole(here, here.job(job_id, who), who)


@router.post("/{job_id}/resize", response_model=JobBody)
async def resize(job_id: Id, ask: ResizeAsk, here: Here, who: Who) -> Response:
    """Insist on a number of workers; 0: as the policy likes again."""
    job = here.job(job_id, who)
    _check_live(job)
    if ask.workers and not job.request.min_workers <= ask.workers <= job.request.most:
        raise ApiError(
            409,
            "out_of_range",
            f"{ask.workers} workers were asked for; it runs on {job.request.min_workers} to {job.request.most}",
            "ask for a number in this range",
        )
    await here.asker.ask(Op.RESIZE, who, target=job_id, number=ask.workers)
    await here.hub.until(lambda: here.job(job_id, who).state.pinned == ask.workers, 1.0)
    return _whole(here, here.job(job_id, who), who)


def _phase(here: Context, job_id: str) -> JobPhase | None:
    job = here.parts.mirror.job(job_id)
    return None if job is None else job.state.phase


def _check_live(job: Job) -> None:
    if job.state.phase.is_end:
        raise ApiError(409, "ended", f"job {job.id} has ended already ({job.state.phase.value})", "submit it again")


@router.get("/{job_id}/events", response_model=LinePage, responses=STREAM)
async def job_events(
    job_id: Id,
    here: Here,
    who: Who,
    follow: Annotated[int, Query(ge=0, le=1, description="1: server-sent events; 0: one page of JSON")] = 1,
    after: Offset = 0,
    limit: Annotated[int, Query(ge=1, le=5000)] = 500,
    last_event_id: Annotated[str | None, Header(pattern=r"^[0-9]{1,18}$")] = None,
) -> Response:
    """What happens to a job: `state` (the whole job) and `line` (as `run --events` writes them), then `end`."""
    job = here.job(job_id, who)
    begin = int(last_event_id) if last_event_id is not None else after
    if follow:

        def show(now: Job) -> dict[str, Any]:
            return here.whole(now, who)

        pieces = job_stream(here.hub, here.parts.state, lambda: here.parts.mirror.job(job.id), begin, show)
        return EventStream(pieces, here.hub, who, lambda: here.doorkeeper.still_knows(who))
    path = files.events_path(here.parts.state, job.id)
    found = await asyncio.to_thread(files.read_lines, path, begin, limit)
    items = [event for line in found.lines if (event := files.parse(line)) is not None]
    return json_response(_page(items, found.next, found.at_end and job.state.phase.is_end))


def _page(items: list[dict[str, object]], following: int, ended: bool) -> bytes:
    return encode({"items": items, "next": following, "ended": ended})


@router.get("/{job_id}/logs", response_model=LogPage)
async def logs(
    job_id: Id,
    here: Here,
    who: Who,
    worker: Annotated[
        str | None, Query(pattern=r"^[a-z0-9][a-z0-9_-]{0,40}$", description="default: the first")
    ] = None,
    after: Annotated[int | None, Query(ge=0, le=MOST_OFFSET, description="default: the newest lines")] = None,
    limit: Annotated[int, Query(ge=1, le=5000)] = 200,
) -> Response:
    """What a worker printed."""
    job = here.job(job_id, who)
    names = await asyncio.to_thread(files.log_names, here.parts.state, job.id)
    if worker is not None and worker not in names:
        raise ApiError(
            404, "no_such_log", f"job {job_id} has no log of worker {worker!r}", f"there are: {', '.join(names)}"
        )
    chosen = worker if worker is not None else (names[0] if names else None)
    ended = job.state.phase.is_end
    if chosen is None:
        return json_response(encode({"worker": None, "workers": [], "lines": [], "next": 0, "ended": ended}))
    path = files.log_path(here.parts.state, job.id, chosen)
    begin = after if after is not None else await asyncio.to_thread(files.tail_start, path, limit)
    over = ended and not (job.seen and job.seen.slots)  # nobody is there who could end a line
    found = await asyncio.to_thread(files.read_lines, path, begin, limit, over=over)
    lines = [line.decode("utf-8", "replace") for line in found.lines]
    plain = {"worker": chosen, "workers": names, "lines": lines, "next": found.next, "ended": ended and found.at_end}
    return json_response(encode(plain))


@router.get("/{job_id}/metrics", response_model=MetricsBody)
async def job_metrics(job_id: Id, here: Here, who: Who) -> Response:
    """Points for charts: loss and whatever else the script logs, speed and workers over steps; and its generations."""
    job = here.job(job_id, who)
    return json_response(encode(await asyncio.to_thread(here.progress.chart, job.id)))
