"""Every request comes through here first: from where, by whom, how large. Then it is counted and noted.

On a loopback address no token is needed, so a page from elsewhere must not be able to speak through the user's own
browser: the Host header must name this server (a name that was bent to 127.0.0.1 does not), a request that a browser
made for another origin is refused, and whatever changes something must be JSON, which a plain form can not send.
"""

import asyncio
import ipaddress
import re
import time
from collections.abc import Callable
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from concertina.server.access import AccessLog
from concertina.server.auth import Doorkeeper, is_loopback
from concertina.server.errors import ApiError

MOST_BYTES = 256 * 1024  # of a request's body
BODY_SECONDS = 10.0
OPEN_PATHS = ("/healthz", "/", "/favicon.ico")  # no secrets there, whoever asks
OPEN_PREFIX = "/static/"
CHANGING = frozenset({"POST", "PUT", "PATCH", "DELETE"})
SECURITY = [
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-resource-policy", b"same-origin"),
]


class Gate:
    """ASGI middleware."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        doorkeeper: Doorkeeper,
        hosts: frozenset[str],
        methods: list[tuple[re.Pattern[str], list[str]]],
        count: Callable[[str, str, int, float], None],
        access: AccessLog,
    ) -> None:
        self._app, self._doorkeeper, self._count, self._access = app, doorkeeper, count, access
        self._hosts, self._methods = hosts, methods

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self._app(scope, receive, send)
            return
        begun, status = time.perf_counter(), 500

        async def note(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", []), *SECURITY, *_caching(scope, message)]
            await send(message)

        try:
            await self._pass(scope, receive, note)
        except ApiError as error:
            await _answer(error, note)
        finally:
            took = time.perf_counter() - begun
            self._count(scope["method"], _route(scope), status, took)
            self._access.write(**_line(scope, status, took))

    async def _pass(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = dict(scope["headers"])
        check_host(headers.get(b"host"), self._hosts)
        check_origin(headers, None if self._doorkeeper.token_needed else scope.get("scheme", "http"))
        path = scope["path"]
        if path not in OPEN_PATHS and not path.startswith(OPEN_PREFIX):
            scope.setdefault("state", {})["caller"] = self._doorkeeper.caller(headers)
        check_method(scope["method"], path, self._methods)
        if scope["method"] in CHANGING:
            check_kind(scope["method"], headers)
            body = await read_body(receive, headers)
            receive = _again(body, receive)
        await self._app(scope, receive, send)


def check_host(host: bytes | None, allowed: frozenset[str]) -> None:
    """`allowed` empty: any name, since tokens decide, and no page of another name has one."""
    name = _host_name((host or b"").decode("latin-1"))
    if not name or (allowed and name not in allowed and not _is_loopback_number(name)):
        raise ApiError(
            403,
            "wrong_host",
            "the Host header does not name this server",
            "use the address that `concertina up` printed",
        )


def _host_name(host: str) -> str:
    """Without its port, in small letters."""
    if host.startswith("["):
        return host.partition("]")[0].lower() + "]"
    return host.partition(":")[0].lower()


def _is_loopback_number(name: str) -> bool:
    try:
        return ipaddress.ip_address(name.strip("[]")).is_loopback
    except ValueError:
        return False


def allowed_hosts(bound: str) -> frozenset[str]:
    """Names under which a server on this address may be called; empty: any."""
    return frozenset({"localhost", _host_name(bound)}) if is_loopback(bound) else frozenset()


def check_origin(headers: dict[bytes, bytes], scheme: str | None) -> None:
    """A browser says where a request comes from; other clients say nothing.

    `scheme` None: any, since where tokens are needed there may be a proxy in front that speaks https.
    """
    origin, site = headers.get(b"origin"), headers.get(b"sec-fetch-site")
    named, _, host = (origin or b"").lower().partition(b"://")
    own = host == headers.get(b"host", b"").lower() and (scheme is None or named == scheme.encode())
    foreign = (origin is not None and not own) or (site is not None and site not in (b"same-origin", b"none"))
    if foreign and not _is_visit(headers):
        raise ApiError(
            403,
            "cross_origin",
            "a page of another origin may not speak to this server",
            "open the dashboard at this server's own address",
        )


def _is_visit(headers: dict[bytes, bytes]) -> bool:
    """Following a link to the dashboard is no harm: nothing reads the answer but the user."""
    return headers.get(b"sec-fetch-mode") == b"navigate" and headers.get(b"origin") is None


def methods_by_path(paths: dict[str, dict[str, Any]]) -> list[tuple[re.Pattern[str], list[str]]]:
    """From the paths of an OpenAPI description."""
    return [
        (re.compile(re.sub(r"\\{[^}]*\\}", "[^/]+", re.escape(path))), sorted(method.upper() for method in methods))
        for path, methods in paths.items()
    ]


def check_method(method: str, path: str, known: list[tuple[re.Pattern[str], list[str]]]) -> None:
    """Before the body is looked at: what is wrong with it does not matter then."""
    for pattern, methods in known:
        if pattern.fullmatch(path) and method not in methods:
            allowed = ", ".join(methods)
            raise ApiError(
                405, "wrong_method", f"{method[:20]} is not for this address", f"use {allowed}", {"allow": allowed}
            )


def check_kind(method: str, headers: dict[bytes, bytes]) -> None:
    kind = headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
    if method != "POST" or kind == b"application/json":  # a browser asks before it sends a DELETE for another page
        return
    raise ApiError(415, "json_needed", "the body's content type is not application/json", "send it as JSON")


async def read_body(receive: Receive, headers: dict[bytes, bytes]) -> bytes:
    """All of it, counted while it comes: a header may lie or be missing."""
    told = headers.get(b"content-length", b"0")
    if not told.isdigit() or int(told[:12]) > MOST_BYTES:
        raise _too_large()
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_SECONDS):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ApiError(400, "cut_off", "the body ended early", "send it again")
                body += message.get("body", b"")
                if len(body) > MOST_BYTES:
                    raise _too_large()
                if not message.get("more_body", False):
                    return bytes(body)
    except TimeoutError:
        raise ApiError(408, "too_slow", f"the body did not come within {BODY_SECONDS:.0f} s", "send it again") from None


def _too_large() -> ApiError:
    return ApiError(
        413, "too_large", f"the body is larger than {MOST_BYTES} bytes", "keep data in files and send their names"
    )


def _again(body: bytes, receive: Receive) -> Receive:
    """A receiver that hands the body out once more."""
    given = False

    async def replay() -> Message:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replay


async def _answer(error: ApiError, send: Send) -> None:
    body = error.body()
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    headers += [(name.encode(), value.encode()) for name, value in error.headers.items()]
    if error.status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    if error.status in (408, 413):
        headers.append((b"connection", b"close"))  # the rest of the body is not wanted
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def _caching(scope: Scope, message: Message) -> list[tuple[bytes, bytes]]:
    if any(name == b"cache-control" for name, _ in message["headers"]) or scope["path"].startswith(OPEN_PREFIX):
        return []
    return [(b"cache-control", b"no-store")]


def _route(scope: Scope) -> str:
    """The path with its names left out, so that there are few of them."""
    route = scope.get("route")
    return str(getattr(route, "path", "")) or "other"


def _line(scope: Scope, status: int, took: float) -> dict[str, Any]:
    caller = scope.get("state", {}).get("caller")
    client = scope.get("client") or ("", 0)
    return {
        "time": round(time.time(), 3),
        "method": scope["method"],
        "path": scope["path"],
        "status": status,
        "ms": round(took * 1000, 2),
        "user": caller.name if caller else None,
        "from": client[0],
    }
