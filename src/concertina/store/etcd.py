"""The store in an etcd cluster, for several machines.

aetcd brings the messages and stubs of etcd's own protocol; they are used here over plain, synchronous gRPC channels, so
that no event loop has to run beside the caller.

A member can die between doing what we asked and saying so. Asking again would then write twice, or report that a
compare-and-set failed which we won. So every write carries its number within this client's *session*, a key of our own
that the same transaction moves forward: a write whose number the session has already passed is not done again, not even
when the first request arrives late, and counts as done at the revision at which the session moved.
"""

from __future__ import annotations

import os
import threading
import time
import uuid
from contextlib import suppress
from math import ceil
from typing import Any

from aetcd import rpc

from concertina.core.errors import LeaseGone, StoreError, StoreUnavailable
from concertina.store.base import BaseStore
from concertina.store.etcd_members import ATTEMPT_S, Member, Members
from concertina.store.etcd_watch import EtcdWatch
from concertina.store.protocol import (
    Entry,
    Guard,
    Lease,
    Listing,
    check_key,
    check_prefix,
    check_ttl,
    check_value,
)

SESSION_TTL = 60  # seconds for which a write can be asked again without being done twice


class EtcdStore(BaseStore):
    """See protocol.Store."""

    def __init__(self, members: Members, prefix: str) -> None:
        self._members = members
        self._keys = f"{prefix}/keys/"
        self._session = Session(members, f"{prefix}/sessions/{uuid.uuid4().hex}".encode())
        self._watches: set[EtcdWatch] = set()
        self._pid = os.getpid()

    @classmethod
    def open(cls, endpoints: tuple[str, ...], prefix: str, *, timeout_s: float = 10.0) -> EtcdStore:
        """Raises StoreUnavailable when no member answers."""
        store = cls(Members(endpoints, timeout_s=timeout_s), prefix)
        try:
            store.get("is anybody there?")
        except BaseException:
            store.close()
            raise
        return store

    def get(self, key: str) -> Entry | None:
        check_key(key)
        answer = self._range(rpc.RangeRequest(key=self._raw(key)))
        return self._entry(answer.kvs[0]) if answer.kvs else None

    def list_prefix(self, prefix: str) -> Listing:
        check_prefix(prefix)
        start = self._raw(prefix)
        answer = self._range(rpc.RangeRequest(key=start, range_end=prefix_end(start)))  # etcd sorts by key
        return Listing(entries=tuple(map(self._entry, answer.kvs)), revision=answer.header.revision)

    def compare_and_set(
        self,
        key: str,
        value: bytes,
        *,
        expected: int | None,
        lease: Lease | None = None,
        guard: Guard | None = None,
    ) -> int | None:
        check_key(key)
        check_value(key, value)
        self._check_process()
        put = rpc.PutRequest(key=self._raw(key), value=value, lease=lease.id if lease else 0)
        return self._session.write(rpc.RequestOp(request_put=put), self._conditions(key, expected, guard), lease)

    def delete(self, key: str, *, expected: int | None = None, guard: Guard | None = None) -> bool:
        check_key(key)
        self._check_process()
        there = rpc.Compare(
            key=self._raw(key), target=rpc.Compare.MOD, result=rpc.Compare.GREATER, mod_revision=0
        )  # so that "done" means "was there", also when asked twice
        delete = rpc.RequestOp(request_delete_range=rpc.DeleteRangeRequest(key=self._raw(key)))
        return self._session.write(delete, [there, *self._conditions(key, expected, guard)], None) is not None

    def grant(self, ttl: float) -> Lease:
        check_ttl(ttl)
        self._check_process()
        return self._members.grant(ceil(ttl))

    def keep_alive(self, lease: Lease) -> None:
        self._check_process()
        self._members.keep_alive(lease)

    def revoke(self, lease: Lease) -> None:
        self._check_process()
        self._members.revoke(lease)

    def watch(self, prefix: str, *, after: int) -> EtcdWatch:
        check_prefix(prefix)
        self._check_process()
        start = self._raw(prefix)
        watch = EtcdWatch(self._members, start, prefix_end(start), after=after, strip=len(self._keys.encode()))
        self._watches = {old for old in self._watches if not old.closed} | {watch}
        return watch

    def close(self) -> None:
        for watch in self._watches:
            watch.close()
        if os.getpid() == self._pid:  # a fork's copy of the channels belongs to the parent
            self._session.end()
            self._members.close()

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise StoreError("this store was opened in another process: open it again after a fork")

    def _raw(self, key: str) -> bytes:
        return (self._keys + key).encode()

    def _range(self, request: Any) -> Any:
        self._check_process()
        return self._members.call(lambda member, limit_s: member.kv.Range(request, timeout=limit_s))

    def _entry(self, kv: Any) -> Entry:
        key = kv.key.decode().removeprefix(self._keys)
        return Entry(key=key, value=kv.value, revision=kv.mod_revision, lease=kv.lease or None)

    def _conditions(self, key: str, expected: int | None, guard: Guard | None) -> list[Any]:
        wanted = [(key, expected)] if expected is not None else []
        wanted += [(guard.key, guard.revision)] if guard else []
        return [
            rpc.Compare(
                key=self._raw(name), target=rpc.Compare.MOD, result=rpc.Compare.EQUAL, mod_revision=revision
            )  # a key that is not there has revision 0
            for name, revision in wanted
        ]


