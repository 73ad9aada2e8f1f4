"""The application put together from its parts. Making it starts nothing; its lifespan does."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from concertina import __version__
from concertina.core.errors import StoreError
from concertina.core.names import NAME, NAME_WORDS
from concertina.server import routes_cluster, routes_jobs, routes_people, routes_plain, routes_questions
from concertina.server.access import AccessLog
from concertina.server.answers import json_response
from concertina.server.asks import Asker
from concertina.server.auth import Caller, Doorkeeper, is_loopback
from concertina.server.board import Board
from concertina.server.cluster_views import cluster_event, holders, nodes_json
from concertina.server.context import Context
from concertina.server.errors import ApiError
from concertina.server.events import Hub, Topic
from concertina.server.gate import Gate, allowed_hosts, methods_by_path
from concertina.server.metrics import Meters
from concertina.server.oracle import Bench
from concertina.server.parts import Parts
from concertina.server.progress import Progress
from concertina.server.submit import Submitter
from concertina.server.threads import start_threads
from concertina.server.views import encode

THREADS = 8  # for the store and the disk
ABOUT = (
    "Elastic deep-learning training. Every change of a job carries its reason; a refusal says what could be promised."
)


def create_app(parts: Parts) -> FastAPI:
    context, access = _context(parts), AccessLog(parts.access_log)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        asyncio.get_running_loop().set_default_executor(start_threads(THREADS, "concertina-io"))
        access.start()
        context.bench.start()
        context.hub.start()
        try:
            yield
        finally:
            context.hub.close()
            context.bench.close()
            access.close()

    app = FastAPI(
        title="concertina",
        description=ABOUT,
        version=__version__,
        lifespan=lifespan,
        openapi_url="/api/v1/openapi.json",
        docs_url=None,  # would load scripts from elsewhere
        redoc_url=None,
    )
    app.state.context = context
    for module in (routes_jobs, routes_questions, routes_cluster, routes_people, routes_plain):
        app.include_router(module.router)
    _explain_errors(app)
    _explain_tokens(app)
    app.add_middleware(
        Gate,
        doorkeeper=context.doorkeeper,
        hosts=allowed_hosts(parts.host),
        methods=methods_by_path(app.openapi()["paths"]),
        count=context.meters.count,
        access=access,
    )
    return app


def _context(parts: Parts) -> Context:
    board = Board(parts.mirror)

    def render(topic: Topic, caller: Caller) -> bytes | None:
        kind, name = topic
        if kind == "cluster":
            return encode(cluster_event(parts.mirror, board, hub, caller))
        found = [node for node in nodes_json(parts.mirror, holders(board)) if node["id"] == name]
        return encode(found[0]) if found else None

    hub = Hub(parts.mirror, board, parts.store, render)
    token_needed = parts.token_needed or not is_loopback(parts.host)
    return Context(
        parts=parts,
        board=board,
        hub=hub,
        submitter=Submitter(parts, hub, board),
        asker=Asker(parts, hub),
        bench=Bench(),
        meters=Meters(parts.mirror, board),
        doorkeeper=Doorkeeper(parts.mirror, token_needed=token_needed, local_name=parts.local_name),
        progress=Progress(parts.state),
    )


def _explain_tokens(app: FastAPI) -> None:
    """Tokens are looked at before FastAPI sees a request, so it has to be told of them."""
    plain = app.openapi()
    plain.setdefault("components", {})["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
    plain["security"] = [{"token": []}, {}]  # on a loopback address none is needed
    app.openapi_schema = plain


def _explain_errors(app: FastAPI) -> None:
    """Whatever goes wrong has the same shape."""

    @app.exception_handler(ApiError)
    async def refused(request: Request, error: ApiError) -> Response:
        return json_response(error.body(), error.status)

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        return await refused(request, _invalid(error))

    @app.exception_handler(HTTPException)
    async def plain(request: Request, error: HTTPException) -> Response:
        said = ApiError(error.status_code, _code(error.status_code), str(error.detail), "see /api/v1/openapi.json")
        response = await refused(request, said)
        response.headers.update(error.headers or {})
        return response

    @app.exception_handler(StoreError)
    async def store(request: Request, error: StoreError) -> Response:
        return await refused(request, ApiError(503, "store", str(error), "try again in a few seconds"))

    @app.exception_handler(Exception)
    async def broken(request: Request, error: Exception) -> Response:
        said = ApiError(500, "defect", "something broke here; it is in the log", "please report it")
        return await refused(request, said)


def _code(status: int) -> str:
    return {400: "unreadable", 404: "no_such_page", 405: "wrong_method"}.get(status, "refused")


def _invalid(error: RequestValidationError) -> ApiError:
    """The first thing that is wrong, by the name of its field."""
    first = error.errors()[0]
    if first["type"] == "json_invalid":
        return ApiError(400, "unreadable", "the body is not JSON", "send valid JSON")
    where = ".".join(str(part) for part in first["loc"] if part not in ("body", "query", "path", "header"))
    said = str(first["msg"]).removeprefix("Value error, ")
    if (first.get("ctx") or {}).get("pattern") == NAME:
        return ApiError(422, "invalid", f"{where}: {first['input']!r}"[:200], f"needed {NAME_WORDS}")
    message = f"{where}: {said}" if where else said
    return ApiError(422, "invalid", message[:500], "see /api/v1/openapi.json for what is needed")
