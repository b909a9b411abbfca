"""The report of a run: one self-contained HTML page, and its headline as a terminal table.

Prompts and responses may hold anything, so all text is escaped and the page's policy allows no script.
"""

import math
from datetime import UTC, datetime
from html import escape
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from orchestrator.evaluation.intervals import Interval
from orchestrator.evaluation.results import EvaluatedSample
from orchestrator.monitoring.metrics import FILE, RUN_LOG, TRACE, read_metrics
from orchestrator.monitoring.progress import duration
from orchestrator.report.charts import WAITING, sections
from orchestrator.report.comparison import BeforeAfter, Comparison, Measure, measures_of_examples, read_comparison
from orchestrator.report.frame import framed, number
from orchestrator.report.last_steps import draw_last_steps
from orchestrator.report.svg import Metrics, draw
from orchestrator.tracing.shares import WALL
from quartet.folders import naming

_ABOUT_RESULT = (
    "Responses to held-out prompts, sampled at the training temperature, with 95 % intervals over prompts. "
    "The win rate is the share of pairs of responses in which the later one scores higher; a tie counts one half."
)
_ABOUT_EXAMPLES = "On examples that are not trained on, with 95 % intervals."
_ABOUT_SAMPLES = "Taken at even distances from the held-out prompts, not picked."


def write_report(run_dir: Path) -> Path:
    """Writes run_dir/report.html from the run's files, and returns its path.

    Evaluations, config.yaml, run.log, trace.json and any single metric may be missing; their parts of the page are
    then left out.

    Raises:
        ConfigError: metrics.jsonl is missing, or a file is damaged.
    """
    metrics = read_metrics(run_dir / FILE)
    comparison = read_comparison(run_dir)
    pairs = spread(comparison.pairs(), 5) if comparison else []
    parts = [
        _header(run_dir.resolve().name, metrics),
        _table(*_result(comparison, metrics), _ABOUT_RESULT if comparison else _ABOUT_EXAMPLES),
        _charts(metrics, draw_last_steps(run_dir / TRACE)),
        _samples(pairs) if pairs else "",
        _folded("What happened", run_dir / RUN_LOG),
        _folded("Configuration", run_dir / "config.yaml"),
        "<footer>Written by Quartet from metrics.jsonl, run.log, trace.json and evaluations/ beside it.</footer>",
    ]
    path = run_dir / "report.html"
    with naming(path):
        path.write_text(framed(run_dir.resolve().name, "\n".join(filter(None, parts))), encoding="utf-8")
    return path


def summary_table(run_dir: Path) -> Table:
    """The headline for the terminal: held-out score, judges and KL before and after, with 95 % intervals.

    Raises:
        ConfigError: an evaluation's file holds something else than samples.
    """
    comparison, path = read_comparison(run_dir), run_dir / FILE
    measures, steps = _result(comparison, [] if comparison or not path.exists() else read_metrics(path))
    if not measures:
        return Table("No evaluation was recorded", box=SIMPLE_HEAD)
    table = Table(box=SIMPLE_HEAD, title="Held-out prompts" if comparison else "Held-out examples")
    for heading in _headings(*steps):
        table.add_column(heading, justify="left" if heading == "" else "right")
    for measure in measures:
        cells = [(measure.name, measure.unit), *_cells(measure)]
        table.add_row(*(Text(value).append(f"\n{below}", style="dim") for value, below in cells))
    return table


def sample_pairs(run_dir: Path, n: int = 5) -> list[BeforeAfter]:
    """Up to `n` held-out prompts with their first and last response, taken at even distances.

    Raises:
        ConfigError: an evaluation's file holds something else than samples.
    """
    comparison = read_comparison(run_dir)
    return spread(comparison.pairs(), n) if comparison else []


