"""The page of an evaluation of rows: its figures, each with the scorer that they are of, and some of its samples."""

import json
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from itertools import islice
from pathlib import Path
from typing import Any

from orchestrator.evaluation.figures import ROWS, SUMMARY, UNANSWERED
from orchestrator.evaluation.rows import Row, rows
from orchestrator.report.frame import framed, number
from quartet.folders import naming

SAMPLES = 20
"""Samples that the page shows: the first ones."""
_ABOUT = (
    "Means over prompts, with 95 % intervals from resampled prompts. A sample without a score counts in no mean; the "
    "last column has the number of those, by outcome."
)
_ABOUT_AGAINST = (
    " The win rate is over {against}: the share of pairs of responses to the same prompt in which this evaluation's "
    "scores higher, a tie counting one half. p is that of the two-sided sign test over prompts."
)


def write_page(folder: Path) -> Path:
    """Writes evaluation.html into the folder of an evaluation, and returns its path."""
    summary = json.loads((folder / SUMMARY).read_bytes())
    name, path = folder.resolve().name, folder / "evaluation.html"
    parts = [
        f'<header><h1>{escape(name)}</h1><p class="note">{escape(" · ".join(summary["remarks"]))}</p></header>',
        _figures(summary),
        _samples(folder / ROWS),
        f'<details class="card"><summary>Settings</summary><pre>{_settings(summary)}</pre></details>',
        f"<footer>Written by Quartet from {SUMMARY} and {ROWS} beside this page.</footer>",
    ]
    # Rows may hold half of a surrogate pair, which UTF-8 cannot write.
    with naming(path):
        path.write_text(framed(name, "\n".join(parts)), encoding="utf-8", errors="replace")
    return path


def _settings(summary: Mapping[str, Any]) -> str:
    return escape(json.dumps(summary["settings"], indent=1, ensure_ascii=False))


def _figures(summary: Mapping[str, Any]) -> str:
    figures: Sequence[Mapping[str, Any]] = summary["figures"]
    ks = sorted({int(k) for figure in figures for k in figure["pass_at"]})
    compared = any(figure["against"] for figure in figures)
    names = ["", "samples of", "mean", *(f"pass@{k}" for k in ks), *(["win rate"] if compared else []), "scored"]
    about = _ABOUT + (_ABOUT_AGAINST.format(against=summary["settings"]["--against"]) if compared else "")
    lines = []
    for figure in figures:
        scorer = figure["scorer"]
        identity = f"<small>{escape(scorer['name'])} {escape(scorer['hash'][:12])}</small>"
        cells = [
            (escape(figure["group"] or "all"), ""),
            _interval(figure["mean"]),
            *(_interval(figure["pass_at"].get(str(k))) for k in ks),
            *([_against(figure["against"])] if compared else []),
            _coverage(figure),
        ]
        written = "".join(f"<td>{value}<small>{below}</small></td>" for value, below in cells)
        lines.append(f"<tr><th scope=row>{escape(figure['measure'])}{identity}</th>{written}</tr>")
    headings = "".join(f"<th scope=col>{escape(name)}</th>" for name in names)
    return (
        f'<section><h2>Figures</h2><p class="note">{escape(about)}</p><div class="card scroll"><table>'
        f"<thead><tr>{headings}</tr></thead><tbody>{''.join(lines)}</tbody></table></div></section>"
    )


def _interval(bounds: Mapping[str, float | None] | None) -> tuple[str, str]:
    if bounds is None or bounds["mean"] is None:
        return "–", ""
    low, high = bounds["low"], bounds["high"]
    below = "" if low is None or high is None else f"[{number(low, 3)}, {number(high, 3)}]"
    return number(bounds["mean"], 3), below


def _against(compared: Mapping[str, Any] | None) -> tuple[str, str]:
    if compared is None:
        return "–", ""
    value, below = _interval(compared["win_rate"])
    return value, f"{below} p = {compared['sign_test_p']:.3g}"


def _coverage(figure: Mapping[str, Any]) -> tuple[str, str]:
    unscored: Mapping[str, int] = figure["unscored"]
    told = ", ".join(f"{count:,} {outcome.replace('_', ' ')}" for outcome, count in unscored.items())
    return f"{figure['scored']:,} of {figure['scored'] + sum(unscored.values()):,}", escape(told)


def _samples(path: Path) -> str:
    with path.open("rb") as file:
        cards = "\n".join(_card(row) for row in islice(rows(file, str(path)), SAMPLES))
    return f'<section><h2>Samples</h2><p class="note">The first {SAMPLES} at most.</p>\n{cards}</section>'


def _card(row: Row) -> str:
    prompt = row.prompt or "\n".join(f"{message['role']}: {message['content']}" for message in row.messages)
    facts = escape(" · ".join(_facts(row.values)))
    return (
        f'<article class="card sample"><p>{escape(prompt)}</p><div class="pair"><div><p>{escape(row.response or "–")}'
        f'</p><p class="note">{facts}</p></div></div></article>'
    )


def _facts(values: Mapping[str, Any]) -> Iterator[str]:
    if UNANSWERED in values:
        yield f"no response: {values[UNANSWERED]}"
    for measure, score in values["scores"].items():
        # Those of others than a hub may be anything.
        shown = number(score, 3) if isinstance(score, float) else "–" if score is None else score
        yield f"{measure} {shown}"
    for scorer, reason in values["reasons"].items():
        outcome = str(values["outcomes"].get(scorer, "")).replace("_", " ")
        yield f"{scorer}: {outcome}, {reason}" if outcome else f"{scorer}: {reason}"
