"""Charts of a run as SVG text that uses the page's colours, so that one drawing suits light and dark schemes.

Matplotlib draws with placeholder colours, which are replaced by CSS variables; text stays text.
"""

import html
import io
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import matplotlib
import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import FuncFormatter, LogFormatter, MaxNLocator
from numpy.typing import NDArray

Metrics = Sequence[Mapping[str, float]]
Column = NDArray[np.float64]

PALETTE = ("blue", "orange", "green", "purple", "sky", "amber", "yellow", "grey", "brown")
"""Names of CSS variables, `--blue` and so on, to which the page gives values for its light and dark schemes."""
_LONGEST_LABEL = 27
"""Most letters of a line's name in a legend."""
_WIDTH, _BESIDE_LABEL = 68, 6
"""Letters that fit the width of a legend; those whose place a line's sample and the gaps beside it take."""
_MOST_POINTS = 300
"""Most points of a line; longer runs are drawn as means over neighbouring steps, to stay readable and small."""
INK, MUTED, GRID, SURFACE = "#0000f1", "#0000f2", "#0000f3", "#0000f4"
SERIES = {name: f"#0000e{index}" for index, name in enumerate(PALETTE)}
_VARIABLES = {
    INK: "--ink",
    MUTED: "--muted",
    GRID: "--grid",
    SURFACE: "--surface",
    **{placeholder: f"--{name}" for name, placeholder in SERIES.items()},
}
STYLE = {
    "svg.fonttype": "none",
    "text.parse_math": False,
    "font.size": 9,
    "text.color": INK,
    "axes.labelcolor": MUTED,
    "axes.edgecolor": GRID,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "grid.linewidth": 0.6,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "ytick.minor.size": 0,
    "legend.frameon": False,
}


@dataclass(frozen=True, slots=True)
class Line:
    """One metric over the steps."""

    metric: str
    label: str
    colour: str
    """Colour from PALETTE."""
    held_out: bool = False
    """True for a metric of a few steps: it is drawn with markers, and with bounds `<metric>_low` and `_high` if
    recorded."""
    dashed: bool = False
    scale: float = 1.0


@dataclass(frozen=True, slots=True)
class Panel:
    """One pair of axes."""

    y_label: str
    """Quantity and unit."""
    lines: tuple[Line, ...]
    kind: str = "linear"
    """Kind of the axis: linear, log, or stacked (areas on top of each other; a missing value counts as zero)."""
    from_zero: bool = False


@dataclass(frozen=True, slots=True)
class Chart:
    """A figure: panels above each other that share their steps."""

    title: str
    note: str
    """Explanation for the reader, in plain text."""
    panels: tuple[Panel, ...]


def series(metrics: Metrics, name: str) -> tuple[Column, Column]:
    """Steps and values of a metric, both of shape [n], where it was recorded and is finite."""
    points = [(line["step"], line[name]) for line in metrics if math.isfinite(line.get(name, math.nan))]
    steps, values = np.array(points, np.float64).reshape(-1, 2).T
    return steps, values


def means(values: Column, group: int) -> Column:
    """Means over `group` neighbours in the last axis: [..., n] -> [..., ceil(n / group)]."""
    starts = np.arange(0, values.shape[-1], group)
    if group == 1 or not len(starts):
        return values
    sums: Column = np.add.reduceat(values, starts, axis=-1)
    return sums / np.diff(np.append(starts, values.shape[-1]))


def draw(chart: Chart, metrics: Metrics) -> str | None:
    """The chart as an <svg> element, or None if none of its metrics was recorded.

    The element refers to nothing outside itself. Its ids are unique if its title is.
    """
    panels = [panel for panel in chart.panels if _recorded(panel, metrics)]
    if not panels:
        return None
    group = math.ceil(len(metrics) / _MOST_POINTS)
    with matplotlib.rc_context({**STYLE, "svg.hashsalt": chart.title}):
        figure = Figure(figsize=(5.4, 3.3), layout=ConstrainedLayoutEngine(h_pad=0.08))
        column = figure.subplots(len(panels), 1, sharex=True, squeeze=False)[:, 0]
        for axes, panel in zip(column, panels, strict=True):
            _draw_panel(axes, panel, metrics, group)
            if panel.kind != "log":
                axes.yaxis.set_major_locator(MaxNLocator(nbins=5 if len(panels) == 1 else 3))
        column[-1].set_xlabel("PPO step" if group == 1 else f"PPO step (means over {group})")
        column[-1].xaxis.set_major_formatter(FuncFormatter(lambda value, _: tick(value)))
        column[-1].xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8, steps=[1, 2, 5, 10]))
        figure.align_ylabels()
        return inline(figure, chart.title)


