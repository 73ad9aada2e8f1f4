"""Numbers for Prometheus, read from the mirror when they are asked for."""

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from concertina.cluster.mirror import Job, Mirror
from concertina.server.board import Board
from concertina.server.views import busy_slots, slot_counts, slots_json, steps_per_s

MOST_JOBS = 500  # with numbers of their own
BUCKETS = (0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)


class ClusterCollector(Collector):
    """What the mirror knows."""

    def __init__(self, mirror: Mirror, board: Board) -> None:
        self._mirror, self._board = mirror, board

    def collect(self) -> Iterable[Metric]:
        jobs = self._board.jobs()
        phases = GaugeMetricFamily("concertina_jobs", "Jobs by phase.", labels=["phase"])
        for phase, count in self._board.count().items():
            phases.add_metric([phase.value], count)
        slots = GaugeMetricFamily("concertina_slots", "Slots by state.", labels=["state"])
        live = [job for job in jobs if not job.state.phase.is_end or (job.seen and job.seen.slots)]
        counts = slot_counts(slots_json(self._mirror.nodes(), busy_slots(live), None))
        for state, count in counts.items():
            if state != "total":
                slots.add_metric([state], count)
        spent = self._mirror.all_spent()  # by jobs that are forgotten: a counter must not go back
        counted = {job for one in spent for job in one.jobs}
        service = sum(one.service_s for one in spent)
        service += sum(job.state.service_s for job in jobs if job.id not in counted)
        yield phases
        yield slots
        yield CounterMetricFamily("concertina_slot_seconds", "Slot-seconds that jobs have received.", value=service)
        yield from self._controller()
        yield from _by_job([job for job in live if job.state.slots][:MOST_JOBS])

    def _controller(self) -> Iterable[Metric]:
        cluster = self._mirror.cluster
        yield CounterMetricFamily(
            "concertina_controller_rounds", "Rounds decided.", value=cluster.rounds if cluster else 0
        )
        yield GaugeMetricFamily(
            "concertina_controller_round_seconds",
            "How long the last round took.",
            value=cluster.round_ms / 1000 if cluster else 0.0,
        )
        yield GaugeMetricFamily("concertina_store_revision", "Newest revision seen.", value=self._mirror.revision)


def _by_job(jobs: list[Job]) -> Iterable[Metric]:
    labels = ["job", "name", "user"]
    workers = GaugeMetricFamily("concertina_job_workers", "Workers of a job that holds slots.", labels=labels)
    steps = GaugeMetricFamily("concertina_job_step", "Its step.", labels=labels)
    speeds = GaugeMetricFamily("concertina_job_steps_per_second", "Its speed.", labels=labels)
    for job in jobs:
        names = [job.id, job.request.name, job.request.user]
        workers.add_metric(names, job.seen.workers if job.seen else 0)
        steps.add_metric(names, job.seen.step if job.seen else 0)
        speeds.add_metric(names, steps_per_s(job.seen) or 0.0)
    return [workers, steps, speeds]


class Meters:
    """The interface's own numbers and the cluster's, in a registry of their own."""

    def __init__(self, mirror: Mirror, board: Board) -> None:
        self.registry = CollectorRegistry(auto_describe=False)
        self.registry.register(ClusterCollector(mirror, board))
        self._requests = Counter(
            "concertina_http_requests", "Requests.", ["method", "route", "status"], registry=self.registry
        )
        self._seconds = Histogram(
            "concertina_http_seconds", "How long answers took.", ["route"], buckets=BUCKETS, registry=self.registry
        )
        self.streams = Gauge("concertina_event_streams", "Clients that watch.", registry=self.registry)
        self.leader = Gauge("concertina_controller_leader", "1: a controller is in office.", registry=self.registry)
        self.stale = Gauge("concertina_mirror_stale_seconds", "Store silent for so long.", registry=self.registry)

    def count(self, method: str, route: str, status: int, seconds: float) -> None:
        known = method if method in ("GET", "HEAD", "POST", "DELETE", "PUT", "PATCH", "OPTIONS") else "other"
        self._requests.labels(known, route, str(status)).inc()
        if not route.endswith("/events"):  # streams last as long as their clients like
            self._seconds.labels(route).observe(seconds)

    def text(self) -> bytes:
        return generate_latest(self.registry)
