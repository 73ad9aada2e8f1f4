"""The store in one file, for all processes of one machine. Standard library only.

Write-ahead log, so that readers never wait for a writer. Every change is one transaction and is on the disk before the
call returns. A lease is a row with the time at which it runs out, by the machine's clock since boot; whoever comes
first after that time, reader, writer or watcher, deletes its keys.
"""

from __future__ import annotations

import os
import sqlite3
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from concertina.core.errors import HistoryGone, LeaseGone, StoreAddressError, StoreError, StoreUnavailable
from concertina.store.base import BaseStore, Closing
from concertina.store.clock import boot_id, since_boot
from concertina.store.protocol import (
    KEEP_BYTES,
    KEEP_CHANGES,
    Change,
    Clock,
    Entry,
    Guard,
    Lease,
    Listing,
    check_key,
    check_prefix,
    check_ttl,
    check_value,
)

FORMAT = 1
APPLICATION = 0x436E6372  # "Cncr": so that somebody else's database is not taken for a store
POLL_S = 0.01  # between two looks of a watch; a look costs a few microseconds
TRIM_EVERY = 64  # changes
LAST = "\U0010ffff"  # behind every printable character: closes the range of a prefix

SCHEMA = """
CREATE TABLE entries (key TEXT PRIMARY KEY, value BLOB NOT NULL, revision INTEGER NOT NULL, lease INTEGER);
CREATE INDEX entries_of_lease ON entries (lease) WHERE lease IS NOT NULL;
CREATE TABLE leases (
  id INTEGER PRIMARY KEY AUTOINCREMENT, ttl REAL NOT NULL, expires REAL NOT NULL, boot TEXT NOT NULL);
CREATE TABLE changes (revision INTEGER PRIMARY KEY AUTOINCREMENT, key TEXT NOT NULL, value BLOB);
"""


class SqliteFile:
    """One connection to the file: transactions, and leases that run out. Used by one thread at a time."""

    def __init__(self, path: Path, connection: sqlite3.Connection, clock: Clock, boot: str, keep_changes: int) -> None:
        self.path, self.clock, self.boot, self.keep_changes = path, clock, boot, keep_changes
        self.connection = connection
        self._pid = os.getpid()
        self._identity = _identity(path)

    @contextmanager
    def transaction(self, kind: str) -> Iterator[sqlite3.Connection]:
        """All or nothing. `IMMEDIATE` to write: the lock is taken at once, so that nobody reads what will change."""
        if os.getpid() != self._pid:
            raise StoreError(f"store {self.path} was opened in another process: open it again after a fork")
        if _identity(self.path) != self._identity:  # else two halves of a cluster would each have a leader
            raise StoreError(f"store {self.path} was removed or replaced while it was open: stop all that use it")
        try:
            self.connection.execute(f"BEGIN {kind}")
            try:
                yield self.connection
                self.connection.execute("COMMIT")
            except BaseException:
                if self.connection.in_transaction:
                    self.connection.execute("ROLLBACK")
                raise
        except sqlite3.Error as error:
            raise _explained(self.path, error) from error

    @contextmanager
    def writing(self) -> Iterator[sqlite3.Connection]:
        with self.transaction("IMMEDIATE") as connection:
            self._end_leases(connection)
            yield connection

    @contextmanager
    def reading(self) -> Iterator[sqlite3.Connection]:
        with self.transaction("DEFERRED") as connection:
            over = self._is_some_lease_over(connection)
            if not over:
                yield connection
        if over:  # to say so is to write it, else a reader would see what no watch is told
            with self.writing() as connection:
                yield connection

    def changed(self) -> int:
        """Another number whenever some other connection, in whatever process, has changed the file."""
        try:
            (count,) = self.connection.execute("PRAGMA data_version").fetchone()
        except sqlite3.Error as error:
            raise _explained(self.path, error) from error
        assert isinstance(count, int)
        return count

    def _is_some_lease_over(self, connection: sqlite3.Connection) -> bool:
        rows = connection.execute(
            "SELECT 1 FROM leases WHERE expires <= ? OR boot != ? LIMIT 1", (self.clock(), self.boot)
        )
        return rows.fetchone() is not None

    def _end_leases(self, connection: sqlite3.Connection) -> None:
        now = self.clock()
        # Times of another boot mean nothing now. Such a lease gets its whole time once more: right after a restart of
        # the machine, and not harmful should another machine share this file against all advice.
        connection.execute("UPDATE leases SET boot = ?, expires = ? + ttl WHERE boot != ?", (self.boot, now, self.boot))
        over = connection.execute("SELECT id FROM leases WHERE expires <= ? ORDER BY expires, id", (now,)).fetchall()
        for (lease,) in over:
            self.end_lease(connection, lease)

    def end_lease(self, connection: sqlite3.Connection, lease: int) -> None:
        connection.execute("DELETE FROM leases WHERE id = ?", (lease,))
        for (key,) in connection.execute("SELECT key FROM entries WHERE lease = ? ORDER BY key", (lease,)).fetchall():
            self.remove(connection, key)

    def remove(self, connection: sqlite3.Connection, key: str) -> None:
        connection.execute("DELETE FROM entries WHERE key = ?", (key,))
        self.record(connection, key, None)

    def record(self, connection: sqlite3.Connection, key: str, value: bytes | None) -> int:
        revision = connection.execute("INSERT INTO changes (key, value) VALUES (?, ?)", (key, value)).lastrowid
        assert revision is not None
        if revision % min(TRIM_EVERY, self.keep_changes) == 0:
            self._trim(connection, revision)
        return revision

    def _trim(self, connection: sqlite3.Connection, revision: int) -> None:
        connection.execute("DELETE FROM changes WHERE revision <= ?", (revision - self.keep_changes,))
        sizes = connection.execute("SELECT revision, coalesce(length(value), 0) FROM changes ORDER BY revision DESC")
        kept = 0
        for oldest, size in sizes.fetchall():
            kept += size
            if kept > KEEP_BYTES:
                connection.execute("DELETE FROM changes WHERE revision <= ?", (oldest,))
                return


