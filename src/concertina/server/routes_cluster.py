"""The cluster as a whole: slots, nodes, history, events of everything, and what only an admin may do."""

from typing import Annotated

from fastapi import APIRouter, Header, Path, Query, Response

from concertina.cluster.prune import forgettable
from concertina.cluster.records import Op
from concertina.server.answers import ERRORS, STREAM, json_response
from concertina.server.cluster_views import cluster_json, history_json, holders, nodes_json
from concertina.server.context import Admin, Here, Who
from concertina.server.errors import ApiError
from concertina.server.models import (
    KEY,
    AnswerBody,
    ClusterBody,
    DownAsk,
    DrainAsk,
    HistoryBody,
    Name,
    NodePage,
    PruneAsk,
    PruneBody,
    ReclaimAsk,
)
from concertina.server.streams import EventStream
from concertina.server.views import encode

router = APIRouter(prefix="/api/v1", tags=["cluster"], responses=ERRORS)
HOUR_SECONDS = 3600.0


@router.get("/cluster", response_model=ClusterBody)
async def cluster(here: Here, who: Who) -> Response:
    """Slots, nodes, counts of jobs, and who decides."""
    return json_response(encode(cluster_json(here.parts.mirror, here.board, here.hub, who)))


@router.get("/cluster/history", response_model=HistoryBody)
async def history(
    here: Here,
    who: Who,
    seconds: Annotated[
        float, Query(gt=0, le=31 * 86400, allow_inf_nan=False, description="how far back")
    ] = HOUR_SECONDS,
    limit: Annotated[int, Query(ge=1, le=1000, description="jobs; the newest are kept")] = 200,
) -> Response:
    """Slots over time by job. Jobs of others are shown without their names."""
    now = here.parts.clock()
    return json_response(encode(history_json(here.parts.mirror, here.board, who, now - seconds, now, limit)))


@router.get("/events", response_class=Response, responses=STREAM)
async def events(
    here: Here,
    who: Who,
    after: Annotated[int | None, Query(ge=0, le=1 << 60, description="as Last-Event-ID")] = None,
    last_event_id: Annotated[str | None, Header(pattern=r"^[0-9]{1,18}$")] = None,
) -> Response:
    """Whatever changes, as server-sent events: `job`, `node`, `cluster`; `reset`: load everything again."""
    begin = int(last_event_id) if last_event_id is not None else after
    return EventStream(here.hub.stream(who, begin), here.hub, who, lambda: here.doorkeeper.still_knows(who))


@router.get("/nodes", response_model=NodePage)
async def nodes(here: Here, who: Who) -> Response:
    """All of them: a cluster has few enough."""
    items = nodes_json(here.parts.mirror, holders(here.board))
    return json_response(encode({"items": items, "total": len(items), "next": None}))


@router.post("/nodes/{node_id}/drain", response_model=AnswerBody)
async def drain(node_id: Annotated[Name, Path()], ask: DrainAsk, here: Here, who: Admin) -> Response:
    """Move its jobs away and give it nothing new; or use it again."""
    if all(node.id != node_id for node in here.parts.mirror.nodes()):
        raise ApiError(
            404,
            "no_such_node",
            f"there is no node {node_id!r}",
            "`concertina nodes` lists them, and so does GET /api/v1/nodes",
        )
    reply = await here.asker.ask(Op.UNDRAIN if ask.undrain else Op.DRAIN, who, target=node_id)
    return _answer(reply.reason)


@router.post("/cluster/reclaim", response_model=AnswerBody)
async def reclaim(
    ask: ReclaimAsk, here: Here, who: Admin, idempotency_key: Annotated[str | None, Header(pattern=KEY)] = None
) -> Response:
    """Take slots back for somebody else's service within seconds, or give them again. The same Idempotency-Key with the
    same number takes them once, also if the first answer was lost."""
    if not ask.give_back and ask.slots == 0:
        raise ApiError(422, "invalid", "slots is 0, needed 1 or more to reclaim", "say how many")
    op = Op.RETURN if ask.give_back else Op.RECLAIM
    reply = await here.asker.ask(op, who, number=ask.slots, once=idempotency_key or "")
    return _answer(reply.reason)


@router.post("/cluster/prune", response_model=PruneBody)
async def prune(ask: PruneAsk, here: Here, who: Admin) -> Response:
    """Forget jobs that ended long ago: their records, logs and checkpoints."""
    now = here.parts.clock()
    ended = [job.state for job in here.board.jobs() if job.state.phase.is_end]
    jobs = forgettable(ended, now, before_s=now - ask.older_s)
    reason = "nothing was removed"
    if jobs and not ask.dry_run:
        reason = (await here.asker.ask(Op.PRUNE, who, number=ask.older_s)).reason
    return json_response(encode({"accepted": True, "reason": reason, "jobs": jobs}))


@router.post("/cluster/down", response_model=AnswerBody)
async def down(ask: DownAsk, here: Here, who: Admin) -> Response:
    """Suspend every job with its state kept, and end."""
    reply = await here.asker.ask(Op.DOWN, who)
    return _answer(reply.reason)


def _answer(reason: str) -> Response:
    return json_response(encode({"accepted": True, "reason": reason}))
