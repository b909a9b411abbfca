"""The demo's held-out gold score after the same number of samples, by the bound on staleness, over several seeds.

    python -m benchmarks.staleness_seeds [--seeds 0,1,2] [--staleness 0,1,2,4] [--corrections tis] [--steps 40]
        [--learning-rate 2e-4] [--epochs 2] [--folder runs/staleness-seeds] [--plot FILE]

Makes the demo's models once, keeps its services up, and trains once for each seed, bound and correction as in
deploy/ppo.yaml; `none` is a correction too: no weights, as if every sample were of the policy that trains. The seed
decides prompts, sampling, minibatches and the critic's head. Each finished run is added to results.jsonl in the
folder; a later call goes on with those that are missing, and with `--plot` also draws what is there.

Prints for each bound the mean over seeds with its standard error, from the variance within settings that all of them
share, and the difference from the same run at lock-step with the standard error of that difference.
"""

from collections.abc import Mapping, Sequence
from math import sqrt
from pathlib import Path
from statistics import fmean, variance
from typing import Annotated

import typer
from rich.table import Table

from benchmarks.staleness_seeds.arm import Result, Results, Setting
from benchmarks.staleness_seeds.drawing import draw
from benchmarks.staleness_seeds.services import console, demo

PER_PROMPT = 4
"""Responses to each held-out prompt, of which there are 96."""


def main(
    seeds: str = "0,1,2",
    staleness: Annotated[str, typer.Option(help="Bounds; 0 is lock-step.")] = "0,1,2,4",
    corrections: str = "tis",
    learning_rate: float = 2e-4,
    epochs: Annotated[int, typer.Option(min=1)] = 2,
    steps: Annotated[int, typer.Option(min=1)] = 40,
    folder: Path = Path("runs/staleness-seeds"),
    plot: Annotated[Path | None, typer.Option(help="File to draw to, .svg or .png.")] = None,
) -> None:
    """Runs the benchmark and prints its results."""
    wanted = [int(seed) for seed in seeds.split(",")]
    settings = [
        Setting(int(bound), correction, learning_rate, epochs, steps)
        for correction in corrections.split(",")
        for bound in staleness.split(",")
    ]
    results = Results(folder / "results.jsonl")
    done = {(result.setting, result.seed) for result in results.read()}
    missing = [(setting, seed) for seed in wanted for setting in settings if (setting, seed) not in done]
    if missing:
        _train(folder, missing, results)
    finished = results.of(settings, wanted)
    console.print(_table(finished))
    if plot:
        draw(finished, plot)


def _train(folder: Path, missing: Sequence[tuple[Setting, int]], results: Results) -> None:
    with demo(folder) as running:
        section = running.orchestrator
        section["evaluation"] |= {"every": 10, "samples_per_prompt": PER_PROMPT}
        for place, (setting, seed) in enumerate(missing, 1):
            run = running.train(f"{setting}-seed{seed}", seed, setting.orchestrator(section))
            result = Result.of(setting, seed, run, section["batch_size"])
            results.add(result)
            console.print(f"{place} of {len(missing)}: {setting}, seed {seed}: gold {result.gold[-1]:+.3f}")


def _table(results: Mapping[Setting, Sequence[Result]]) -> Table:
    columns = (
        "correction", "s", "gold at the end, each seed", "mean", "SE", "less s = 0", "SE of that",
        "reward model", "KL", "age", "oldest", "least ESS", "corrected",
    )  # fmt: skip
    table = Table(*columns)
    shared = pooled_variance([[run.gold[-1] for run in runs] for runs in results.values()])
    for setting, runs in results.items():
        golds = [run.gold[-1] for run in runs]
        base = next((zero for at, zero in results.items() if _is_base(at, setting)), [])
        less = compared(runs, base, shared) if base and setting.staleness else None
        table.add_row(
            setting.correction,
            str(setting.staleness),
            " ".join(f"{gold:+.3f}" for gold in golds),
            f"{fmean(golds):+.3f}",
            f"{sqrt(shared / len(golds)):.3f}",
            *(("", "") if less is None else (f"{less[0]:+.3f}", f"{less[1]:.3f}")),
            f"{fmean(run.score[-1] for run in runs):+.2f}",
            f"{fmean(run.kl for run in runs):.1f}",
            f"{fmean(run.age for run in runs):.2f}",
            f"{max(run.oldest for run in runs):.0f}",
            f"{min(run.ess for run in runs):.2f}",
            f"{fmean(run.corrected for run in runs):.1%}",
        )
    return table


def _is_base(setting: Setting, of: Setting) -> bool:
    """True for the lock-step run with the same correction."""
    return setting.staleness == 0 and setting.correction == of.correction


def compared(runs: Sequence[Result], base: Sequence[Result], variance: float) -> tuple[float, float]:
    """Mean difference of the last gold scores from those of the same seeds in `base`, and its standard error by the
    variance of one run."""
    before = {run.seed: run.gold[-1] for run in base}
    differences = [run.gold[-1] - before[run.seed] for run in runs if run.seed in before]
    return fmean(differences), sqrt(2 * variance / len(differences))


def pooled_variance(groups: Sequence[Sequence[float]]) -> float:
    """Variance within groups, all of which are taken to share it; 0 without a group of two."""
    weights = [len(group) - 1 for group in groups]
    total = sum(weights)
    if not total:
        return 0.0
    return sum(weight * variance(group) for weight, group in zip(weights, groups, strict=True) if weight) / total


if __name__ == "__main__":
    typer.run(main)
