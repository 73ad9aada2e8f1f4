"""What only a file shared by processes can suffer: races, kill -9, a restart of the machine, somebody else's file."""

import os
import signal
import sqlite3
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from concertina.core.errors import StoreAddressError, StoreError, StoreUnavailable
from concertina.store import open_store
from concertina.store.clock import since_boot
from concertina.store.protocol import KEEP_CHANGES
from concertina.store.sqlite import SqliteStore, connect

COUNT = """
import sys
from concertina.store import open_store
with open_store(f"sqlite:{sys.argv[1]}") as store:
    left = int(sys.argv[2])
    while left:
        entry = store.get("n")
        value = b"%d" % (int(entry.value) + 1 if entry else 1)
        left -= store.compare_and_set("n", value, expected=entry.revision if entry else 0) is not None
"""

PUT_FOR_EVER = """
import sys
from concertina.store import open_store
store = open_store(f"sqlite:{sys.argv[1]}")
turn = 0
while True:
    revision = store.put(f"k/{turn % 50}", b"%d" % turn + b"." * 3000)
    print(turn, revision, flush=True)
    turn += 1
"""


def start(code: str, *args: object, **streams: int) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", code, *map(str, args)], text=True, **streams)  # type: ignore[call-overload, no-any-return]


def test_no_update_is_lost_between_processes(tmp_path: Path) -> None:
    """They all open a file that is not there yet, which is a race of its own."""
    racing = [start(COUNT, tmp_path / "s.db", 40) for _ in range(3)]
    assert [process.wait(120) for process in racing] == [0, 0, 0]
    with open_store(f"sqlite:{tmp_path / 's.db'}") as store:
        entry = store.get("n")
        assert entry is not None
        assert entry.value == b"120"
        with store.watch("n", after=0) as watch:
            assert [change.value for change in watch.poll(0)] == [b"%d" % i for i in range(1, 121)]


def test_a_writer_killed_in_the_middle_leaves_a_whole_file(tmp_path: Path) -> None:
    path = tmp_path / "s.db"
    acknowledged: dict[int, int] = {}
    for round_ in range(6):  # each finds what the one before left
        writer = start(PUT_FOR_EVER, path, stdout=subprocess.PIPE)
        assert writer.stdout is not None
        for _ in range(25 + 7 * round_):
            turn, revision = map(int, writer.stdout.readline().split())
            acknowledged[revision] = turn
        writer.send_signal(signal.SIGKILL)
        rest = writer.stdout.read().splitlines()
        acknowledged |= {int(line.split()[1]): int(line.split()[0]) for line in rest if len(line.split()) == 2}
        writer.stdout.close()
        writer.wait()
        with sqlite3.connect(path) as raw:
            assert raw.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        raw.close()
        with open_store(f"sqlite:{path}") as store, store.watch("k/", after=0) as watch:
            changes = watch.poll(0)
            found = {change.revision: int((change.value or b"").rstrip(b".")) for change in changes}
            assert found.items() >= acknowledged.items()
            assert len(found) <= len(acknowledged) + round_ + 1  # one more each time, done but not acknowledged
            newest = {change.key: (change.revision, change.value) for change in changes}
            assert {entry.key: (entry.revision, entry.value) for entry in store.list_prefix("k/").entries} == newest


def test_a_lease_of_before_a_restart_gets_its_time_once_more(tmp_path: Path) -> None:
    """Times of two boots can not be compared: neither for ever nor over at once."""
    now = 1_000_000.0
    before = connect(tmp_path / "s.db", timeout_s=1, clock=lambda: now, boot="first", keep_changes=KEEP_CHANGES)
    store = SqliteStore(before, timeout_s=1)
    store.put("a", b"", lease=store.grant(10))
    store.close()

    now = 5.0
    after = connect(tmp_path / "s.db", timeout_s=1, clock=lambda: now, boot="second", keep_changes=KEEP_CHANGES)
    with SqliteStore(after, timeout_s=1) as store:
        assert store.get("a") is not None
        now = 14.9
        assert store.get("a") is not None
        now = 15.0
        assert store.get("a") is None


def test_all_processes_go_by_one_clock() -> None:
    code = "from concertina.store.clock import since_boot, boot_id; print(since_boot())"
    before = since_boot()
    seen = float(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)
    assert before <= seen <= since_boot()


