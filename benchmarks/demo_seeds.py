"""The demo on several fresh seeds, and once without the KL penalty: the experiment that docs/demo.md records.

    python -m benchmarks.demo_seeds [--seeds 0,1,2] [--without-kl 0]

For each seed: models and data of that seed, services up, PPO as in deploy/ppo.yaml, services down. Held-out gold
score before and after, with 95 % intervals over prompts, and the wall time of the PPO steps alone. Everything goes
through the `quartet` command, as a user would type it; runs/demo-seed<N> holds each run and its report.
"""

import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml
from rich.console import Console
from rich.table import Table

from benchmarks.arguments import numbers
from benchmarks.ended import heed_sigterm
from orchestrator.commands.run_folder import RUNS
from orchestrator.evaluation.intervals import Interval
from orchestrator.monitoring.metrics import read_metrics
from orchestrator.report.comparison import read_comparison
from orchestrator.report.page import write_report

BASE = Path("deploy/ppo.yaml")
console = Console()


def main(
    seeds: Annotated[str, typer.Option(help="Seeds of the runs with the KL penalty.")] = "0,1,2",
    without_kl: Annotated[str, typer.Option(help="Seeds of the runs without it; empty for none.")] = "0",
    steps: Annotated[int, typer.Option(min=1)] = 40,
) -> None:
    """Runs the benchmark and prints its results."""
    wanted = [(seed, True) for seed in numbers(seeds, "--seeds")]
    wanted += [(seed, False) for seed in numbers(without_kl, "--without-kl")]
    heed_sigterm()
    console.print(_table([_train(seed, steps, kl=kl) for seed, kl in wanted]))


def _train(seed: int, steps: int, *, kl: bool) -> Path:
    models = f"models/reviews-{seed}"
    _run("-m", "recipes.reviews", "--out", models, "--seed", str(seed))
    name = f"demo-seed{seed}" + ("" if kl else "-without-kl")
    config = Path(models) / f"{name}.yaml"
    config.write_text(yaml.safe_dump(variant(models, name, seed, steps, kl=kl), sort_keys=False))
    try:
        _quartet("up", str(config))
        _quartet("train", "--overwrite", str(config))
    finally:
        _quartet("down")
    write_report(RUNS / name)
    return RUNS / name


def variant(models: str, name: str, seed: int, steps: int, *, kl: bool) -> dict[str, Any]:
    """deploy/ppo.yaml with these models, name, seed and steps, with or without the KL penalty."""
    text = BASE.read_text().replace("models/reviews/", f"{models}/")
    config: dict[str, Any] = yaml.safe_load(text)
    orchestrator = config["orchestrator"]
    orchestrator |= {"name": name, "seed": seed, "steps": steps}
    if not kl:
        orchestrator["algorithm"]["kl"] = {"coef": 0.0}
    return config


def _quartet(*arguments: str) -> None:
    _run("-m", "orchestrator.cli", *arguments)


def _run(*arguments: str) -> None:
    console.print(f"[dim]python {' '.join(arguments)}[/dim]")
    subprocess.run([sys.executable, *arguments], check=True)


def _table(runs: list[Path]) -> Table:
    drawn = Table(title="held-out, before → after", title_justify="left")
    for column in ("run", "gold", "change in gold", "reward model", "KL", "PPO steps, s"):
        drawn.add_column(column, justify="left" if column == "run" else "right")
    for run in runs:
        comparison = read_comparison(run)
        assert comparison is not None
        measures = {measure.name: measure for measure in comparison.measures()}
        gold, score, kl = (measures[name] for name in ("gold", "held-out score", "KL to reference"))
        seconds = sum(line["seconds/step"] for line in read_metrics(run / "metrics.jsonl") if line["step"] > 0)
        drawn.add_row(
            run.name,
            f"{_mean(gold.before)} → {_mean(gold.after)}",
            f"{_mean(gold.change)} ({gold.change.low:+.2f} to {gold.change.high:+.2f})" if gold.change else "",
            f"{_mean(score.before)} → {_mean(score.after)}",
            _mean(kl.after),
            f"{seconds:.0f}",
        )
    return drawn


def _mean(interval: Interval | None) -> str:
    return "" if interval is None else f"{interval.mean:+.2f}"


if __name__ == "__main__":
    typer.run(main)
