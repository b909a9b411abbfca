"""The held-out gold score over the samples that were trained on, as a picture."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, stdev

from matplotlib import rc_context
from matplotlib.figure import Figure

from benchmarks.staleness_seeds.arm import NONE, Result, Setting


def draw(results: Mapping[Setting, Sequence[Result]], path: Path) -> None:
    """Writes the picture: a line for each setting, the mean over its seeds, each point with its standard error."""
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "staleness", "font.size": 9}):
        figure = Figure(figsize=(6.4, 3.8), layout="constrained")
        axes = figure.subplots()
        for setting, runs in results.items():
            name = "no correction" if setting.correction == NONE else setting.correction
            samples, curves = runs[0].samples, list(zip(*(run.gold for run in runs), strict=True))
            errors = [stdev(values) / len(values) ** 0.5 if len(values) > 1 else 0.0 for values in curves]
            axes.errorbar(
                samples,
                [fmean(values) for values in curves],
                yerr=errors,
                capsize=3,
                marker="o",
                markersize=3,
                linestyle="--" if setting.correction == NONE else "-",
                label=f"s = {setting.staleness}, {name}",
            )
        axes.set_xlabel("samples trained on")
        axes.set_ylabel("held-out gold score")
        axes.grid(linewidth=0.4)
        axes.legend(frameon=False)
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