def connect(
    path: Path, *, timeout_s: float, clock: Clock, boot: str, keep_changes: int, synced: bool = True
) -> SqliteFile:
    """Opens the file and makes it a store if it is new."""
    try:
        connection = sqlite3.connect(path, timeout=timeout_s, isolation_level=None, check_same_thread=False)
    except sqlite3.Error as error:
        raise _unopened(path, error) from error
    try:
        _use_write_ahead_log(connection, time.monotonic() + timeout_s)
        # FULL: acknowledged means on the disk, also when the power fails.
        connection.execute(f"PRAGMA synchronous = {'FULL' if synced else 'OFF'}")
        _make_tables(path, connection)
    except sqlite3.Error as error:
        connection.close()
        raise _unopened(path, error) from error
    except BaseException:
        connection.close()
        raise
    return SqliteFile(path, connection, clock, boot, keep_changes)


def _use_write_ahead_log(connection: sqlite3.Connection, until: float) -> None:
    """SQLite does not wait for others here, whatever its time-out says; so we do."""
    while True:
        try:
            (mode,) = connection.execute("PRAGMA journal_mode = WAL").fetchone()
        except sqlite3.OperationalError as error:
            if not _is_busy(error) or time.monotonic() > until:
                raise
            time.sleep(POLL_S)
            continue
        if mode != "wal":
            raise sqlite3.OperationalError(f"its file system allows no write-ahead log (mode {mode!r})")
        return


def _make_tables(path: Path, connection: sqlite3.Connection) -> None:
    connection.execute("BEGIN IMMEDIATE")
    try:
        (application,) = connection.execute("PRAGMA application_id").fetchone()
        (version,) = connection.execute("PRAGMA user_version").fetchone()
        (tables,) = connection.execute("SELECT count(*) FROM sqlite_schema").fetchone()
        if tables == 0:
            for statement in SCHEMA.strip().split(";\n"):
                connection.execute(statement)
            connection.execute(f"PRAGMA application_id = {APPLICATION}")
            connection.execute(f"PRAGMA user_version = {FORMAT}")
        elif application != APPLICATION:
            raise StoreAddressError(f"store {path}: this is some other program's database: name another file")
        elif version != FORMAT:
            raise StoreAddressError(
                f"store {path} has format {version}, this version of concertina reads {FORMAT}: "
                "use the version that wrote it, or name another file"
            )
        connection.execute("COMMIT")
    except BaseException:
        connection.execute("ROLLBACK")
        raise


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    return found.st_dev, found.st_ino


