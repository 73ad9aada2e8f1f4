"""A request becomes a job: checked, named, counted against the user's limits, written down once."""

import asyncio
import base64
import hashlib
import json
import os
import re
import secrets
from dataclasses import asdict, replace

from concertina.cluster import keys
from concertina.cluster.codec import dump, load
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
from concertina.store.protocol import ABSENT, Store

SLUG = 40  # characters


def slug(name: str) -> str:
    """A name made fit for a file, an address and a key."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:SLUG].strip("-") or "job"


def _random_letters() -> str:
    """Eight of them, nearly 40 bits. There is a digit among them, so that no word of a sentence looks like an id."""
    while (found := base64.b32encode(secrets.token_bytes(5)).decode().lower()).isalpha():
        pass
    return found


def make_request(ask: JobAsk, user: str, now: float, key: str) -> JobRequest:
    stem = os.path.basename(ask.script).removesuffix(".py")
    name = ask.name or slug(stem)
    return JobRequest(
        id=f"{slug(name)}-{_random_letters()}",
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


def write_once(store: Store, request: JobRequest, refusal: ApiError | None) -> str:
    """The id of the job. With an idempotency key the same job, however often and from wherever it is sent: a
    `refusal` holds for new jobs only. Raises ApiError. Talks to the store: call it from a thread."""
    if request.idempotency:
        known = _known(store, request)
        if known is None and refusal is None:
            known = _note_key(store, request)
        if known is not None:
            request = replace(request, id=known)
            if store.get(keys.REQUESTS + known) is not None:
                return known
    if refusal is not None:
        raise refusal
    if store.compare_and_set(keys.REQUESTS + request.id, dump(request), expected=ABSENT) is None:
        there = store.get(keys.REQUESTS + request.id)
        twin = load(JobRequest, there.value) if there is not None else None
        if twin is None or (twin.user, twin.idempotency) != (request.user, request.idempotency or None):
            raise ApiError(503, "id_taken", f"another job has the id {request.id}", "send it again")
    return request.id


def _known(store: Store, request: JobRequest) -> str | None:
    """The job that this key stands for already."""
    entry = store.get(_key_name(request))
    if entry is None:
        return None
    note = json.loads(entry.value)
    if note["asked"] != fingerprint(request):
        raise ApiError(
            409,
            "key_reused",
            f"this idempotency key stands for job {note['job']} already, and this is another job",
            "use a new key for each job",
        )
    return str(note["job"])


def _note_key(store: Store, request: JobRequest) -> str | None:
    """Notes what the key stands for, before the job is there: whoever comes later finishes what breaks off here."""
    note = json.dumps({"job": request.id, "asked": fingerprint(request)}).encode()
    won = store.compare_and_set(_key_name(request), note, expected=ABSENT)
    return request.id if won is not None else _known(store, request)


def _key_name(request: JobRequest) -> str:
    return keys.submission_key(request.user, request.idempotency)


class Submitter:
    """Lives in the event loop."""

    def __init__(self, parts: Parts, hub: Hub, board: Board) -> None:
        self._parts, self._hub, self._board = parts, hub, board
        self._mirror: Mirror = parts.mirror
        self._pending: dict[str, JobRequest] = {}  # written, not in the mirror yet

    def owner(self, ask: JobAsk, caller: Caller) -> str:
        if ask.user is not None and not caller.may_see(ask.user):
            raise not_admin("submit for somebody else")
        return ask.user or caller.name

    async def check(self, ask: JobAsk, caller: Caller, key: str = "") -> JobRequest:
        """The job that this would be. Raises ApiError."""
        owner = self.owner(ask, caller)
        await asyncio.to_thread(self._check_files, ask)
        return make_request(ask, owner, self._parts.clock(), key)

    def _check_files(self, ask: JobAsk) -> None:
        check_script(ask.script, self._parts.script_roots)
        if ask.cwd is not None:
            check_folder(ask.cwd)

    async def submit(self, ask: JobAsk, caller: Caller, key: str) -> str:
        """The id of the job, in the store and in the mirror."""
        request = await self.check(ask, caller, key)
        refusal = self._refusal(request)
        if refusal is None:
            self._pending[request.id] = request  # counted from now on: another may come before this one is written
        try:
            job_id = await asyncio.to_thread(write_once, self._parts.store, request, refusal)
            await self._in_mirror(job_id)
        finally:
            self._pending.pop(request.id, None)
        return job_id

    async def _in_mirror(self, job_id: str) -> None:
        if not await self._hub.until(lambda: self._board.card(job_id) is not None, self._parts.answer_s):
            raise ApiError(
                503,
                "store_slow",
                f"job {job_id} was submitted but the store does not show it yet",
                f"look for it with GET /api/v1/jobs/{job_id}",
            )

    def _refusal(self, request: JobRequest) -> ApiError | None:
        """By the owner's limits: an admin who submits for somebody is bound by theirs."""
        user = next((user for user in self._mirror.users() if user.name == request.user), None)
        if user is None or not (user.max_jobs or user.max_slots or user.max_gpu_hours):
            return None
        try:
            spent = self._mirror.spent(user.name)
            check_quota(user, usage_of(user.name, self._mirror.jobs(), self._pending.values(), spent), request)
        except ApiError as error:
            return error
        return None

    async def answer(self, job_id: str, limit_s: float) -> bool:
        """Waits for the controller's word, if there is one in office."""
        if not self._hub.led:
            return decided(self._mirror.job(job_id))
        return await self._hub.until(lambda: decided(self._mirror.job(job_id)), limit_s)
