"""Helpers that write the folder of a run."""

import io
import json
from pathlib import Path
from typing import Any

from rich.console import Console

from orchestrator.report.charts import sections
from orchestrator.report.page import summary_table


def sample(row: int, **fields: Any) -> dict[str, Any]:
    return {
        "row": row,
        "prompt": f"prompt {row}",
        "response": f"response {row}",
        "label": "",
        "ended": True,
        "task": "",
        "score": 0.0,
        "scores": {},
        "kl": 0.0,
        "length": 10,
        "judges": {},
        **fields,
    }


def evaluate(run: Path, step: int, samples: list[dict[str, Any]]) -> None:
    (run / "evaluations").mkdir(parents=True, exist_ok=True)
    lines = "".join(json.dumps(one) + "\n" for one in samples)
    (run / "evaluations" / f"step-{step:06d}.jsonl").write_text(lines)


def measure(run: Path, lines: list[dict[str, Any]]) -> None:
    run.mkdir(parents=True, exist_ok=True)
    stamped = ({"time": 1.7e9 + line["step"], **line} for line in lines)
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in stamped))


def every_metric(judges: tuple[str, ...] = ("gold",)) -> list[str]:
    recorded = [*(f"eval/{judge}" for judge in judges), "score/right/mean", "task/sums/response/length_mean"]
    charts = [chart for group in sections(recorded, stale=True).values() for chart in group]
    return [line.metric for chart in charts for panel in chart.panels for line in panel.lines]


def full_run(run: Path, steps: int = 4) -> Path:
    held_out = {
        "eval/score": 0.1,
        "eval/score_low": 0.0,
        "eval/score_high": 0.2,
        "eval/gold": -0.2,
        "eval/kl": 0.0,
    }
    trained = [{"step": step, "seconds/step": 30.0, **dict.fromkeys(every_metric(), 0.5)} for step in range(1, steps)]
    measure(run, [{"step": 0, **held_out}, *trained])
    evaluate(run, 0, [sample(row, score=-1.0, judges={"gold": -0.5}) for row in range(8)])
    evaluate(run, 2, [sample(row, score=9.0, judges={"gold": 9.0}) for row in range(8)])
    evaluate(run, 10, [sample(row, score=1.0, judges={"gold": 0.25}, kl=3.5) for row in range(8)])
    (run / "config.yaml").write_text("name: demo\n")
    return run


def printed(run: Path) -> str:
    console = Console(file=io.StringIO(), width=80, color_system=None)
    console.print(summary_table(run))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()