def test_a_lock_that_is_never_released_ends_in_a_sentence(tmp_path: Path) -> None:
    with SqliteStore.open(tmp_path / "s.db", timeout_s=0.1) as store:
        other = sqlite3.connect(tmp_path / "s.db", isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(StoreUnavailable, match="another process has held its lock"):
            store.put("a", b"")
        assert store.get("a") is None  # readers do not care
        other.execute("ROLLBACK")
        other.close()
        store.put("a", b"")


def test_a_file_that_others_are_just_making_is_waited_for(tmp_path: Path) -> None:
    """SQLite itself does not wait when the log is to become a write-ahead log."""
    other = sqlite3.connect(tmp_path / "s.db", isolation_level=None, check_same_thread=False)
    other.execute("BEGIN IMMEDIATE")
    releasing = threading.Timer(0.3, lambda: other.execute("ROLLBACK"))
    releasing.start()
    with SqliteStore.open(tmp_path / "s.db") as store:
        store.put("a", b"")
        assert store.get("a") is not None
    releasing.join()
    other.close()


def test_a_store_does_not_survive_a_fork_silently(tmp_path: Path) -> None:
    with SqliteStore.open(tmp_path / "s.db") as store:
        store._file._pid = os.getpid() + 1
        with pytest.raises(StoreError, match="opened in another process"):
            store.put("a", b"")


def test_a_file_that_was_taken_away_is_not_written_to(tmp_path: Path) -> None:
    """Otherwise those who have it open and those who come later would each have their own leader."""
    with SqliteStore.open(tmp_path / "s.db") as old:
        old.put("a", b"")
        for path in tmp_path.iterdir():
            path.unlink()
        with pytest.raises(StoreError, match="was removed or replaced while it was open"):
            old.put("a", b"")
        with SqliteStore.open(tmp_path / "s.db") as new:
            with pytest.raises(StoreError, match="was removed or replaced while it was open"):
                old.get("a")
            assert new.get("a") is None


def test_old_changes_do_not_fill_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("concertina.store.sqlite.KEEP_BYTES", 100_000)
    with SqliteStore.open(tmp_path / "s.db") as store:
        for _ in range(128):
            last = store.put("a", b"x" * 10_000)
        with store.watch("a", after=last - 5) as watch:
            assert len(watch.poll(0)) == 5
        (kept,) = store._file.connection.execute("SELECT count(*) FROM changes").fetchone()
        assert kept <= 10


def bad_folder(path: Path) -> Path:
    return path / "none" / "s.db"


def bad_text(path: Path) -> Path:
    (path / "s.db").write_text("this is no database " * 100)
    return path / "s.db"


def bad_owner(path: Path) -> Path:
    with sqlite3.connect(path / "s.db") as raw:
        raw.execute("CREATE TABLE photos (x)")
    raw.close()
    return path / "s.db"


def bad_format(path: Path) -> Path:
    with SqliteStore.open(path / "s.db") as store:
        store._file.connection.execute("PRAGMA user_version = 99")
    return path / "s.db"


@pytest.mark.parametrize(
    ("make", "needed"),
    [
        (bad_folder, "needed a store of ours, or a new file in a folder that exists"),
        (lambda path: path, "needed a store of ours, or a new file in a folder that exists"),
        (bad_text, "needed a store of ours, or a new file"),
        (bad_owner, "some other program's database: name another file"),
        (bad_format, "has format 99, this version of concertina reads 1"),
    ],
    ids=["no folder", "a folder", "no database", "another's", "newer"],
)
def test_a_place_without_a_store_gets_one_sentence(tmp_path: Path, make: object, needed: str) -> None:
    path = make(tmp_path)  # type: ignore[operator]
    with pytest.raises(StoreAddressError) as caught:
        open_store(f"sqlite:{path}")
    assert needed in str(caught.value)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_store_stays_where_it_is_when_the_process_moves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    with open_store("sqlite:s.db") as store:
        monkeypatch.chdir("elsewhere")
        store.put("a", b"")
        with store.watch("a", after=0) as watch:
            assert len(watch.poll(0)) == 1


def test_nothing_is_left_beside_the_file(tmp_path: Path) -> None:
    with open_store(f"sqlite:{tmp_path / 's.db'}") as store:
        store.put("a", b"")
        store.watch("a", after=0).poll(0)
    assert [path.name for path in tmp_path.iterdir()] == ["s.db"]
