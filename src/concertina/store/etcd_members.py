"""The members of an etcd cluster: which one we talk to, and how long we go on trying."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

import grpc
from aetcd import rpc

from concertina.core.errors import LeaseGone, StoreError, StoreUnavailable
from concertina.store.protocol import Lease

ATTEMPT_S = 1.0  # for one member to answer before another is asked; a write asked twice is done once
PAUSE_S = 0.05  # between two rounds of asking
# The member may have done what was asked, or not: only what is safe to ask again may be asked again.
AGAIN = {
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.CANCELLED,
    grpc.StatusCode.ABORTED,
    grpc.StatusCode.INTERNAL,
    grpc.StatusCode.UNKNOWN,
}
OPTIONS = [
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.max_receive_message_length", -1),  # a listing may be long
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_http_proxy", 0),  # a cluster's own members are not behind the proxy for the web
]
Answer = TypeVar("Answer")


class Member:
    """One channel with its stubs; it connects when it is first used."""

    def __init__(self, endpoint: str) -> None:
        self.endpoint = endpoint
        self.channel = grpc.insecure_channel(endpoint, options=OPTIONS)
        self.kv, self.lease, self.watch = (
            rpc.KVStub(self.channel),
            rpc.LeaseStub(self.channel),
            rpc.WatchStub(self.channel),
        )


class Members:
    """All of them; one is preferred until it fails."""

    def __init__(self, endpoints: tuple[str, ...], *, timeout_s: float) -> None:
        self._members = [Member(endpoint) for endpoint in endpoints]
        self._timeout_s = timeout_s
        self._preferred = 0
        self._lock = threading.Lock()
        self.closed = False

    def preferred(self) -> Member:
        with self._lock:
            if self.closed:
                raise StoreError("this store is closed: open it again")
            return self._members[self._preferred]

    def avoid(self, member: Member) -> None:
        """It failed: prefer the next one, unless somebody has changed over already."""
        with self._lock:
            if self._members[self._preferred] is member:
                self._preferred = (self._preferred + 1) % len(self._members)

    def call(self, request: Callable[[Member, float], Answer], *, timeout_s: float | None = None) -> Answer:
        """Ask one member after another until one answers or the time is over."""
        timeout_s = self._timeout_s if timeout_s is None else timeout_s
        until = time.monotonic() + timeout_s
        failures = 0
        while True:
            member = self.preferred()
            try:
                return request(member, max(0.01, min(ATTEMPT_S, until - time.monotonic())))
            except grpc.RpcError as error:
                if not is_worth_another_try(error):
                    raise explained(error) from error
                self.avoid(member)
                failures += 1
                if time.monotonic() + PAUSE_S >= until:
                    names = ", ".join(member.endpoint for member in self._members)
                    raise StoreUnavailable(
                        f"etcd at {names} gave no answer within {timeout_s:g} s ({error.details()}): "
                        "is it running, with more than half of its members?"
                    ) from error
            if failures % len(self._members) == 0:
                time.sleep(PAUSE_S)

    def grant(self, ttl: int) -> Lease:
        request = rpc.LeaseGrantRequest(TTL=ttl)
        # Asked twice it leaves a lease behind that nobody keeps alive.
        answer: Any = self.call(lambda member, limit_s: member.lease.LeaseGrant(request, timeout=limit_s))
        return Lease(id=answer.ID, ttl=float(answer.TTL))

    def keep_alive(self, lease: Lease) -> None:
        request = rpc.LeaseKeepAliveRequest(ID=lease.id)

        def ask(member: Member, limit_s: float) -> Any:
            stream = member.lease.LeaseKeepAlive(iter([request]), timeout=limit_s)
            try:
                return next(stream)
            except StopIteration:  # the member went down in good order
                raise EndOfStream from None
            finally:
                stream.cancel()

        if self.call(ask).TTL <= 0:
            raise LeaseGone(lease.id)

    def revoke(self, lease: Lease, *, timeout_s: float | None = None) -> None:
        request = rpc.LeaseRevokeRequest(ID=lease.id)
        with suppress(LeaseGone):
            self.call(lambda member, limit_s: member.lease.LeaseRevoke(request, timeout=limit_s), timeout_s=timeout_s)

    def close(self) -> None:
        with self._lock:
            self.closed = True
        for member in self._members:
            member.channel.close()


class EndOfStream(grpc.RpcError):  # type: ignore[misc]  # grpc has no types
    """A stream ended without an answer and without an error."""

    def code(self) -> grpc.StatusCode:
        return grpc.StatusCode.UNAVAILABLE

    def details(self) -> str:
        return "the stream ended early"


def is_worth_another_try(error: grpc.RpcError) -> bool:
    return error.code() in AGAIN


def explained(error: grpc.RpcError) -> StoreError:
    """What etcd refused."""
    if error.code() is grpc.StatusCode.NOT_FOUND and "lease" in error.details():
        return LeaseGone(0)
    return StoreError(f"etcd refused: {error.details()} ({error.code().name})")
