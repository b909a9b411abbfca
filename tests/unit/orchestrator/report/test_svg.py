import math
import re

import numpy as np
import pytest

from orchestrator.report.charts import sections
from orchestrator.report.svg import PALETTE, Chart, Line, Panel, columns, draw, means, series, shortened

RECORDED = ["eval/gold", "score/right/mean", "task/sums/response/length_mean"]
CHARTS = [each for charts in sections(RECORDED, stale=True).values() for each in charts]
NUMBER = re.compile(r"−?\d{1,3}(,\d{3})*(\.\d+)?(e−?\d+)?|−?\d+(\.\d+)?")


def test_series_leaves_out_what_was_not_recorded() -> None:
    metrics = [{"step": 0.0}, {"step": 1.0, "a": 2.0}, {"step": 2.0, "a": math.nan}, {"step": 3.0, "a": 4.0}]
    steps, values = series(metrics, "a")
    assert (steps.tolist(), values.tolist()) == ([1.0, 3.0], [2.0, 4.0])
    assert [len(part) for part in series(metrics, "b")] == [0, 0]


def test_means_over_neighbours() -> None:
    values = np.array([[1.0, 3.0, 5.0, 7.0, 10.0], [0.0, 2.0, 0.0, 0.0, 1.0]])
    # The last group is what is left.
    assert means(values, 2).tolist() == [[2.0, 6.0, 10.0], [1.0, 0.0, 1.0]]
    assert means(values, 1) is values
    assert means(np.array([]), 3).tolist() == []


def chart(*panels: Panel) -> Chart:
    return Chart("Title", "Note.", panels)


def test_a_chart_names_its_axes_and_lines() -> None:
    panel = Panel("nats per token", (Line("a", "mean & more", "blue"), Line("b", "$largest$", "orange")))
    svg = draw(chart(panel), [{"step": step, "a": 1.0 * step, "b": 2.0} for step in range(1, 4)])
    assert svg is not None
    for text in ("PPO step", "nats per token", "mean &amp; more", "$largest$"):
        assert f">{text}</text>" in svg
    assert 'role="img" aria-label="Title"' in svg
    assert "var(--blue)" in svg


def test_a_legend_names_every_task_also_one_that_matplotlib_would_leave_out_or_that_is_long() -> None:
    """64 tasks, of which some begin with `_` or are long sentences; as many are drawn as there are colours."""
    tasks = ["_held", "__dunder__", "$x_1$", "two\nlines", *(f"{'long ' * 20}{index}" for index in range(60))]
    recorded = [name for task in tasks for name in (f"task/{task}/score/mean", f"task/{task}/response/length_mean")]
    [score] = [each for each in sections(recorded, stale=False)["Learning"] if each.title == "Score by task"]
    assert score.note.endswith(f"The first {len(PALETTE)} of 64 tasks; metrics.jsonl has all.")
    svg = draw(score, [{"step": 1.0} | dict.fromkeys(recorded, 1.0), {"step": 2.0} | dict.fromkeys(recorded, 2.0)])
    assert svg is not None
    shown = [shortened(line.label) for panel in score.panels for line in panel.lines]
    assert len(shown) == len(PALETTE)
    assert [text for text in texts(svg) if text in shown] == shown
    assert shown[:4] == ["_held", "__dunder__", "$x_1$", "two lines"]
    assert shown[4] == "long long lon…g long long 0"


def test_a_legend_has_as_many_columns_as_fit() -> None:
    assert columns(["a"] * 9) == 4
    assert columns(["a" * 27] * 9) == 2


def test_panels_without_data_are_left_out_and_a_chart_without_any_is_none() -> None:
    present, absent = Panel("here", (Line("a", "a", "blue"),)), Panel("nowhere", (Line("b", "b", "blue"),))
    metrics = [{"step": 1.0, "a": 1.0}]
    both = draw(chart(present, absent), metrics)
    assert both is not None
    assert ">here</text>" in both
    assert "nowhere" not in both
    assert draw(chart(absent), metrics) is None


def test_long_runs_are_thinned_and_say_so() -> None:
    panel = Panel("y", (Line("a", "a", "blue"),))
    short, long = (
        draw(chart(panel), [{"step": float(step), "a": (step % 7) ** 2.0} for step in range(1, count)])
        for count in (301, 3001)
    )
    assert short is not None
    assert long is not None
    assert ">PPO step (means over 10)</text>" in long
    assert len(long) < 1.5 * len(short)


def test_a_log_panel_of_zeros_still_draws() -> None:
    panel = Panel("y", (Line("a", "a", "blue"),), kind="log")
    svg = draw(chart(panel), [{"step": 1.0, "a": 0.0}, {"step": 2.0, "a": 0.0}])
    assert svg is not None
    assert ">y</text>" in svg


def texts(svg: str) -> list[str]:
    """Contents of the text nodes, in order."""
    return re.findall(r"<text[^>]*>([^<]*)</text>", svg)


@pytest.mark.parametrize("each", CHARTS, ids=lambda each: each.title)
@pytest.mark.parametrize(
    "values",
    [
        (4e-6, 6e-6, 9e-6),
        (1e-9, 3e-9, 2e-9),
        (0.31, 0.32, 0.33),
        (0.002, 0.4, 30.0),
        (7e5, 3e6, 2e7),
        (5e9, 6e9, 9e9),
    ],
    ids="{0[0]:g} to {0[2]:g}".format,
)
def test_every_axis_is_labelled_by_plain_numbers(each: Chart, values: tuple[float, ...]) -> None:
    names = {name for panel in each.panels for line in panel.lines for name in (line.metric, *bounds(line))}
    metrics = [{"step": step * 1e6} | dict.fromkeys(names, value) for step, value in enumerate(values)]
    svg = draw(each, metrics)
    assert svg is not None
    named = {panel.y_label for panel in each.panels} | {line.label for panel in each.panels for line in panel.lines}
    labels = [text for text in texts(svg) if text not in named | {"PPO step"}]
    assert [text for text in labels if NUMBER.fullmatch(text) is None] == []
    # Two or more at the steps and at each panel's own axis.
    assert len(labels) >= 2 * (1 + len(each.panels))


def bounds(line: Line) -> tuple[str, ...]:
    return (f"{line.metric}_low", f"{line.metric}_high") if line.held_out else ()


def test_numbers_between_powers_of_ten_are_labelled_on_a_short_log_axis() -> None:
    panel = Panel("y", (Line("a", "a", "blue"),), kind="log")
    svg = draw(chart(panel), [{"step": 1.0, "a": 3.5e-6}, {"step": 2.0, "a": 6.5e-6}])
    assert svg is not None
    assert {"4e−6", "6e−6"} <= set(texts(svg))
