"""A watch on etcd that outlives the member it hangs on.

A thread follows the stream of one member. When that ends, or when the member stops answering, it goes on at the next
member from the last revision it has seen, so that no change is missed and none comes twice.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator
from typing import Any

import grpc
from aetcd import rpc

from concertina.core.errors import HistoryGone, StoreError
from concertina.store.base import Closing
from concertina.store.etcd_members import PAUSE_S, Member, Members, explained, is_worth_another_try
from concertina.store.protocol import Change

WAITING = 1024  # batches that may wait for a slow reader; then etcd has to wait
PROBE_S = 1.5  # between two questions whether the member is still there
SILENCE_S = 4.0  # without any answer, after which a member counts as frozen
REQUIRE_LEADER = (("hasleader", "true"),)  # else a member cut off from the others would stay silent for ever


class EtcdWatch(Closing):
    """See protocol.Watch."""

    def __init__(self, members: Members, start: bytes, end: bytes, *, after: int, strip: int) -> None:
        self._members, self._start, self._end, self._strip = members, start, end, strip
        self.revision = after  # of what was handed out
        self._received = after  # of what has arrived
        self._batches: deque[tuple[Change, ...]] = deque()
        self._failure: StoreError | None = None
        self._changed = threading.Condition()
        self._stream: Any = None
        self._heard = 0.0  # when the stream last said anything
        self.closed = False
        self._thread = threading.Thread(target=self._follow, name="etcd-watch", daemon=True)
        self._thread.start()

    def poll(self, limit_s: float) -> tuple[Change, ...]:
        with self._changed:
            self._changed.wait_for(lambda: self._batches or self._failure or self.closed, limit_s)
            if self._batches:
                batch = self._batches.popleft()
                self.revision = batch[-1].revision
                self._changed.notify_all()
                return batch
            if self._failure and not self.closed:
                raise self._failure
            return ()

    def close(self) -> None:
        with self._changed:
            self.closed = True
            stream = self._stream
            self._changed.notify_all()
        if stream is not None:
            stream.cancel()
        self._thread.join()

    def _follow(self) -> None:
        while not self.closed:
            try:
                member = self._members.preferred()
                try:
                    self._follow_one(member)
                except grpc.RpcError as error:
                    if not is_worth_another_try(error):
                        raise explained(error) from error
                if not self.closed:
                    self._members.avoid(member)
            except StoreError as error:
                with self._changed:
                    self._failure = error
                    self._changed.notify_all()
                return
            with self._changed:
                self._changed.wait_for(lambda: self.closed, PAUSE_S)

    def _follow_one(self, member: Member) -> None:
        """Until the stream ends, with an error or without."""
        done = threading.Event()
        self._heard = time.monotonic()
        stream = member.watch.Watch(self._requests(done), metadata=REQUIRE_LEADER)
        with self._changed:
            if self.closed:
                stream.cancel()
            self._stream = stream
        try:
            for answer in stream:
                self._heard = time.monotonic()
                if answer.canceled:
                    self._check_kept(answer)
                    return  # the member has lost its leader
                self._take(answer)
        finally:
            done.set()
            stream.cancel()

    def _requests(self, done: threading.Event) -> Iterator[Any]:
        """The watch, and then a question now and then: nothing else tells a frozen member from a quiet one. gRPC's own
        pings did not: a member stopped with SIGSTOP was still trusted after half a minute."""
        create = rpc.WatchCreateRequest(key=self._start, range_end=self._end, start_revision=self._received + 1)
        yield rpc.WatchRequest(create_request=create)
        while not done.wait(PROBE_S):
            if time.monotonic() - self._heard > SILENCE_S:
                self._stream.cancel()
                return
            yield rpc.WatchRequest(progress_request=rpc.WatchProgressRequest())

    def _check_kept(self, answer: Any) -> None:
        if answer.compact_revision:
            raise HistoryGone(after=self._received, oldest=answer.compact_revision)

    def _take(self, answer: Any) -> None:
        batch = tuple(map(self._change, answer.events))
        if not batch:
            return
        with self._changed:
            self._changed.wait_for(lambda: self.closed or len(self._batches) < WAITING)
            self._received = batch[-1].revision
            self._batches.append(batch)
            self._changed.notify_all()

    def _change(self, event: Any) -> Change:
        deleted = event.type == rpc.Event.DELETE
        key = event.kv.key[self._strip :].decode()
        return Change(key=key, value=None if deleted else event.kv.value, revision=event.kv.mod_revision)
