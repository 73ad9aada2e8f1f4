"""How every picture under docs/results looks: 768 pixels wide, on white, in colours that everybody can tell apart.

matplotlib is imported when something is drawn, not before: benchmarks also run where it is missing.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

OURS, GREY, LIGHT, INK = "#0072b2", "#8c8c8c", "#d0d0d0", "#222222"
ORANGE, GREEN, PURPLE, SKY = "#d55e00", "#009e73", "#aa4499", "#56b4e9"
WIDTH = 8.0  # inches; 72 points of an SVG each
SMALL = 8.5
SETTINGS = {
    "svg.hashsalt": "concertina",  # or every file would differ from the one before
    "svg.fonttype": "path",  # the same shapes for readers without the font
    "figure.constrained_layout.w_pad": 0.1,
    "figure.constrained_layout.h_pad": 0.08,
    "font.family": "DejaVu Sans",
    "font.size": 9.5,
    "text.color": INK,
    "axes.edgecolor": GREY,
    "axes.labelcolor": INK,
    "axes.titlesize": 9.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "grid.color": "#e6e6e6",
    "xtick.color": GREY,
    "ytick.color": GREY,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
}


def figure(height: float, width: float = WIDTH) -> Figure:
    """An empty one."""
    import matplotlib
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    matplotlib.rcParams.update(SETTINGS)
    made = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasSVG(made)
    return made


def save(made: Figure, path: Path, about: str) -> None:
    """The same bytes for the same figure. `about` can be found in the file again."""
    made.savefig(path, format="svg", metadata={"Date": None, "Creator": None, "Description": about})


def rows_of(axes: Axes, names: list[str]) -> None:
    """Names down the left side, the first at the top; no line and no ticks, only the names."""
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
