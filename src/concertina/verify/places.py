"""Where in a model and in a step a difference begins, in words."""

from collections.abc import Sequence
from dataclasses import dataclass

from concertina.verify.compare import NOBODY, Difference, Stage, call_that_differs
from concertina.verify.records import Call, Turn

GENERATOR_NAMES = {
    "python": "Python's random module",
    "numpy": "NumPy's global generator",
    "torch": "torch's default generator",
    "cuda": "torch's default generator on the GPU",
}


@dataclass(frozen=True, slots=True)
class Place:
    """Where in the model a difference begins."""

    layer: str  # name of a module, "" for the model itself
    inside: bool  # True: that module got equal inputs and gave different outputs


def locate(d: Difference) -> Place:
    """The layer of the first difference."""
    if d.stage is Stage.OUTPUT and d.turns is not None:
        return _locate_call(*d.turns)
    if d.stage is Stage.GRADIENT:
        return Place(_owner(d), True)
    return Place(_owner(d), False)


def _locate_call(a: Turn, b: Turn) -> Place:
    i = call_that_differs(a, b)
    if i >= len(a.calls) or i >= len(b.calls) or a.calls[i].module != b.calls[i].module:
        longer = a.calls if i < len(a.calls) else b.calls
        return Place(_parent(longer[i].module), True)
    one, other = a.calls[i], b.calls[i]
    if one.given == other.given:
        return Place(one.module, True)
    return _outside(one.module, a.calls[i:], b.calls[i:])


def _outside(module: str, left: Sequence[Call], right: Sequence[Call]) -> Place:
    """`module` got different inputs: the nearest module around it that did not."""
    while module:
        module = _parent(module)
        both = [(x, y) for x, y in zip(left, right, strict=False) if x.module == y.module == module]
        if both and both[0][0].given == both[0][1].given:
            return Place(module, True)
    return Place("", not both)


def _parent(module: str) -> str:
    return module.rpartition(".")[0]


def _owner(d: Difference) -> str:
    """The module that holds the tensor of that name."""
    return d.name.rpartition(".")[0]


def place_of(d: Difference) -> str:
    if d.stage is Stage.OUTPUT:
        place = locate(d)
        if not place.inside:
            return "what the loop body makes of the batch before it calls the model"
        kind = d.left.modules.get(place.layer, ("", ""))[0]
        return f"layer `{place.layer}` ({kind})" if place.layer else f"the forward of the model ({kind})"
    if d.stage is Stage.LOSS:
        return "the loss"
    if d.stage is Stage.LOGGED:
        return f"the logged value `{d.name}`"
    if d.stage is Stage.GRADIENT:
        return f"the gradient of `{d.name}`"
    if d.stage is Stage.GIVEN:
        return "what is done with the gradients between backward() and optimizer.step()"
    if d.stage is Stage.RANDOM_AFTER:
        return f"how many numbers the loop body draws from {GENERATOR_NAMES[d.name]}"
    return "the computation"


def logged_too(d: Difference) -> list[str]:
    """Where gradients differ but not what flows into the model's output, a term beside the model is at work."""
    if d.stage is not Stage.GRADIENT or d.turns is None:
        return []
    a, b = d.turns
    shown = [f"{n} {a.shown[n]} against {b.shown[n]}" for n in a.shown if a.shown[n] != b.shown.get(n, a.shown[n])]
    return [f"the logged values differ too, so the loss has a term beside the model's output: {', '.join(shown)}"][
        : len(shown)
    ]


EQUAL = (
    (Stage.PARAMS, "parameters"),
    (Stage.RANDOM, "random states"),
    (Stage.BATCH, "batch"),
    (Stage.OUTPUT, "outputs of all layers"),
    (Stage.LOSS, "gradient of the loss"),
    (Stage.GRADIENT, "gradients"),
)


def equal_so_far(d: Difference) -> list[str]:
    equal = [what for stage, what in EQUAL if stage < d.stage]
    if not equal:
        return []
    who = "in the turns of that step" if d.virtual == NOBODY else f"in that turn of virtual worker {d.virtual}"
    listed = equal[0] if len(equal) == 1 else f"{', '.join(equal[:-1])} and {equal[-1]}"
    return [f"equal until then {who}: {listed}"]
