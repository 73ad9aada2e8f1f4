"""A real server over a store that a test fills itself: what the page shows is what the test wrote."""

import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from concertina.cli.serve import listen, url_of
from concertina.cluster import keys
from concertina.cluster.codec import dump
from concertina.cluster.mirror import Mirror
from concertina.cluster.records import Activity, Change, ClusterState, JobRequest, JobSeen, JobState, NodeState
from concertina.core.job import JobPhase
from concertina.questions import Band, Delay, Eta, Quote
from concertina.server.app import create_app
from concertina.server.oracle import Offer, Why
from concertina.server.parts import Parts
from concertina.server.serve import Server
from concertina.store.address import open_store
from concertina.store.lease import leader_key

OPEN_SECONDS = 10.0


class Foresight:
    """Answers what if and when, always the same."""

    def why(self, job_id: str) -> Why:
        start, end = self._band(60.0), self._band(600.0)
        eta = Eta(job_id=job_id, start=start, end=end, runs=9, reason="nine runs of the simulator")
        return Why(sentence="it waits: it needs 1 cpu and 0 of 4 are free", eta=eta)

    def quote(self, request: JobRequest) -> Offer:
        due = request.deadline_s
        taken = due is None or due > time.time() + 300
        reason = "it fits beside the others" if taken else "all 4 slots would need 5 min for it"
        late = Delay(job_id="digits-1", before_s=time.time() + 100, after_s=time.time() + 220)
        quote = Quote(
            job_id=request.id,
            taken=taken,
            earliest_s=time.time() + 300,
            start=self._band(10.0),
            end=self._band(280.0),
            delays=(late,),
            runs=9,
            reason=reason,
        )
        return Offer(quote=quote, profiled=True)

    def _band(self, ahead_s: float) -> Band:
        now = time.time()
        return Band(low_s=now + 0.8 * ahead_s, expected_s=now + ahead_s, high_s=now + 1.3 * ahead_s)


class Site:
    """Serves from `open` to `close`; the store stays, so that it can be opened again at the same address."""

    def __init__(self, folder: Path) -> None:
        self.store = open_store(f"sqlite:{folder / 'cluster.db'}")
        self.folder, self.token_needed, self._port = folder, False, 0
        self._server: Server | None = None

    def open(self) -> str:
        self._mirror = Mirror(self.store)
        self._mirror.start()
        parts = Parts(
            store=self.store,
            mirror=self._mirror,
            state=self.folder,
            token_needed=self.token_needed,
            oracle=Foresight(),
        )
        socket = listen("127.0.0.1", self._port)
        self._port = socket.getsockname()[1]
        self._server = Server(create_app(parts), socket)
        self._thread = threading.Thread(target=self._server.run, name="site")
        self._thread.start()
        return url_of("127.0.0.1", self._port)

    def close(self) -> None:
        if self._server is not None:
            self._server.stop()
            self._thread.join(OPEN_SECONDS)
            self._mirror.close()
            self._server = None

    def end(self) -> None:
        self.close()
        self.store.close()

    # -- what there is ----------------------------------------------------------------------------------------------

    def cluster(self, slots: int = 4) -> None:
        self.store.put(keys.CLUSTER, dump(ClusterState(policy="concertina", backend="local", at_s=time.time())))
        self.store.put(leader_key(keys.CONTROLLER), b"test")
        self.store.put(keys.NODES + "here", dump(NodeState(id="here", device_type="cpu", slots=slots)))

    def job(self, job_id: str, phase: JobPhase = JobPhase.RUNNING, **more: Any) -> "FakeJob":
        job = FakeJob(self, job_id, phase, **more)
        job.write()
        return job


class FakeJob:
    """The three records of a job, as controller and keeper would write them."""

    def __init__(self, site: Site, job_id: str, phase: JobPhase, *, virtual: int = 4, **more: Any) -> None:
        now = time.time()
        request = {"name": job_id, "user": "ada", "script": "/srv/train.py", "submitted_s": now - 60, **more}
        self._site = site
        self.request = JobRequest(id=job_id, virtual=virtual, **request)
        self.state = JobState(id=job_id, phase=phase, attempt=1)
        self.seen = JobSeen(id=job_id, attempt=1, at_s=now)

    def write(self) -> None:
        store, job = self._site.store, self.request.id
        store.put(keys.REQUESTS + job, dump(self.request))
        store.put(keys.STATES + job, dump(self.state))
        store.put(keys.SEEN + job, dump(self.seen))

    def runs_on(self, workers: int, reason: str, *, step: int = 10, first: int = 0) -> None:
        """`first`: index of its first slot."""
        slots = tuple(f"here/{first + index}" for index in range(workers))
        change = Change(at_s=time.time(), workers=workers, reason=reason, step=step)
        history = (*self.state.history, change)
        phase = JobPhase.RUNNING if workers else JobPhase.WAITING
        self.state = replace(self.state, phase=phase, slots=slots, reason=reason, history=history, work=100.0)
        self.seen = replace(
            self.seen, activity=Activity.TRAINING, slots=slots, workers=workers, step=step, speeds={1: 2.0, 2: 3.5}
        )
        self.write()

    def ends(self, phase: JobPhase, reason: str) -> None:
        change = Change(at_s=time.time(), workers=0, reason=reason, step=self.seen.step)
        history = (*self.state.history, change)
        self.state = replace(self.state, phase=phase, slots=(), reason=reason, history=history, ended_s=time.time())
        self.seen = replace(self.seen, slots=(), workers=0)
        self.write()