def spread(pairs: list[BeforeAfter], n: int) -> list[BeforeAfter]:
    """`n` of the pairs at even distances, or all of them if they are fewer."""
    count = min(n, len(pairs))
    return [pairs[index * len(pairs) // count] for index in range(count)]


def _header(name: str, metrics: Metrics) -> str:
    facts = []
    if metrics:
        facts.append(f"{int(metrics[-1]['step']):,} steps")
        facts.append(duration(sum(line.get(WALL, line.get("seconds/step", 0.0)) for line in metrics)))
        facts.append(f"{datetime.fromtimestamp(metrics[-1]['time'], UTC):%d %B %Y, %H:%M} UTC")
    about = " · ".join(facts) or "Nothing was recorded."
    return f'<header><h1>{escape(name)}</h1><p class="note">{about}</p></header>'


def _result(comparison: Comparison | None, metrics: Metrics) -> tuple[list[Measure], list[int]]:
    """Measures on held-out prompts or examples, and the step or two that they are of; nothing without evaluations."""
    return (comparison.measures(), comparison.steps) if comparison else measures_of_examples(metrics)


def _table(measures: list[Measure], steps: list[int], about: str) -> str:
    if not measures:
        return ""
    headings = "".join(f"<th scope=col>{heading}</th>" for heading in _headings(*steps))
    rows = []
    for measure in measures:
        unit = f"<small>{escape(measure.unit)}</small>" if measure.unit else ""
        cells = "".join(f"<td>{value}<small>{bounds}</small></td>" for value, bounds in _cells(measure))
        rows.append(f"<tr><th scope=row>{escape(measure.name)}{unit}</th>{cells}</tr>")
    return (
        f'<section><h2>Result</h2><p class="note">{about}</p><div class="card scroll"><table>'
        f"<thead><tr>{headings}</tr></thead><tbody>{''.join(rows)}</tbody></table></div></section>"
    )


def _charts(metrics: Metrics, last_steps: str) -> str:
    """The sections of charts; `last_steps` is a figure for that on waiting."""
    parts = []
    names = dict.fromkeys(name for line in metrics for name in line)
    stale = any(line.get("policy/staleness", 0) > 0 for line in metrics)
    for heading, charts in sections(names, stale=stale).items():
        drawn = [(chart, svg) for chart in charts if (svg := draw(chart, metrics))]
        figures = "\n".join(
            f'<figure class="card"><figcaption><h3>{chart.title}</h3>'
            f'<p class="note">{chart.note}</p></figcaption>{svg}</figure>'
            for chart, svg in drawn
        )
        if heading == WAITING:
            figures = last_steps + figures
        if figures:
            parts.append(f'<section><h2>{heading}</h2><div class="grid">\n{figures}\n</div></section>')
    return "\n".join(parts)


def _samples(pairs: list[BeforeAfter]) -> str:
    cards = "\n".join(
        f'<article class="card sample"><p>{escape(pair.before.prompt)}</p><div class="pair">'
        f"{_response('Before', pair.before)}{_response('After', pair.after)}</div></article>"
        for pair in pairs
    )
    return f'<section><h2>Samples</h2><p class="note">{_ABOUT_SAMPLES}</p>\n{cards}</section>'


def _response(heading: str, sample: EvaluatedSample) -> str:
    measured = [("score", sample.score), *sample.scores.items(), *sample.judges.items(), ("KL", sample.kl)]
    facts = [f"{name} {number(value)}" for name, value in measured if not math.isnan(value)]
    facts += [f"{sample.length} tokens" + ("" if sample.ended else ", cut off")]
    return (
        f"<div><h3>{heading}</h3><p>{escape(sample.response)}</p>"
        f'<p class="note">{escape(" · ".join(facts))}</p></div>'
    )


def _folded(heading: str, path: Path) -> str:
    """A file's text, which a click opens; nothing without it."""
    if not path.is_file():
        return ""
    text = escape(path.read_text(encoding="utf-8", errors="replace"))
    return f'<details class="card"><summary>{heading}</summary><pre>{text}</pre></details>'


def _headings(before: int, after: int | None = None) -> list[str]:
    first = f"Step {before}" if before else "Before"
    return ["", first, "After" if after is None else f"Step {after}", "Change", "Win rate"]


def _cells(measure: Measure) -> list[tuple[str, str]]:
    """Value and bounds under each heading; "–" for a missing one."""
    wins = measure.wins
    share = wins and Interval(100 * wins.mean, 100 * wins.low, 100 * wins.high)
    return [
        _cell(measure.before),
        _cell(measure.after),
        _cell(measure.change, signed=True),
        _cell(share, digits=0, unit=" %"),
    ]


def _cell(interval: Interval | None, *, digits: int = 2, unit: str = "", signed: bool = False) -> tuple[str, str]:
    if interval is None:
        return "–", ""
    low, high = number(interval.low, digits), number(interval.high, digits)
    bounds = f"[{low}, {high}]" if interval.low == interval.low else ""
    return number(interval.mean, digits, signed) + unit, bounds
