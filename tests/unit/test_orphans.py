"""A worker that is cut off from every master ends itself; on one machine nobody does."""

import subprocess
import sys
from pathlib import Path

from concertina.core.messages import EXIT_LEFT

CODE = """
import sys, time
from concertina.master.link import MasterLink
link = MasterLink(sys.argv[1], "job", "key", "worker-0", print, dict, float(sys.argv[2]))
link.start()
time.sleep(3)
link.close()
"""


def ends(store: str, orphan_s: float) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, "-c", CODE, store, str(orphan_s)], capture_output=True, text=True, timeout=60
    )
    return done.returncode, done.stderr


def test_without_a_word_from_any_master_a_worker_of_several_hosts_ends_itself(tmp_path: Path) -> None:
    code, said = ends("tcp://127.0.0.1:9", 0.4)  # nobody listens there
    assert code == EXIT_LEFT
    assert "no word from any master" in said


def test_on_one_machine_a_worker_waits_for_the_next_master(tmp_path: Path) -> None:
    assert ends(f"sqlite:{tmp_path / 'store.db'}", 0.0)[0] == 0
