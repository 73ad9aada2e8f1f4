"""Who you are, and users with their limits."""

import asyncio
from typing import Annotated, Any

from fastapi import APIRouter, Path, Response

from concertina.cluster.records import User
from concertina.server.answers import ERRORS, json_response
from concertina.server.auth import Caller, remove_user, renew_user
from concertina.server.context import Admin, Here, Who
from concertina.server.errors import ApiError
from concertina.server.models import Name, NewUserBody, SessionBody, UserAsk, UserBody, UserPage
from concertina.server.views import encode

router = APIRouter(prefix="/api/v1", tags=["people"], responses=ERRORS)
NO_USER = User(name="", token="")


@router.get("/session", response_model=SessionBody)
async def session(here: Here, who: Who) -> Response:
    """Who you are here, and what you may have."""
    return json_response(encode(_session(who, here.doorkeeper.token_needed)))


def _session(who: Caller, token_needed: bool) -> dict[str, Any]:
    return {"user": who.name, "admin": who.admin, "token_needed": token_needed, **_limits(who.user or NO_USER)}


def _limits(user: User) -> dict[str, Any]:
    return {"max_jobs": user.max_jobs, "max_slots": user.max_slots, "max_gpu_hours": user.max_gpu_hours}


@router.get("/users", response_model=UserPage)
async def users(here: Here, who: Admin) -> Response:
    items = [_user(user) for user in here.parts.mirror.users()]
    return json_response(encode({"items": items, "total": len(items), "next": None}))


@router.post("/users", status_code=201, response_model=NewUserBody)
async def add(ask: UserAsk, here: Here, who: Admin) -> Response:
    """Make a user, or give one a new token. The old one is void at once; of the limits, those that are not said again
    stay as they were."""
    user, token = await asyncio.to_thread(renew_user, here.parts.store, **ask.model_dump())
    return json_response(encode({**_user(user), "token": token}), 201)


@router.delete("/users/{name}", response_model=UserBody)
async def remove(name: Annotated[Name, Path()], here: Here, who: Admin) -> Response:
    """Their token is void at once; their jobs stay."""
    found = [user for user in here.parts.mirror.users() if user.name == name]
    if not found or not await asyncio.to_thread(remove_user, here.parts.store, name):
        raise ApiError(404, "no_such_user", f"there is no user {name!r}", "list them with GET /api/v1/users")
    return json_response(encode(_user(found[0])))


def _user(user: User) -> dict[str, Any]:
    return {"name": user.name, "admin": user.admin, **_limits(user)}
