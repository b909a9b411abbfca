"""The score of the samples over the samples that were trained on, as a picture."""

from collections.abc import Mapping, Sequence
from math import ceil
from pathlib import Path

import numpy as np
from matplotlib import rc_context
from matplotlib.figure import Figure

from benchmarks.lag.run import BATCH, NONE, Setting

COLUMNS = 4


def draw(results: Mapping[Setting, Sequence[Sequence[float]]], path: Path) -> None:
    """Writes the picture: a panel for each setting, thin lines for its seeds and a thick one for their mean."""
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "lag", "font.size": 8}):
        rows = ceil(len(results) / COLUMNS)
        figure = Figure(figsize=(7.2, 0.4 + 1.6 * rows), layout="constrained")
        panels = figure.subplots(rows, COLUMNS, sharex=True, sharey=True, squeeze=False)
        for axes in panels.flat[len(results) :]:
            axes.remove()
        for axes, (setting, curves) in zip(panels.flat, results.items(), strict=False):
            samples = BATCH * np.arange(setting.steps)
            colour = "tab:red" if setting.correction == NONE and setting.lag else "tab:blue"
            for curve in curves:
                axes.plot(samples, curve, color=colour, linewidth=0.5, alpha=0.5)
            axes.plot(samples, np.mean(curves, axis=0), color=colour, linewidth=1.6)
            axes.set_title(str(setting), fontsize=8)
            axes.grid(linewidth=0.3)
        figure.supxlabel("samples trained on", fontsize=8)
        figure.supylabel("mean score of a batch", fontsize=8)
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
