"""Pictures of policies: deadlines met, what elasticity gains, our own beside the best others, planning, answers."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING

from benchmarks.pages import number, numbers, table
from benchmarks.picture_style import GREEN, GREY, INK, ORANGE, OURS, PURPLE, SKY, SMALL, figure, rows_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# -- deadlines met -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Met:
    """Of a trace, the jobs in time under each policy."""

    trace: str
    jobs: int
    met: tuple[tuple[str, int | None], ...]


def read_scheduling(page: str) -> list[Met]:
    theirs = {row[0]: row[3] for row in table(page, "trace", "cluster", "met, ours").rows}
    figure8 = table(page, "trace", "elasticflow", "edf", section="Fig. 8")
    figure6b = table(page, "", "elasticflow", "edf", section="Fig. 6b")
    ours = [row for row in figure6b.rows if row[0].startswith("ours")]
    found = []
    for trace, first, *others in [("195job", *ours[0][1:]), *(row for row in figure8.rows if row[0] in theirs)]:
        met, jobs = numbers(first)
        code = None if theirs[trace] == "-" else int(number(theirs[trace]))
        rest = ((policy, int(number(cell))) for policy, cell in zip(figure8.head[2:], others, strict=True))
        found.append(
            Met(trace=trace, jobs=int(jobs), met=(("elasticflow", int(met)), ("its authors' code", code), *rest))
        )
    return found


def draw_scheduling(found: list[Met]) -> Figure:
    made = figure(2.8)
    grid = made.subplots(1, len(found), squeeze=False)[0]
    for place, (axes, row) in enumerate(zip(grid, found, strict=True)):
        rows_of(axes, [policy for policy, _ in row.met] if place == 0 else [""] * len(row.met))
        for line, (policy, met) in enumerate(row.met):
            part = 0.0 if met is None else 100 * met / row.jobs
            axes.barh(line, part, height=0.7, color=OURS if policy == "elasticflow" else "#b8b8b8")
            axes.text(part + 4, line, "-" if met is None else f"{part:.0f} %", va="center", fontsize=SMALL)
        axes.set(xlim=(0, 140), xticks=[])
        axes.spines["bottom"].set_visible(False)
        axes.set_title(f"{row.trace}\n{row.jobs:,} jobs", fontsize=SMALL)
    made.supxlabel("deadlines met, in per cent of all jobs", fontsize=9)
    return made


# -- elastic policies beside their static twins --------------------------------------------------------------------

PAIRS = (
    ("easyscale-homo for yarn-cs", "homo"),
    ("easyscale-heter for yarn-cs", "heter"),
    ("elastic-fifo for fifo", "fifo"),
    ("elastic-backfill for backfill", "backfill"),
    ("elastic-tiresias for tiresias", "tiresias"),
)


def read_elastic(page: str) -> list[tuple[str, list[float]]]:
    """Mean JCT of the static policy over that of the elastic one, a figure for each trace."""
    mixed = table(page, "trace", "jobs", "JCT yarn-cs").rows
    elan = table(page, "trace", "cluster", "policy", "pending").rows
    edl = [row for row in table(page, "queues", "size, device-seconds").rows if row[1] == "all"]
    gains = {
        "homo": [number(row[2]) / number(row[3]) for row in mixed],
        "heter": [number(row[2]) / number(row[4]) for row in mixed],
        **{name: [number(row[4]) / number(row[7]) for row in elan if row[2] == name] for name in ("fifo", "backfill")},
        "tiresias": [number(row[3]) / number(row[4]) for row in edl],
    }
    return [(name, gains[key]) for name, key in PAIRS]


def draw_elastic(found: list[tuple[str, list[float]]]) -> Figure:
    made = figure(2.9)
    axes = made.subplots()
    rows_of(axes, [f"{name} ({len(gains)})" for name, gains in found])
    axes.set_xscale("log")
    axes.set_xticks([1, 2, 5, 10, 20, 50, 100], ["as fast", "2 times", "5", "10", "20", "50", "100 times"])
    axes.minorticks_off()
    axes.grid(axis="x")
    axes.axvline(1, color=GREY, linewidth=1)
    for line, (_, gains) in enumerate(found):
        axes.plot(gains, [line] * len(gains), "o", color=OURS, alpha=0.45, markersize=6, markeredgewidth=0)
        mean = statistics.geometric_mean(gains)
        axes.plot([mean, mean], [line - 0.22, line + 0.22], color=ORANGE, linewidth=2.5)
        axes.text(
            mean, line - 0.26, f"{mean:.1f}", color=ORANGE, ha="center", va="bottom", fontsize=SMALL, weight="bold"
        )
    words = "how many times as fast jobs complete, in the mean: a point for each trace, and the geometric mean of all"
    made.supxlabel(words, fontsize=9)
    return made


# -- our own policy ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixed:
    """Jobs with and without a deadline on one trace; times and deadlines met as parts of elasticflow's."""

    trace: str
    time: tuple[float, float]  # ours, and the fastest other's
    met: tuple[float, float]
    other: str
    late: int  # promises of the fastest other that broke