def _recorded(panel: Panel, metrics: Metrics) -> list[Line]:
    return [line for line in panel.lines if len(series(metrics, line.metric)[0])]


def _draw_panel(axes: Axes, panel: Panel, metrics: Metrics, group: int) -> None:
    axes.margins(y=0.12)
    lines = _recorded(panel, metrics)
    if panel.kind == "stacked":
        drawn = _draw_stack(axes, lines, metrics, group)
    else:
        drawn = [_draw_line(axes, line, metrics, 1 if line.held_out else group) for line in lines]
    if panel.kind == "log" and any((series(metrics, line.metric)[1] > 0).any() for line in lines):
        axes.set_yscale("log")
    elif panel.from_zero or panel.kind == "stacked":
        axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: tick(value)))
    if axes.get_yscale() == "log":
        axes.yaxis.set_minor_formatter(_MinorTicks())
    axes.set_ylabel(panel.y_label)
    if len(panel.lines) > 1 or lines[0].held_out:
        labels = [shortened(line.label) for line in lines]
        place = {"loc": "lower left", "bbox_to_anchor": (0, 1), "borderaxespad": 0}
        # Drawn artists and labels apart: matplotlib leaves out labels of its own artists that begin with `_`.
        axes.legend(drawn, labels, **place, ncols=columns(labels), handlelength=1.6)


def shortened(label: str) -> str:
    """The label in one line, without its middle if it is too long for a legend."""
    label, half = " ".join(label.split()), _LONGEST_LABEL // 2
    return label if len(label) <= _LONGEST_LABEL else f"{label[:half]}…{label[-half:]}"


def columns(labels: Sequence[str]) -> int:
    """The number of columns, of four at most, in which a legend of these labels is not wider than a chart."""
    widths = sorted((len(label) + _BESIDE_LABEL for label in labels), reverse=True)
    return max(count for count in range(1, 5) if count == 1 or sum(widths[:count]) <= _WIDTH)


def tick(value: float) -> str:
    """Text of a number at an axis, such as `2,000`, `−0.5`, `1e−5`."""
    digits = f"{value:,.0f}" if 1e5 <= abs(value) < 1e12 else f"{value:,g}"
    return digits.replace("e-0", "e-").replace("e+", "e").replace("-", "−")


class _MinorTicks(LogFormatter):
    """Labels between powers of ten, which matplotlib draws where an axis spans few of them; as plain numbers."""

    def __call__(self, x: float, pos: int | None = None) -> str:
        """The label; empty for a tick that is not labelled."""
        return tick(x) if super().__call__(x, pos) else ""


def _draw_line(axes: Axes, line: Line, metrics: Metrics, group: int) -> Artist:
    steps, values = (means(part, group) for part in series(metrics, line.metric))
    colour, style = SERIES[line.colour], "--" if line.dashed else "-"
    marker = "o" if line.held_out or len(steps) == 1 else ""
    [drawn] = axes.plot(steps, values * line.scale, style + marker, color=colour, markersize=4, linewidth=1.4)
    low_steps, low = series(metrics, f"{line.metric}_low")
    high_steps, high = series(metrics, f"{line.metric}_high")
    if line.held_out and len(low) and np.array_equal(low_steps, high_steps):
        axes.vlines(low_steps, low * line.scale, high * line.scale, color=colour, linewidth=1.2)
    return drawn


def _draw_stack(axes: Axes, lines: Sequence[Line], metrics: Metrics, group: int) -> Sequence[Artist]:
    present = {line.metric: dict(zip(*series(metrics, line.metric), strict=True)) for line in lines}
    steps = sorted(set().union(*present.values()))
    layers = [[present[line.metric].get(step, 0.0) * line.scale for step in steps] for line in lines]
    return axes.stackplot(
        means(np.array(steps), group),
        means(np.array(layers), group),
        step="mid",
        colors=[SERIES[line.colour] for line in lines],
        edgecolor=SURFACE,
        linewidth=0.4 if len(steps) < 100 else 0,
    )


def inline(figure: Figure, title: str) -> str:
    """The figure as an <svg> element to put into a page."""
    buffer = io.StringIO()
    nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    figure.savefig(buffer, format="svg", transparent=True, metadata=nothing)
    text = buffer.getvalue()
    box = re.search(r'viewBox="[^"]*"', text)
    assert box is not None
    body = text[text.index(">", text.index("<svg")) + 1 :]
    # Removes ids that several charts would share, a rule for every element of the page, and comments.
    body = re.sub(r'(?<=<g) id="[^"]*"|<style.*?</style>|<!--.*?-->', "", body, flags=re.DOTALL)
    for placeholder, variable in _VARIABLES.items():
        body = body.replace(placeholder, f"var({variable})")
    return f'<svg {box[0]} role="img" aria-label="{html.escape(title)}">{body}'