def _is_busy(error: sqlite3.Error) -> bool:
    return getattr(error, "sqlite_errorcode", 0) & 0xFF in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)


def _unopened(path: Path, error: sqlite3.Error) -> StoreError | StoreAddressError:
    if _is_busy(error):
        return _explained(path, error)
    return StoreAddressError(
        f"store {path} can not be opened ({error}): needed a store of ours, or a new file in a folder that exists and "
        "may be written to, on a disk of this machine"
    )


def _explained(path: Path, error: sqlite3.Error) -> StoreError:
    if _is_busy(error):
        return StoreUnavailable(f"store {path}: another process has held its lock all the time; try again")
    return StoreError(f"store {path}: {error}")


class SqliteStore(BaseStore):
    """See protocol.Store."""

    def __init__(self, file: SqliteFile, *, timeout_s: float) -> None:
        self._file, self._timeout_s = file, timeout_s
        self._lock = threading.Lock()  # one connection, one call at a time
        self._closed = False
        self._watches: set[SqliteWatch] = set()

    @classmethod
    def open(
        cls,
        path: Path,
        *,
        timeout_s: float = 10.0,
        clock: Clock = since_boot,
        keep_changes: int = KEEP_CHANGES,
        synced: bool = True,
    ) -> SqliteStore:
        path = path.absolute()  # a process may change its folder
        file = connect(path, timeout_s=timeout_s, clock=clock, boot=boot_id(), keep_changes=keep_changes, synced=synced)
        return cls(file, timeout_s=timeout_s)

    def get(self, key: str) -> Entry | None:
        check_key(key)
        with self._reading() as connection:
            row = connection.execute("SELECT key, value, revision, lease FROM entries WHERE key = ?", (key,)).fetchone()
        return _entry(row) if row else None

    def list_prefix(self, prefix: str) -> Listing:
        check_prefix(prefix)
        with self._reading() as connection:
            rows = connection.execute(
                "SELECT key, value, revision, lease FROM entries WHERE key >= ? AND key < ? ORDER BY key",
                (prefix, prefix + LAST),
            ).fetchall()
            revision = _newest(connection)
        return Listing(entries=tuple(map(_entry, rows)), revision=revision)

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
        attached = lease.id if lease else None
        with self._writing() as connection:
            if not _holds(connection, key, expected) or (guard and not _holds(connection, guard.key, guard.revision)):
                return None
            if attached and not connection.execute("SELECT 1 FROM leases WHERE id = ?", (attached,)).fetchone():
                raise LeaseGone(attached)
            revision = self._file.record(connection, key, value)
            connection.execute("REPLACE INTO entries VALUES (?, ?, ?, ?)", (key, value, revision, attached))
        return revision

    def delete(self, key: str, *, expected: int | None = None, guard: Guard | None = None) -> bool:
        check_key(key)
        with self._writing() as connection:
            there = connection.execute("SELECT 1 FROM entries WHERE key = ?", (key,)).fetchone() is not None
            if not there or not _holds(connection, key, expected):
                return False
            if guard and not _holds(connection, guard.key, guard.revision):
                return False
            self._file.remove(connection, key)
        return True

    def grant(self, ttl: float) -> Lease:
        check_ttl(ttl)
        with self._writing() as connection:
            row = (ttl, self._file.clock() + ttl, self._file.boot)
            lease = connection.execute("INSERT INTO leases (ttl, expires, boot) VALUES (?, ?, ?)", row).lastrowid
        assert lease is not None
        return Lease(id=lease, ttl=ttl)

    def keep_alive(self, lease: Lease) -> None:
        with self._writing() as connection:
            row = (self._file.clock(), self._file.boot, lease.id)
            kept = connection.execute("UPDATE leases SET expires = ? + ttl, boot = ? WHERE id = ?", row)
            if kept.rowcount == 0:
                raise LeaseGone(lease.id)

    def revoke(self, lease: Lease) -> None:
        with self._writing() as connection:
            self._file.end_lease(connection, lease.id)

    def watch(self, prefix: str, *, after: int) -> SqliteWatch:
        check_prefix(prefix)
        self._check_open()
        file = self._file
        watch = SqliteWatch(
            connect(
                file.path,
                timeout_s=self._timeout_s,
                clock=file.clock,
                boot=file.boot,
                keep_changes=file.keep_changes,
                synced=True,
            ),
            prefix,
            after,
        )
        self._watches = {old for old in self._watches if not old.closed} | {watch}
        return watch

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._file.connection.close()
        for watch in self._watches:
            watch.close()

    def _check_open(self) -> None:
        if self._closed:
            raise StoreError("this store is closed: open it again")

    @contextmanager
    def _reading(self) -> Iterator[sqlite3.Connection]:
        with self._lock:
            self._check_open()
            with self._file.reading() as connection:
                yield connection

    @contextmanager
    def _writing(self) -> Iterator[sqlite3.Connection]:
        with self._lock:
            self._check_open()
            with self._file.writing() as connection:
                yield connection


