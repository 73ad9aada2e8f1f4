"""Answers as ready-made bytes, and the ways in which every request may be refused."""

from typing import Any

from fastapi import Response

from concertina.server.models import ErrorBody

_SAID = {
    400: "Not readable, or it makes no sense",
    401: "A token is needed, or the one given is wrong",
    403: "Not for you",
    404: "Not there, or not yours",
    405: "Not with this method",
    408: "The body came too slowly",
    409: "Refused: the reason is in the message",
    413: "The body is too large",
    415: "The body is not JSON",
    422: "Not valid: the message names the field",
    429: "A quota is used up",
    503: "Nobody is there to decide, or the store does not answer",
}
ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorBody, "description": said} for status, said in _SAID.items()
}

_EVENT = {
    "type": "object",
    "description": "one event",
    "properties": {name: {"type": "string"} for name in ("id", "event", "data")},
    "required": ["data"],
}
STREAM: dict[int | str, dict[str, Any]] = {
    200: {"description": "Events, as they happen", "content": {"text/event-stream": {"schema": _EVENT}}}
}


def json_response(body: bytes, status: int = 200) -> Response:
    return Response(body, status_code=status, media_type="application/json")