def read_own_policy(page: str) -> list[Mixed]:
    found = []
    for first, section in (("trace", "30 %"), ("virtual cluster", "Where the cluster")):
        for trace, ours, best, _, theirs, *met in table(
            page, first, "`concertina`", "best other", section=section
        ).rows:
            base, deadlines = number(theirs), number(met[1])
            last = numbers(met[2])
            found.append(
                Mixed(
                    trace=trace if first == "trace" else f"VC {trace}",
                    time=(number(ours) / base, number(best) / base),
                    met=(number(met[0]) / deadlines, last[0] / deadlines),
                    other=best.partition("`")[2].partition("`")[0],
                    late=int(last[1]) if len(last) > 1 else 0,
                )
            )
    return found


def draw_own_policy(found: list[Mixed]) -> Figure:
    made = figure(1.1 + 0.25 * len(found))
    left, right = made.subplots(1, 2, width_ratios=(3, 2))
    rows_of(left, [row.trace for row in found])
    rows_of(right, [""] * len(found))
    for line, row in enumerate(found):
        for axes, (ours, other) in ((left, row.time), (right, row.met)):
            axes.plot([ours, other], [line, line], color="#b8b8b8", linewidth=1.2, zorder=1)
            if row.other != "elasticflow":
                axes.plot(other, line, "o", markersize=6, markerfacecolor="white", markeredgecolor=INK)
            axes.plot(ours, line, "o", color=OURS, markersize=6)
        if row.other != "elasticflow":
            left.text(max(*row.time) + 0.03, line, row.other, va="center", fontsize=SMALL)
        if row.late:
            right.text(max(*row.met, 1) + 0.03, line, f"{row.late} late", va="center", fontsize=SMALL, color=ORANGE)
    for axes, title in ((left, "time to complete, jobs without a deadline"), (right, "deadlines met")):
        axes.axvline(1, color=GREY, linewidth=1)
        axes.grid(axis="x")
        axes.set_title(title)
    left.set_xlim(0, 1.3)
    right.set_xlim(0.45, 1.3)
    made.supxlabel(
        "elasticflow = 1; blue: concertina; white: the policy with the shortest time of all others", fontsize=9
    )
    return made


# -- the allocator -------------------------------------------------------------------------------------------------


def read_allocation(page: str) -> list[tuple[str, list[tuple[float, float]]]]:
    """Jobs more than under greedy by number of nodes, in each world; and the queue under both."""
    found = []
    harder = table(page, "jobs more")
    nodes = [number(cell) for cell in harder.head[1:]]
    for name, *cells in harder.rows:
        found.append((name, list(zip(nodes, map(number, cells), strict=True))))
    queue = table(page, "nodes", "queue, min: `greedy`", "`milp`").rows
    for place, name in ((1, "greedy"), (2, "milp")):
        found.append((name, [(number(row[0]), number(row[place])) for row in queue]))
    return found


