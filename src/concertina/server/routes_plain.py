"""What is not under /api: health, Prometheus, the dashboard's files."""

import asyncio
import gzip
import re
import time
from functools import cache
from importlib import resources, util
from pathlib import Path as FilePath

from fastapi import APIRouter, Request, Response

from concertina import __version__
from concertina.server.answers import ERRORS, json_response
from concertina.server.context import Admin, Here
from concertina.server.errors import ApiError
from concertina.server.models import HealthBody
from concertina.server.views import encode

router = APIRouter(responses={status: said for status, said in ERRORS.items() if status in (401, 403, 404)})
STALE_SECONDS = 5.0
KINDS = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".json": "application/json",
    ".svg": "image/svg+xml",
    ".png": "image/png",
    ".ico": "image/x-icon",
    ".woff2": "font/woff2",
}
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data: blob:; "
    "connect-src 'self'; font-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
_FILE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*(\.[A-Za-z0-9_-]+)+")
PLOTLY = "plotly.min.js"


@router.get(
    "/healthz", response_model=HealthBody, responses={503: {"model": HealthBody, "description": "It is not well"}}
)
async def healthz(here: Here) -> Response:
    """200 if the store answers and a controller is in office."""
    since = here.parts.mirror.stale_since
    stale = 0.0 if since is None else time.monotonic() - since
    plain = {
        "ok": here.hub.led and stale < STALE_SECONDS,
        "leader": here.hub.led,
        "stale_s": round(stale, 3),
        "revision": here.parts.mirror.revision,
        "version": __version__,
    }
    return json_response(encode(plain), 200 if plain["ok"] else 503)


@router.get(
    "/metrics",
    response_class=Response,
    responses={200: {"content": {"text/plain": {"schema": {"type": "string"}}}}},
)
async def metrics(here: Here, who: Admin) -> Response:
    """For Prometheus."""
    since = here.parts.mirror.stale_since
    here.meters.streams.set(here.hub.clients)
    here.meters.leader.set(float(here.hub.led))
    here.meters.stale.set(0.0 if since is None else time.monotonic() - since)
    text = await asyncio.to_thread(here.meters.text)
    return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")


@router.get("/", include_in_schema=False)
async def page(request: Request) -> Response:
    return await _file("index.html", request)


@router.get("/static/{name}", include_in_schema=False)
async def static(name: str, request: Request) -> Response:
    return await _file(name, request)


async def _file(name: str, request: Request) -> Response:
    found = await asyncio.to_thread(_load, name) if _FILE.fullmatch(name) else None
    if found is None:
        raise ApiError(404, "no_such_file", f"there is no file {name!r} here", "the dashboard is at /")
    body, packed, tag = found
    kind = KINDS[FilePath(name).suffix]
    headers = {
        "etag": tag,
        "cache-control": "no-cache",
        "vary": "accept-encoding",
        "content-security-policy": POLICY,
    }
    if request.headers.get("if-none-match") == tag:
        return Response(status_code=304, headers=headers)
    if packed and "gzip" in request.headers.get("accept-encoding", ""):
        return Response(packed, headers={**headers, "content-encoding": "gzip"}, media_type=kind)
    return Response(body, headers=headers, media_type=kind)


def _load(name: str) -> tuple[bytes, bytes, str] | None:
    """The file, the same packed, and its tag; None if it is none of ours."""
    path = _plotly() if name == PLOTLY else FilePath(str(resources.files("concertina.server"))) / "page" / name
    if path is None or path.suffix not in KINDS or not path.is_file():
        return None
    found = path.stat()
    return _packed(path, found.st_mtime_ns, found.st_size)


@cache
def _packed(path: FilePath, changed: int, size: int) -> tuple[bytes, bytes, str]:
    body = path.read_bytes()
    packed = gzip.compress(body, 6) if path.suffix in (".html", ".css", ".js", ".json", ".svg") else b""
    return body, packed, f'"{changed:x}-{size:x}"'


@cache
def _plotly() -> FilePath | None:
    """Inside the wheel; the package itself is large and is not imported."""
    found = util.find_spec("plotly")
    if found is None or found.origin is None:
        return None
    return FilePath(found.origin).parent / "package_data" / PLOTLY