def _entry(row: tuple[str, bytes, int, int | None]) -> Entry:
    key, value, revision, lease = row
    return Entry(key=key, value=value, revision=revision, lease=lease)


def _holds(connection: sqlite3.Connection, key: str, expected: int | None) -> bool:
    if expected is None:
        return True
    row = connection.execute("SELECT revision FROM entries WHERE key = ?", (key,)).fetchone()
    return expected == (row[0] if row else 0)


def _newest(connection: sqlite3.Connection) -> int:
    """Of all changes ever, also of those no longer kept."""
    row = connection.execute("SELECT seq FROM sqlite_sequence WHERE name = 'changes'").fetchone()
    return row[0] if row else 0


class SqliteWatch(Closing):
    """Looks whether the file has changed. It has a connection of its own: SQLite tells of others' changes only."""

    def __init__(self, file: SqliteFile, prefix: str, after: int) -> None:
        self._file, self._prefix = file, prefix
        self.revision, self.closed = after, False
        self._lock = threading.Lock()
        self._seen = -1  # SQLite's count of changes to the file when we last read it
        self._next_end = 0.0  # when the next lease runs out, by what we last read

    def poll(self, limit_s: float) -> tuple[Change, ...]:
        until = time.monotonic() + limit_s
        while True:
            with self._lock:
                found = self._look()
            left = until - time.monotonic()
            if found or left <= 0 or self.closed:
                return found
            time.sleep(min(left, POLL_S))

    def close(self) -> None:
        with self._lock:
            self.closed = True
            self._file.connection.close()

    def _look(self) -> tuple[Change, ...]:
        if self.closed:
            return ()
        count = self._file.changed()
        if count == self._seen and self._file.clock() < self._next_end:
            return ()
        with self._file.reading() as connection:
            found = self._read(connection)
        self._seen = count  # read before the changes: one that came in between is looked at again, not missed
        return found

    def _read(self, connection: sqlite3.Connection) -> tuple[Change, ...]:
        (next_end,) = connection.execute("SELECT min(expires) FROM leases").fetchone()
        self._next_end = float("inf") if next_end is None else next_end
        newest = _newest(connection)
        (oldest,) = connection.execute("SELECT min(revision) FROM changes").fetchone()
        oldest = newest + 1 if oldest is None else oldest
        if self.revision < oldest - 1:
            raise HistoryGone(after=self.revision, oldest=oldest)
        rows = connection.execute(
            "SELECT key, value, revision FROM changes WHERE revision > ? AND key >= ? AND key < ? ORDER BY revision",
            (self.revision, self._prefix, self._prefix + LAST),
        ).fetchall()
        self.revision = max(self.revision, newest)
        return tuple(Change(key=key, value=value, revision=revision) for key, value, revision in rows)