def draw_allocation(found: list[tuple[str, list[tuple[float, float]]]]) -> Figure:
    made = figure(3.8)
    left, right = made.subplots(1, 2, width_ratios=(2, 3))
    colours = {"greedy": GREY, "milp": OURS}
    for name, points in found[-2:]:
        left.plot(*zip(*points, strict=True), "o-", color=colours[name], markersize=4)
        left.annotate(name, points[1], (8, 5), textcoords="offset points", color=colours[name], weight="bold")
    left.set(xlabel="nodes", ylim=(0, None))
    left.set_title("minutes in the queue")
    for (name, points), colour in zip(found[:-2], (INK, SKY, ORANGE, PURPLE, GREEN), strict=False):
        right.plot(*zip(*points, strict=True), "o-", color=colour, markersize=4, label=name)
    right.axhline(0, color=GREY, linewidth=1)
    right.set(xlabel="nodes")
    right.set_title("jobs that milp ends more while greedy ends 100")
    made.legend(fontsize=SMALL, frameon=False, loc="outside lower center", ncols=3, columnspacing=1, handlelength=1.2)
    return made


# -- answers -------------------------------------------------------------------------------------------------------


def read_questions(page: str) -> list[tuple[str, str, tuple[float, float], tuple[float, float]]]:
    """Trace, policy, and the errors (median, nine in ten) of quotes and of etas, in per cent."""
    rows = table(page, "trace", "cluster", "policy", "jobs there").rows
    return [
        (row[0], row[2], (number(row[5]), number(row[6])), (number(row[10]), number(row[11]))) for row in rows
    ]  # fmt: skip


def draw_questions(found: list[tuple[str, str, tuple[float, float], tuple[float, float]]]) -> Figure:
    made = figure(1.0 + 0.25 * len(found))
    for kind, axes in enumerate(made.subplots(1, 2, sharex=True)):
        rows_of(axes, [f"{row[0].partition('-')[0]}, {row[1]}" for row in found] if kind == 0 else [""] * len(found))
        axes.grid(axis="x")
        for line, row in enumerate(found):
            median, most = row[2 + kind]
            axes.plot([median, most], [line, line], color=OURS, linewidth=1.5)
            axes.plot(median, line, "o", color=OURS, markersize=5)
            axes.text(most + 1, line, f"{median:.0f}", va="center", fontsize=SMALL)
        axes.set_xlim(0, 1.15 * max(most for *_, quote, eta in found for most in (quote[1], eta[1])))
        axes.set_title(("quotes, for newcomers", "etas, of jobs that are there")[kind])
    made.supxlabel("error in per cent: median (point) and nine in ten (end of the line)", fontsize=9)
    return made


# -- the simulator -------------------------------------------------------------------------------------------------


def read_rounds(page: str) -> list[tuple[str, list[tuple[float, float]]]]:
    """Milliseconds of a decision by number of jobs, for each policy; the first is a sort of as many numbers."""
    rounds = table(page, "policy", "100 jobs, ms")
    jobs = [number(cell) for cell in rounds.head[1:-1]]
    return [(name, list(zip(jobs, map(number, cells[:-1]), strict=True))) for name, *cells in rounds.rows]


def draw_rounds(found: list[tuple[str, list[tuple[float, float]]]]) -> Figure:
    made = figure(5.2)
    axes = made.subplots()
    axes.set_xscale("log")
    axes.set_yscale("log")
    ends = sorted((points[-1][1], name) for name, points in found)
    least = 0.0
    for end, name in ends:
        points = dict(found)[name]
        sort = name.startswith("(")
        axes.plot(*zip(*points, strict=True), "--" if sort else "-", color=ORANGE if sort else OURS, linewidth=1.2)
        least = max(end, least * 1.55)  # no two names on one another
        axes.annotate(
            name, points[-1], (1.35 * points[-1][0], least), va="center", fontsize=SMALL,
            color=ORANGE if sort else INK, arrowprops={"arrowstyle": "-", "color": "#c0c0c0", "linewidth": 0.6},
        )  # fmt: skip
    axes.set_xlim(90, 8 * found[0][1][-1][0])
    axes.set_xticks([100, 1e3, 1e4, 1e5], ["100", "1,000", "10,000", "100,000"])
    axes.set_yticks([0.01, 0.1, 1, 10, 100, 1000], ["0.01 ms", "0.1 ms", "1 ms", "10 ms", "100 ms", "1 s"])
    axes.minorticks_off()
    axes.grid()
    axes.set_xlabel("active jobs")
    axes.set_title("one decision")
    return made
