"""Figures of many answers of `/verify`, as NeMo Gym asks a resources server for them."""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from statistics import fmean, median, stdev
from typing import Any

from quartet.wire.errors import InvalidArgument

TASK = "_ng_task_index"
"""Number of an answer's task."""
_NUMBERS = (TASK, "_ng_rollout_index", "mask_sample")
"""Fields that are numbers and no measurements."""


def aggregated(answers: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Mean, max, min, median and standard deviation of every number in the answers, of each task and of all of them.
    Answers without a score (`mask_sample`) are in none. InvalidArgument names numbers that are too large for that."""
    tasks = defaultdict[int, list[Mapping[str, Any]]](list)
    for answer in answers:
        if not answer.get("mask_sample"):
            tasks[answer.get(TASK, 0)].append(answer)
    all_of_them = _figures([answer for each in tasks.values() for answer in each])
    return {
        "group_level_metrics": [{TASK: task, **_figures(tasks[task])} for task in sorted(tasks)],
        "agent_metrics": all_of_them,
        "key_metrics": {name: value for name, value in all_of_them.items() if name.startswith("mean/")},
    }


def _figures(answers: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Figure and name -> value. The deviation is that of a sample, and 0 of a single number."""
    columns = defaultdict[str, list[int | float]](list)
    for answer in answers:
        for name, value in answer.items():
            if isinstance(value, int | float) and name not in _NUMBERS:
                columns[name].append(value)
    figures: dict[str, float] = {}
    for name, numbers in columns.items():
        try:
            values = [float(number) for number in numbers]
            named = {"mean": fmean(values), "max": max(values), "min": min(values), "median": median(values)}
            named["std"] = stdev(values) if len(values) > 1 else 0.0
            if not all(map(math.isfinite, named.values())):
                raise OverflowError
        except OverflowError:
            raise InvalidArgument(f"verify_responses: the numbers {name[:64]!r} are too large") from None
        figures |= {f"{figure}/{name}": value for figure, value in named.items()}
    return figures
