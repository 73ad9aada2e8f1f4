"""The jobs of `concertina up --demo`: real training, submitted as a user would, in an order that shows something.

Each batch of these jobs waits as it would for a GPU (examples/live_paced.py), so that all of them fit on two cores.
"""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from concertina.core.errors import ClusterUnreachable, ConcertinaError, UsageError

if TYPE_CHECKING:
    from concertina.cli.client import Client

PACE = "0.12"  # seconds per batch of a virtual worker
LAST_WORD_SECONDS = 5.0  # a job has ended; whoever follows it looks once a second
PACED_NOTE = "each batch waits as it would for a GPU, so that two cores are enough"


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoJob:
    """One submission, and what it is meant to show."""

    after_s: float
    name: str
    script: str
    args: tuple[str, ...]
    deadline_in_s: float | None
    shows: str


JOBS = (
    DemoJob(
        after_s=0.0,
        name="mlp",
        script="mlp.py",
        args=("--epochs", "6"),
        deadline_in_s=110.0,
        shows="to be done within 110 s: measured while it trains, then promised; grows over all slots that are free",
    ),
    DemoJob(
        after_s=16.0,
        name="digits",
        script="digits.py",
        args=("--epochs", "20"),
        deadline_in_s=None,
        shows="no deadline: mlp shrinks to make room, digits grows when it has ended",
    ),
    DemoJob(
        after_s=28.0,
        name="hasty",
        script="mlp.py",
        args=("--epochs", "6"),
        deadline_in_s=8.0,
        shows="the same as mlp, but within 8 s: refused, with what could be promised instead",
    ),
    DemoJob(
        after_s=38.0,
        name="chars",
        script="chars.py",
        args=("--epochs", "1"),
        deadline_in_s=None,
        shows="no deadline and little to do: it comes in between",
    ),
)

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Demo:
    """The examples, where they are."""

    examples: Path

    @classmethod
    def find(cls) -> "Demo":
        """In the repository that this code lies in."""
        examples = Path(__file__).resolve().parents[3] / "examples"
        if not (examples / "live_paced.py").is_file():
            raise UsageError("--demo needs the repository's examples, which this installation does not have: clone it")
        return cls(examples=examples)

    def start(self, url: str, token: str, say: Say) -> None:
        """Submits in the background; ends by itself."""
        thread = threading.Thread(target=self._run, args=(url, token, say), name="concertina-demo", daemon=True)
        thread.start()

    def _run(self, url: str, token: str, say: Say) -> None:
        from concertina.cli.client import Client

        began, followers = time.monotonic(), list[threading.Thread]()
        say(f"demo: {len(JOBS)} real jobs in the next {JOBS[-1].after_s:.0f} s; {PACED_NOTE}")
        try:
            with Client(url, token) as client:
                for job in JOBS:
                    time.sleep(max(0.0, began + job.after_s - time.monotonic()))
                    say(f"demo: submitting {job.name} ({job.shows})")
                    posted = client.post("/jobs", self.body(job, time.time()))
                    follower = threading.Thread(target=self._follow, args=(url, token, posted, say), daemon=True)
                    follower.start()
                    followers.append(follower)
                self._until_all_ended(client)
                for follower in followers:  # the last word comes last
                    follower.join(LAST_WORD_SECONDS)
        except ClusterUnreachable:
            return  # somebody has taken it down, and said so
        except ConcertinaError as error:
            say(f"demo: {error}")
            return
        say("demo: all of its jobs have ended; the cluster stays up: `concertina submit SCRIPT` is next")

    def _until_all_ended(self, client: "Client") -> None:
        from concertina.cli.job_words import is_over

        names = {job.name for job in JOBS}
        while not all(is_over(job) for job in client.jobs() if job["name"] in names):
            time.sleep(2.0)

    def body(self, job: DemoJob, now: float) -> dict[str, Any]:
        body: dict[str, Any] = {
            "script": str(self.examples / "live_paced.py"),
            "args": [PACE, str(self.examples / job.script), *job.args],
            "cwd": str(self.examples.parent),
            "name": job.name,
            "virtual": 4,
        }
        if job.deadline_in_s is not None:
            body["deadline_s"] = now + job.deadline_in_s
        return body

    def _follow(self, url: str, token: str, job: dict[str, Any], say: Say) -> None:
        """Tells what was decided and how the job ended."""
        from concertina.cli.client import Client
        from concertina.cli.job_words import is_over
        from concertina.cli.submit import verdict_lines

        decided = False
        try:
            with Client(url, token) as client:
                while True:
                    job = client.get_job(job["id"])
                    if not decided and job["phase"] != "submitted":
                        decided = True
                        for line in verdict_lines(job):
                            say(f"demo: {line}")
                    if is_over(job):
                        break
                    time.sleep(1.0)
        except ConcertinaError:
            return
        if job["phase"] != "rejected":
            say(f"demo: {job['id']} {end_words(job)}")


def end_words(job: dict[str, Any]) -> str:
    """`finished, 12 s before its deadline`"""
    words = str(job["phase"])
    if job["phase"] == "finished" and job["deadline_s"] is not None:
        early = job["deadline_s"] - job["ended_s"]
        words += f", {abs(early):.0f} s {'before' if early >= 0 else 'after'} its deadline"
    return words
