"""The figures of a plan beside those expected, and what became of each stage."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.figures import read
from benchmarks.lent.stages import STAGES, Goal, Stage

HIDDEN = {"kind", "stage", "what", "at"}


def report(path: Path, stages: Sequence[Stage] = STAGES) -> str:
    """The report on a file of figures.

    Raises:
        ValueError: the file holds no records.
    """
    records = read(path)
    if not records:
        raise ValueError(f"{path} has no figures; it is the {path.name} that `run` writes")
    machines = dict.fromkeys(f"{one['device']}: {one['machine']}" for one in records if one["kind"] == "run")
    cpu = any(one["device"] == "cpu" for one in records if one["kind"] == "run")
    lines = [*machines, ""]
    if len(machines) > 1:
        lines[-1:] = ["Figures of different machines are together here: compare times of one machine only.", ""]
    for stage in stages:
        own = [record for record in records if record.get("stage") == stage.name]
        lines += [f"{stage.name}: {_outcome(own)}"]
        for figure in _last_try(own):
            lines.append(f"  {figure['what']}: " + ", ".join(_cells(figure, () if cpu else stage.goals)))
        lines += [f"    | {line}" for line in _tail(own)]
    lines += ["", *_against_trl(records)]
    if cpu:
        lines.append("On a CPU the plan runs at its smallest size: no figure says anything.")
    return "\n".join(lines).rstrip() + "\n"


def _outcome(records: Sequence[dict[str, Any]]) -> str:
    """The last outcome of a stage, or why there is none."""
    for record in reversed(records):
        if record["kind"] == "ended":
            return f"{record['outcome']} after {record['s']:g} s"
        if record["kind"] == "begun":
            return "cut off"
        if record["kind"] == "skipped" and not any(other["kind"] == "begun" for other in records):
            return f"skipped, {record['why']}"
    return "not begun"


def _last_try(records: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Figures since the stage was last begun."""
    begun = max((index for index, record in enumerate(records) if record["kind"] == "begun"), default=0)
    return [record for record in records[begun:] if record["kind"] == "figure"]


def _tail(records: Sequence[dict[str, Any]]) -> list[str]:
    """The last lines that a stage printed, if it did not go well."""
    ends = [record for record in records if record["kind"] == "ended"]
    return ends[-1]["tail"].rstrip().splitlines()[-8:] if ends and ends[-1]["outcome"] != "done" else []


def _cells(figure: dict[str, Any], goals: Iterable[Goal]) -> list[str]:
    """The figures of one row, those with a goal beside it."""
    wanted = {goal.figure: goal for goal in goals if figure["what"].startswith(goal.what)}
    cells = []
    for name, value in figure.items():
        if name in HIDDEN:
            continue
        cell = f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}"
        if goal := wanted.get(name):
            good = isinstance(value, int | float) and goal.reached(value)
            cell += f" ({'reached' if good else 'MISSED'}: at {'most' if goal.most else 'least'} {goal.value:g})"
        cells.append(cell)
    return cells


def _against_trl(records: Sequence[dict[str, Any]]) -> list[str]:
    """Samples per second over TRL's, for each way of each size of which both are known."""
    lines = []
    for size in ("0.5B", "1.5B"):
        ours = _rates(records, f"step {size}", f"{size} Quartet")
        theirs = list(_rates(records, f"TRL's step {size}", f"{size} TRL").values())
        for way, rate in ours.items() if theirs else ():
            lines.append(f"{way} over TRL, samples/s: {rate / theirs[-1]:.2f} (at least 2 is expected)")
    return lines


def _rates(records: Sequence[dict[str, Any]], stage: str, what: str) -> dict[str, float]:
    """The last rate of each row whose name begins so, in the order in which they came last."""
    rates: dict[str, float] = {}
    for one in records:
        if one["kind"] == "figure" and one["stage"] == stage and "samples_s" in one and one["what"].startswith(what):
            rates.pop(one["what"], None)
            rates[one["what"]] = one["samples_s"]
    return rates
