"""A picture of the last steps of a run: who worked, and who waited for whom."""

from collections.abc import Sequence
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, MaxNLocator

from orchestrator.report.charts import COLOURS
from orchestrator.report.svg import MUTED, SERIES, STYLE, inline, tick
from orchestrator.tracing.activity import AWAITED, LOOP, PARTS, TRACK_PARTS, WORKING, Stretch, stretches
from orchestrator.tracing.file import read_tail
from orchestrator.tracing.spans import STEPS, Span, Window

STEPS_DRAWN = 3
_UNITS = ((3 * 3600.0, 3600.0, "hours"), (600.0, 60.0, "minutes"), (1.0, 1.0, "seconds"), (0.0, 1e-3, "milliseconds"))
"""Least duration of the picture, seconds per unit, and the unit."""
_THICK, _THIN = 0.72, 0.2
_PIXELS = 2000
"""Stretches shorter than this part of the picture are left out."""


def draw_last_steps(trace: Path) -> str:
    """The figure of the last steps in a run's trace file; empty if the file is missing or holds no whole step."""
    spans = read_tail(trace) if trace.is_file() else []
    steps = last_steps(spans)
    if not steps:
        return ""
    window = Window(steps[0].began, steps[-1].ended, spans)
    worked = {TRACK_PARTS.get(span.track) for span in spans if span.ended > window.began}
    parts = [part for part in PARTS if part in worked]
    svg = _draw(stretches(window, parts), [LOOP, *parts], steps)
    return (
        '<figure class="card wide"><figcaption><h3>The last steps</h3><p class="note">A thick bar works. A thin one '
        f"waits, in the colour of what it waits for.</p></figcaption>{svg}</figure>\n"
    )


def last_steps(spans: Sequence[Span]) -> list[Span]:
    """The spans of the last STEPS_DRAWN steps, fewer if the run went back to a checkpoint between them."""
    steps = [span for span in spans if span.track == STEPS and "step" in span.args]
    kept: list[Span] = []
    for step in reversed(steps):
        if len(kept) == STEPS_DRAWN or (kept and kept[0].args["step"] != int(step.args["step"]) + 1):
            break
        kept.insert(0, step)
    return kept


def _draw(done: Sequence[Stretch], rows: Sequence[str], steps: Sequence[Span]) -> str:
    began, ended = steps[0].began, steps[-1].ended
    scale, unit = next((scale, unit) for least, scale, unit in _UNITS if ended - began >= least)
    with matplotlib.rc_context({**STYLE, "axes.grid.axis": "x", "svg.hashsalt": "last steps"}):
        figure = Figure(figsize=(11.2, 0.9 + 0.42 * len(rows)), layout=ConstrainedLayoutEngine(h_pad=0.08))
        axes = figure.subplots()
        drawn = [one for one in done if one.ended - one.began > (ended - began) / _PIXELS]
        for stretch in drawn:
            _bar(axes, stretch, rows.index(stretch.part), began, scale)
        for step in steps:
            middle = (step.began + step.ended) / 2 - began
            axes.axvline((step.ended - began) / scale, color=MUTED, linewidth=0.8)
            axes.text(middle / scale, -0.62, step.name, ha="center", va="bottom", color=MUTED)
        axes.set_ylim(len(rows) - 0.5, -0.6)
        axes.set_xlim(0, (ended - began) / scale)
        axes.set_yticks(range(len(rows)), rows)
        axes.set_xlabel(unit)
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: tick(value)))
        axes.xaxis.set_major_locator(MaxNLocator(nbins=10, steps=[1, 2, 2.5, 5, 10]))
        named = [whom for whom in COLOURS if whom in {_whom(stretch) for stretch in drawn}]
        patches = [Patch(color=SERIES[COLOURS[whom]], label=whom) for whom in named]
        figure.legend(handles=patches, loc="outside lower left", ncols=len(patches), handlelength=1.2)
        return inline(figure, "The last steps")


def _bar(axes: Axes, stretch: Stretch, row: int, began: float, scale: float) -> None:
    works = stretch.doing == WORKING or _whom(stretch) == LOOP == stretch.part
    axes.barh(
        row,
        (stretch.ended - stretch.began) / scale,
        left=(stretch.began - began) / scale,
        height=_THICK if works else _THIN,
        color=SERIES[COLOURS[_whom(stretch)]],
        linewidth=0,
    )


def _whom(stretch: Stretch) -> str:
    """The part whose colour a stretch has: its own while it works, else the one that it waits for."""
    if stretch.doing == WORKING:
        return stretch.part
    if stretch.part == LOOP:
        return AWAITED.get(stretch.doing, LOOP)
    return stretch.doing