class Session:
    """Numbers this client's writes, so that each is done at most once however often it is sent."""

    def __init__(self, members: Members, key: bytes) -> None:
        self._members, self._key = members, key
        self._number = 0
        self._lease: Lease | None = None
        self._kept = 0.0  # when its lease was last known to be whole
        self._lock = threading.Lock()  # the numbers must arrive in order

    def write(self, operation: Any, conditions: list[Any], lease: Lease | None) -> int | None:
        """The revision of the write, or None when a condition did not hold."""
        with self._lock:
            self._keep()
            attempt = self._attempt(operation, conditions, lease)
            if attempt is None:  # the session ran out unseen, before this write: begin another one
                self._lease = None
                self._keep()
                attempt = self._attempt(operation, conditions, lease)
            if attempt is None:
                raise StoreUnavailable("the session with etcd ran out twice in a row: is this machine overloaded?")
            return attempt or None

    def end(self) -> None:
        with self._lock:
            if self._lease is not None:
                with suppress(StoreError):  # it runs out by itself, so this is not worth a long wait
                    self._members.revoke(self._lease, timeout_s=ATTEMPT_S)
                self._lease = None

    def _attempt(self, operation: Any, conditions: list[Any], lease: Lease | None) -> int | None:
        """The revision, 0 when a condition did not hold, None when there is no session."""
        self._number += 1
        number = b"%020d" % self._number  # etcd compares bytes
        try:
            answer, sent = self._transact(number, conditions, [operation, self._mark(number)])
        except LeaseGone:  # not the session's: its key goes with its lease, and without that key nothing is done
            raise LeaseGone(lease.id if lease else 0) from None
        if answer.succeeded:
            return int(answer.header.revision)
        if sent == 1:
            return 0 if answer.responses[0].response_range.kvs else None
        return self._settle(number)

    def _settle(self, number: bytes) -> int:
        """Refused, but not at the first time of asking: an earlier request may have been done, its answer lost, or may
        still be on its way. Move the session past it, if it is not there yet; then we know."""
        settled = number + b"-"  # above this number, below the next
        answer, _ = self._transact(number, [], [self._mark(settled)])
        reached = [] if answer.succeeded else answer.responses[0].response_range.kvs
        if answer.succeeded or (reached and reached[0].value == settled):
            return 0
        if not reached:
            raise StoreUnavailable("etcd was away for so long that it is not known whether the last write was done")
        return int(reached[0].mod_revision)

    def _transact(self, number: bytes, conditions: list[Any], operations: list[Any]) -> tuple[Any, int]:
        """Do it unless the session has come to `number` already. The answer, and how often it was asked for."""
        request = rpc.TxnRequest(
            compare=[
                rpc.Compare(key=self._key, target=rpc.Compare.VALUE, result=rpc.Compare.LESS, value=number),
                *conditions,
            ],
            success=operations,
            failure=[rpc.RequestOp(request_range=rpc.RangeRequest(key=self._key))],
        )
        sent = 0

        def send(member: Member, limit_s: float) -> Any:
            nonlocal sent
            sent += 1
            return member.kv.Txn(request, timeout=limit_s)

        return self._members.call(send), sent

    def _mark(self, number: bytes) -> Any:
        assert self._lease is not None
        return rpc.RequestOp(request_put=rpc.PutRequest(key=self._key, value=number, lease=self._lease.id))

    def _keep(self) -> None:
        """A session of its own lease, kept whole by whoever writes."""
        now = time.monotonic()
        if self._lease is not None and now - self._kept > SESSION_TTL / 3:
            try:
                self._members.keep_alive(self._lease)
                self._kept = now
            except LeaseGone:
                self._lease = None
        if self._lease is None:
            lease = self._members.grant(SESSION_TTL)
            put = rpc.PutRequest(key=self._key, value=b"%020d" % self._number, lease=lease.id)
            self._members.call(lambda member, limit_s: member.kv.Put(put, timeout=limit_s))
            self._lease, self._kept = lease, now


def prefix_end(prefix: bytes) -> bytes:
    """The first key behind all that start with `prefix`; ours never consist of 0xff alone."""
    return prefix[:-1] + bytes([prefix[-1] + 1])
