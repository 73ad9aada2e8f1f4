"""Pictures of running jobs: how long a change stops them, and how a live cluster compares with the simulator."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from benchmarks.pages import NUMBER, number, numbers, table
from benchmarks.picture_style import GREEN, GREY, INK, LIGHT, ORANGE, OURS, PURPLE, SMALL, figure, rows_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# -- changes of workers ---------------------------------------------------------------------------------------------

CHANGES = ("growing", "shrinking", "moving one")
DEVICES = {"on CPUs": "", "on a GPU": "On a GPU"}  # the heading each table is under
LEAST_MS, MOST_MS = 1.0, 3e6  # of the axis; the second leaves room for what is written beside the points
BESIDE: dict[str, Any] = {"textcoords": "offset points", "va": "center", "fontsize": SMALL}


@dataclass(frozen=True, slots=True, kw_only=True)
class Pauses:
    """One way of changing workers, with one size of the model."""

    device: str
    way: str
    megabytes: float
    ms: tuple[tuple[float, float] | None, ...]  # median and worst of each change


def read_rescale(page: str) -> list[Pauses]:
    found = []
    for device, section in DEVICES.items():
        for size, way, *cells, _ in table(page, "MB of parameters", "", *CHANGES, section=section).rows:
            pairs = (numbers(cell)[:2] for cell in cells)
            ms = tuple((pair[0], pair[1]) if pair else None for pair in pairs)
            found.append(Pauses(device=device, way=way.strip("*"), megabytes=number(size), ms=ms))
    ways = list(dict.fromkeys(row.way for row in found))
    return sorted(found, key=lambda row: (row.device, ways.index(row.way), row.megabytes))


def draw_rescale(found: list[Pauses]) -> Figure:
    devices = list(dict.fromkeys(row.device for row in found))
    parts = [[row for row in found if row.device == device] for device in devices]
    made = figure(1.2 + 0.26 * len(found))
    heights = [len(rows) + 0.6 for rows in parts]
    grid = made.subplots(len(parts), len(CHANGES), squeeze=False, sharex=True, height_ratios=heights)
    for axes, change in zip(grid[0], CHANGES, strict=True):
        axes.set_title(change)
    for rows, line, device in zip(parts, grid, devices, strict=True):
        for kind, axes in enumerate(line):
            rows_of(axes, [f"{row.megabytes:g} MB" for row in rows] if kind == 0 else [""] * len(rows))
            _pauses(axes, rows, kind)
        line[0].text(-0.33, -0.95, device, transform=line[0].get_yaxis_transform(), ha="right", weight="bold")
        for way in dict.fromkeys(row.way for row in rows):
            at = [place for place, row in enumerate(rows) if row.way == way]
            line[0].text(
                -0.33,
                sum(at) / len(at),
                way.replace(" (", "\n(").replace("checkpoint, ", "checkpoint,\n").replace("'s elastic", "'s\nelastic"),
                transform=line[0].get_yaxis_transform(),
                ha="right",
                va="center",
                color=_colour(way),
                weight="bold" if way == "concertina" else "normal",
            )
    made.supxlabel(
        "pause of the workers that stay: median (point, figure) and worst (line); below 1 ms drawn as 1 ms", fontsize=9
    )
    return made


def _colour(way: str) -> str:
    return OURS if way == "concertina" else INK


def _pauses(axes: Axes, rows: list[Pauses], kind: int) -> None:
    axes.set_xscale("log")
    axes.set_xlim(0.7 * LEAST_MS, MOST_MS)
    axes.set_xticks([1, 10, 100, 1e3, 1e4, 1e5], ["1 ms", "10", "100", "1 s", "10", "100"])
    axes.minorticks_off()
    axes.grid(axis="x")
    for place, row in enumerate(rows):
        if place and row.way != rows[place - 1].way:
            axes.axhline(place - 0.5, color=LIGHT, linewidth=0.6)
        if row.ms[kind] is None:
            axes.text(LEAST_MS, place, "not measured", color=GREY, va="center", fontsize=SMALL)
            continue
        median, worst = (max(LEAST_MS, value) for value in row.ms[kind] or ())
        axes.plot([median, worst], [place, place], color=_colour(row.way), linewidth=1.5, solid_capstyle="butt")
        axes.plot(median, place, "o", color=_colour(row.way), markersize=5)
        axes.annotate(_time((row.ms[kind] or (0.0,))[0]), (worst, place), (7, 0), **BESIDE)


def _time(ms: float) -> str:
    return f"{ms:,.0f} ms" if ms < 1000 else f"{ms / 1000:.1f} s"


# -- simulated against live -----------------------------------------------------------------------------------------

KINDS = {"mlp": OURS, "digits": ORANGE, "chars": GREEN}
TINTS = (0.55, 0.3, 0.42, 0.22)  # jobs of one kind in turn, so that neighbours differ
Steps = tuple[tuple[float, int], ...]  # (from this second on, so many slots)


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """One job, live and simulated."""

    name: str
    jct_s: tuple[float, float] | None  # None: refused by one of the two
    slots: tuple[Steps, Steps] | None  # None: the page is of before these were written down


def read_sim_to_live(page: str) -> list[Compared]:
    found = []
    for name, live, simulated, *slots in table(page, "Job", "Live", "Simulated").rows:
        ended = NUMBER.search(live) and NUMBER.search(simulated)
        found.append(
            Compared(
                name=name,
                jct_s=(number(live), number(simulated)) if ended else None,
                slots=(_steps(slots[0]), _steps(slots[1])) if slots else None,
            )
        )
    return found


def _steps(cell: str) -> Steps:
    """Of a cell such as `2 from 0.4, 4 from 17.2, 0 from 91.0`."""
    pairs = (numbers(part) for part in cell.split(",") if NUMBER.search(part))
    return tuple((second, int(slots)) for slots, second in pairs)


def draw_sim_to_live(found: list[Compared]) -> Figure:
    if any(row.slots is None for row in found):
        made = figure(4.4, width=4.6)
        _diagonal(made.subplots(), found)
        return made
    made = figure(4.2)
    places = made.subplot_mosaic([["live", "jct"], ["simulated", "jct"]], width_ratios=(3, 2))
    moments = sorted({at for row in found for steps in row.slots or () for at, _ in steps})
    for side, name in enumerate(("live", "simulated")):
        _stack(places[name], found, side, moments)
        places[name].set_title(f"slots of each job, {name}")
    places["live"].tick_params(labelbottom=False)
    places["simulated"].set_xlabel("seconds since the first submission")
    _diagonal(places["jct"], found)
    return made


def _stack(axes: Axes, found: list[Compared], side: int, moments: list[float]) -> None:
    """The slots of all jobs on top of one another, each with its number where there is most room for it."""
    below = [0] * len(moments)
    for place, row in enumerate(found):
        above = (
            [low + _held(row.slots[side], at) for low, at in zip(below, moments, strict=True)] if row.slots else below
        )
        axes.fill_between(moments, below, above, step="post", facecolor=_tint(row.name, place), edgecolor="white")
        levels = list(zip(below, above, strict=True))
        rooms = []
        for (low, high), run in itertools.groupby(range(len(moments) - 1), key=levels.__getitem__):
            inside = list(run)
            begin, end = moments[inside[0]], moments[inside[-1] + 1]
            rooms.append((min(end - begin, 30.0) * (high - low), (begin + end) / 2, (low + high) / 2))
        room, x, y = max(rooms)
        if room:
            axes.text(x, y, _number(row.name), ha="center", va="center", fontsize=SMALL)
        below = above
    axes.set_xlim(moments[0], moments[-1])
    axes.set_ylim(0, max(below))
    axes.yaxis.get_major_locator().set_params(integer=True)


def _held(steps: Steps, at: float) -> int:
    return next((slots for since, slots in reversed(steps) if since <= at), 0)


def _number(name: str) -> str:
    """`03` of digits-8-03."""
    return name.rpartition("-")[2]


def _colour_of_kind(name: str) -> str:
    return next((colour for kind, colour in KINDS.items() if name.startswith(kind)), PURPLE)


def _tint(name: str, place: int) -> tuple[float, ...]:
    from matplotlib.colors import to_rgb

    part = TINTS[place // len(KINDS) % len(TINTS)]
    return tuple(1 - part * (1 - value) for value in to_rgb(_colour_of_kind(name)))


def _diagonal(axes: Axes, found: list[Compared]) -> None:
    """A point for each job that both finished, with its number where they differ by more than a tenth."""
    done = [(row.name, *row.jct_s) for row in found if row.jct_s]
    most = 1.1 * max(max(live, simulated) for _, live, simulated in done)
    axes.plot([0, most], [0, most], color=GREY, linewidth=1)
    axes.text(0.97 * most, 0.93 * most, "equal", ha="right", color=GREY, fontsize=SMALL, rotation=45, va="top")
    written: list[tuple[float, float]] = []
    for name, live, simulated in sorted(done, key=lambda row: row[1]):
        axes.plot(simulated, live, "o", color=_colour_of_kind(name), markersize=5)
        if abs(live - simulated) < 0.1 * live:
            continue
        side = 1 if live < simulated else -1
        at, height = simulated + 0.04 * side * most, live
        while any(abs(at - x) < 0.06 * most and abs(height - y) < 0.035 * most for x, y in written):
            height += 0.012 * most  # above what is there
        written.append((at, height))
        where = {"ha": "left" if side > 0 else "right"}
        axes.annotate(_number(name), (simulated, height), (5 * side, 0), **BESIDE | where)
    for place, (kind, colour) in enumerate(KINDS.items()):
        axes.text(0.03, 0.97 - 0.055 * place, kind, transform=axes.transAxes, color=colour, va="top", weight="bold")
    axes.set(xlim=(0, most), ylim=(0, most), aspect="equal", xlabel="simulated, s", ylabel="live, s")
    axes.set_title("completion time of each job")
