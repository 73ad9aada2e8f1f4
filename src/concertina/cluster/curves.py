"""How fast live jobs are: what was measured, and the law of diminishing returns for the rest. Pure.

Jobs of one *kind* (the same script, arguments, virtual workers and scaling) share a stored curve. What a job shows
while it runs goes before it: counts at which it was seen itself are taken as seen, the others are scaled alike.
"""

import hashlib
from collections.abc import Mapping

from concertina.cluster.records import Curve, JobRequest
from concertina.core.errors import NoCurveError
from concertina.core.job import JobSpec
from concertina.policies.scaling_curve import Curves, ScalingCurve, law

PROBE = "?"  # the kind of a job that is still being measured
PROBE_STEPS = 20.0  # work that a policy is told of such a job: next to nothing, so that it comes soon
NOTABLE = 0.05  # a speed that differs by less is the same
KEPT = 0.5  # weight of what was known when a kind is measured again


def kind_of(request: JobRequest, script: bytes) -> str:
    """Jobs with the same digest are equally fast, and make equally many steps by themselves."""
    digest = hashlib.sha256()
    for part in (script, *(a.encode() for a in request.args), str(request.virtual).encode(), request.scaling.encode()):
        digest.update(len(part).to_bytes(8, "big") + part)
    return digest.hexdigest()[:32]


def points(measured: Mapping[int, float], top: int) -> dict[int, float]:
    """Speeds at 1 to `top` workers: measured ones, lines between them, the law beyond them."""
    known = {count: speed for count, speed in sorted(measured.items()) if count > 0 and speed > 0}
    if not known:
        return {}
    counts = list(known)
    found: dict[int, float] = {}
    for n in range(1, max(top, counts[-1]) + 1):
        below = max((count for count in counts if count <= n), default=counts[0])
        above = min((count for count in counts if count >= n), default=counts[-1])
        if below < n < above:
            part = (n - below) / (above - below)
            found[n] = known[below] + (known[above] - known[below]) * part
        else:
            base = below if below <= n else above
            found[n] = known[base] * law(n) / law(base)
    return found


def corrected(kind: Mapping[int, float], own: Mapping[int, float]) -> dict[int, float]:
    """A kind's speeds as this job shows them: where it was not seen, as much faster or slower as where it was."""
    ratios = [own[count] / kind[count] for count in own if kind.get(count, 0.0) > 0]
    ratio = sum(ratios) / len(ratios) if ratios else 1.0
    return {**{count: speed * ratio for count, speed in kind.items()}, **own}


def adopted(believed: Mapping[int, float], own: Mapping[int, float], seen: Mapping[int, float]) -> dict[int, float]:
    """The job's own speeds with those that differ notably from what is believed of it; else as they were.

    A job that is slower may miss its deadline; one that is faster can wait until that is sure.
    """
    news = {}
    for count, speed in seen.items():
        before = believed.get(count, 0.0)
        if speed > 0 and (speed < (1 - NOTABLE) * before or speed > (1 + 2 * NOTABLE) * before):
            news[count] = speed
    return {**own, **news} if news else dict(own)


def merged(
    old: Curve | None, key: str, seen: Mapping[int, float], total_steps: int, source: str, device_type: str = ""
) -> Curve | None:
    """What is to be stored of a kind after a job of it was seen; None: nothing new."""
    known = _blended(old.speeds if old else {}, seen)
    types = dict(old.types) if old else {}
    if device_type:
        types[device_type] = _blended(types.get(device_type, {}), seen)
    steps = total_steps or (old.total_steps if old else 0)
    if not known or (old is not None and (known, types, steps) == (old.speeds, old.types, old.total_steps)):
        return None
    return Curve(key=key, speeds=known, types=types, source=source, total_steps=steps)


def _blended(old: Mapping[int, float], seen: Mapping[int, float]) -> dict[int, float]:
    known = dict(old)
    for count, speed in seen.items():
        if speed > 0:
            before = known.get(count)
            blend = speed if before is None else KEPT * before + (1 - KEPT) * speed
            if before is None or abs(blend - before) > NOTABLE * before:
                known[count] = blend
    return dict(sorted(known.items()))


class LiveCurves(Curves):
    """Finds curves by a job's kind (`JobSpec.model`) and, where it was seen running, by its own id."""

    def __init__(
        self, stored: Mapping[str, Curve], own: Mapping[str, tuple[str, Mapping[int, float]]], top: int
    ) -> None:
        """`own`: job id -> type of device and speeds at which it was seen there. `top`: workers that any can have."""
        super().__init__()
        self._stored, self._own, self._top = stored, own, top
        self._kinds: dict[str, ScalingCurve | None] = {}
        self._jobs: dict[str, ScalingCurve] = {}

    def of(self, job: JobSpec) -> tuple[ScalingCurve, float]:
        curve = self._curve(job)
        if curve is None or job.work is None:
            raise NoCurveError(job_id=job.id, wanted=f"kind {job.model!r}", nearest="it was not measured yet")
        return curve, job.work

    def _curve(self, job: JobSpec) -> ScalingCurve | None:
        kind = job.model or PROBE
        own = self._own.get(job.id)
        if own and kind != PROBE:
            if job.id not in self._jobs:
                self._jobs[job.id] = self._of_job(self._stored.get(kind), *own)
            return self._jobs[job.id]
        if kind not in self._kinds:
            self._kinds[kind] = self._of_kind(kind)
        return self._kinds[kind]

    def _of_kind(self, kind: str) -> ScalingCurve | None:
        stored = Curve(key=PROBE, speeds={1: 1.0}) if kind == PROBE else self._stored.get(kind)
        if stored is None or not (found := points(stored.speeds, self._top)):
            return None
        return ScalingCurve(points={"*": found, **{t: points(s, self._top) for t, s in stored.types.items()}})

    def _of_job(self, stored: Curve | None, seen_on: str, own: Mapping[int, float]) -> ScalingCurve:
        """On the type where it was seen as it was seen; on others as much faster or slower than its kind as there."""
        if stored is None:
            return ScalingCurve(points={"*": points(own, self._top)})
        usual = points(stored.on(seen_on), self._top)
        ratios = [speed / usual[count] for count, speed in own.items() if usual.get(count)]
        ratio = sum(ratios) / len(ratios) if ratios else 1.0
        known = {t: {n: s * ratio for n, s in seen.items()} for t, seen in {"*": stored.speeds, **stored.types}.items()}
        known[seen_on or "*"] = corrected(stored.on(seen_on), own)
        return ScalingCurve(points={t: points(speeds, self._top) for t, speeds in known.items()})
