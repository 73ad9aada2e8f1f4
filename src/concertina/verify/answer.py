"""The verdict in words, and as JSON."""

from typing import Any

from concertina.verify.compare import BETWEEN, NOBODY, Difference, Stage
from concertina.verify.experiment import Verdict
from concertina.verify.places import GENERATOR_NAMES, locate

LOOK_AT = 4  # lines of the script that are shown


def describe(d: Difference) -> str:
    """What differs, as a phrase."""
    names = {
        Stage.ABSENT: "one run has this loop body, the other has not",
        Stage.PARAMS: f"parameter `{d.name}` as the loop body begins",
        Stage.RANDOM: f"the state of {GENERATOR_NAMES.get(d.name, '')}, drawn from in this loop body",
        Stage.BATCH: "the batch",
        Stage.OUTPUT: _output(d),
        Stage.LOSS: f"the loss{_values(d)}",
        Stage.LOGGED: f"logged value `{d.name}`{_values(d)}",
        Stage.GRADIENT: f"gradient of `{d.name}`",
        Stage.BUFFER: f"buffer `{d.name}`",
        Stage.RANDOM_AFTER: f"the state of {GENERATOR_NAMES.get(d.name, '')} as the loop body ends",
        Stage.SUM: f"summed gradient of `{d.name}`",
        Stage.SETTINGS: f"optimizer setting `{d.name.rpartition('.')[2]}`",
        Stage.PARAMS_BEFORE: f"parameter `{d.name}` before the optimizer's update",
        Stage.GIVEN: f"gradient of `{d.name}` as the optimizer finds it",
        Stage.UPDATED: f"parameter `{d.name}` after the optimizer's update",
        Stage.OPTIMIZER: f"optimizer state `{d.name}`",
        Stage.PARAMS_AFTER: f"parameter `{d.name}` at the end of the step",
        Stage.REPLICA: f"`{d.name}` on worker {d.worker} and on worker 0 of the same run",
        Stage.FAILED: "the run fails",
    }
    return names[d.stage]


def layer(d: Difference) -> tuple[str, str]:
    """(name, class) of the layer that the difference is in; empty if it is in none."""
    holds = {Stage.PARAMS, Stage.OUTPUT, Stage.GRADIENT, Stage.BUFFER, Stage.SUM, Stage.PARAMS_BEFORE, Stage.GIVEN,
             Stage.UPDATED, Stage.PARAMS_AFTER, Stage.REPLICA}  # fmt: skip
    place = locate(d)
    if d.stage not in holds or (d.stage is Stage.OUTPUT and not place.inside):
        return "", ""
    kind = d.left.modules.get(place.layer, ("", ""))[0]
    return place.layer or "the model itself", kind


def _output(d: Difference) -> str:
    place = locate(d)
    if not place.inside:
        return "the input of the model"
    kind = d.left.modules.get(place.layer, ("", ""))[0]
    return f"output of `{place.layer}` ({kind})" if place.layer else f"output of the model ({kind})"


def _values(d: Difference) -> str:
    """The logged values that differ, for people."""
    if d.turns is None:
        return ""
    a, b = d.turns
    names = [d.name] if d.stage is Stage.LOGGED else [n for n in a.logged if a.logged[n] != b.logged.get(n)]
    shown = [f"{n} {a.shown.get(n)} against {b.shown.get(n)}" for n in names if n in a.shown and n in b.shown]
    return f" ({', '.join(shown)})" if shown else ""


def runs_in_words(verdict: Verdict) -> str:
    return "; ".join(run.name for run in verdict.runs)


def in_words(verdict: Verdict) -> str:
    """A few lines for a terminal."""
    script, d, cause = verdict.settings.script.name, verdict.difference, verdict.cause
    steps = max((run.steps for run in verdict.runs), default=0)
    lines: list[str] = []
    if d is None or cause is None:
        turns = sum(len(run.turns) for run in verdict.runs)
        same = f"{steps} steps of {verdict.settings.virtual} virtual workers gave the same bits"
        seen = "batch, output of every layer, logged values, gradients, buffers; parameters and optimizer state"
        lines = [
            f"{script} is bitwise elastic: {same} in {len(verdict.runs)} runs.",
            f"  compared     {turns} loop bodies: {seen}",
            f"  runs         {runs_in_words(verdict)}",
        ]
    else:
        who = "" if d.virtual == NOBODY else f", virtual worker {d.virtual}"
        when = f"before step {d.step}" if d.round == BETWEEN else f"step {d.step}"
        name, kind = layer(d)
        lines = [f"{script} is not bitwise elastic.", f"  differs      {when}{who}: {describe(d)}"]
        if name and d.stage is not Stage.OUTPUT:
            lines.append(f"  layer        {name} ({kind})")
        lines.append(f"  between      {_between(d)}")
        lines.append(f"  likely cause {cause.kind.value}")
        lines.append(f"               {cause.sentence}")
        lines += _block("evidence", cause.evidence)
        lines += _block("look at", [f"{s.file}:{s.line}  {s.text}" for s in cause.look_at[:LOOK_AT]])
        lines += _block("try", [cause.advice] if cause.advice else [])
    lines += _block("note", verdict.notes)
    return "\n".join(lines)


def _between(d: Difference) -> str:
    if d.stage is Stage.REPLICA:
        return f"worker 0 and worker {d.worker} of the run with {d.right.name}"
    return f"{d.left.name} and {d.right.name}"


def _block(title: str, rows: Any) -> list[str]:
    return [f"  {title if i == 0 else '':<12} {row}" for i, row in enumerate(rows)]


def as_json(verdict: Verdict) -> dict[str, Any]:
    """For programs."""
    d, cause = verdict.difference, verdict.cause
    return {
        "script": str(verdict.settings.script),
        "elastic": verdict.elastic,
        "virtual": verdict.settings.virtual,
        "steps": max((run.steps for run in verdict.runs), default=0),
        "runs": [{"name": run.name, "steps": run.steps, "failure": run.failure} for run in verdict.runs],
        "difference": None if d is None else _difference(d),
        "cause": None
        if cause is None
        else {
            "kind": cause.kind.name.lower().replace("_", "-"),
            "title": cause.kind.value,
            "sentence": cause.sentence,
            "evidence": list(cause.evidence),
            "advice": cause.advice,
            "look_at": [{"file": s.file, "line": s.line, "text": s.text} for s in cause.look_at],
        },
        "notes": list(verdict.notes),
        "seconds": round(verdict.seconds, 2),
    }


def _difference(d: Difference) -> dict[str, Any]:
    name, kind = layer(d)
    return {
        "step": d.step,
        "round": d.round,
        "virtual_worker": None if d.virtual == NOBODY else d.virtual,
        "what": d.stage.name.lower(),
        "tensor": d.name,
        "layer": name,
        "layer_class": kind,
        "between": [d.left.name, d.right.name],
        "in_words": describe(d),
    }
