"""A request becomes a job: checked, named, counted against the user's limits, written down once."""

import asyncio
import hashlib
import json
import os
import re
import secrets
from dataclasses import asdict

from concertina.cluster import keys
from concertina.cluster.codec import dump
from concertina.cluster.mirror import Job, Mirror
from concertina.cluster.records import JobRequest
from concertina.core.job import JobPhase
from concertina.server.auth import Caller
from concertina.server.board import Board
from concertina.server.errors import ApiError, not_admin
from concertina.server.events import Hub
from concertina.server.limits import check_quota, usage_of
from concertina.server.models import JobAsk
from concertina.server.parts import Parts
from concertina.server.scripts import check_folder, check_script
from concertina.store.protocol import ABSENT

SLUG = 40  # characters
TRIES = 4


def slug(name: str) -> str:
    """A name made fit for a file, an address and a key."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:SLUG].strip("-") or "job"


def make_request(ask: JobAsk, user: str, now: float, key: str) -> JobRequest:
    stem = os.path.basename(ask.script).removesuffix(".py")
    name = ask.name or slug(stem)
    return JobRequest(
        id=f"{slug(name)}-{secrets.token_hex(3)}",
        name=name,
        user=user,
        script=ask.script,
        args=tuple(ask.args),
        cwd=ask.cwd or os.path.dirname(ask.script),
        virtual=ask.virtual,
        min_workers=ask.min_workers,
        max_workers=ask.max_workers,
        steps=ask.steps,
        deadline_s=ask.due,
        soft=ask.soft,
        scaling=ask.scaling,
        level=ask.level,
        submitted_s=now,
        idempotency=key,
    )


def fingerprint(request: JobRequest) -> str:
    """Of what was asked, without what differs each time."""
    plain = asdict(request)
    for field in ("id", "submitted_s", "idempotency"):
        del plain[field]
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()


def decided(job: Job | None) -> bool:
    """Whether the controller has said something about it."""
    return job is not None and (job.state.phase is not JobPhase.SUBMITTED or job.state.profiling)


class Submitter:
    """Lives in the event loop."""

    def __init__(self, parts: Parts, hub: Hub, board: Board) -> None:
        self._parts, self._hub, self._board = parts, hub, board
        self._mirror: Mirror = parts.mirror
        self._pending: dict[str, JobRequest] = {}  # written, not in the mirror yet
        self._lock = asyncio.Lock()  # limits are looked at and used up in one go

    def owner(self, ask: JobAsk, caller: Caller) -> str:
        if ask.user is not None and not caller.may_see(ask.user):
            raise not_admin("submit for somebody else")
        return ask.user or caller.name

    async def check(self, ask: JobAsk, caller: Caller, key: str = "") -> JobRequest:
        """The job that this would be. Raises ApiError."""
        owner = self.owner(ask, caller)
        await asyncio.to_thread(check_script, ask.script, self._parts.script_roots)
        if ask.cwd is not None:
            await asyncio.to_thread(check_folder, ask.cwd)
        return make_request(ask, owner, self._parts.clock(), key)

    async def submit(self, ask: JobAsk, caller: Caller, key: str) -> str:
        """The id of the job, in the store and in the mirror."""
        request = await self.check(ask, caller, key)
        if key:
            return await self._once(request, caller)
        return await self._write(request, caller)

    async def _once(self, request: JobRequest, caller: Caller) -> str:
        """With an idempotency key: the same job again, however often and from wherever it is sent."""
        name = hashlib.sha256(f"{request.user}\0{request.idempotency}".encode()).hexdigest()
        note = json.dumps({"job": request.id, "asked": fingerprint(request)}).encode()
        entry = await asyncio.to_thread(self._parts.store.get, keys.SUBMISSIONS + name)
        if entry is None:
            self._check_quota(request, caller)
            put = self._parts.store.compare_and_set
            won = await asyncio.to_thread(put, keys.SUBMISSIONS + name, note, expected=ABSENT)
            if won is None:
                entry = await asyncio.to_thread(self._parts.store.get, keys.SUBMISSIONS + name)
        if entry is not None:
            known = json.loads(entry.value)
            if known["asked"] != fingerprint(request):
                raise ApiError(
                    409,
                    "key_reused",
                    f"this idempotency key stands for job {known['job']} already, and this is another job",
                    "use a new key for each job",
                )
            request = JobRequest(**{**asdict(request), "id": known["job"], "args": request.args})
            if await asyncio.to_thread(self._parts.store.get, keys.REQUESTS + request.id) is not None:
                await self._in_mirror(request.id)
                return request.id
        return await self._write(request, caller)

    async def _write(self, request: JobRequest, caller: Caller) -> str:
        put = self._parts.store.compare_and_set
        async with self._lock:
            self._check_quota(request, caller)
            self._pending[request.id] = request
        try:
            await asyncio.to_thread(put, keys.REQUESTS + request.id, dump(request), expected=ABSENT)
            await self._in_mirror(request.id)
        finally:
            self._pending.pop(request.id, None)
        return request.id

    async def _in_mirror(self, job_id: str) -> None:
        if not await self._hub.until(lambda: self._board.card(job_id) is not None, self._parts.answer_s):
            raise ApiError(
                503,
                "store_slow",
                f"job {job_id} was submitted but the store does not show it yet",
                f"look for it with GET /api/v1/jobs/{job_id}",
            )

    def _check_quota(self, request: JobRequest, caller: Caller) -> None:
        """The owner's limits; an admin who submits for somebody is bound by theirs."""
        users = {user.name: user for user in self._mirror.users()}
        user = users.get(request.user)
        if user is None or not (user.max_jobs or user.max_slots or user.max_gpu_hours):
            return
        check_quota(user, usage_of(user.name, self._mirror.jobs(), self._pending.values()), request)

    async def answer(self, job_id: str, limit_s: float) -> bool:
        """Waits for the controller's word, if there is one in office."""
        if not self._hub.led:
            return decided(self._mirror.job(job_id))
        return await self._hub.until(lambda: decided(self._mirror.job(job_id)), limit_s)
