"""The picture of who worked and who waited in the last steps."""

import re
from pathlib import Path

import pytest

from orchestrator.report.last_steps import draw_last_steps, last_steps
from orchestrator.report.page import write_report
from orchestrator.tracing.file import TraceFile
from orchestrator.tracing.spans import STEPS, Span
from tests.unit.runs_on_disk import every_metric, measure


def a_trace(path: Path, scale: float = 1.0, steps: tuple[int, ...] = (1, 2, 3, 4)) -> Path:
    """Steps of 10 s times `scale`: samples until 6, the policy trains until 9, a push until 10."""
    with TraceFile(path, print, 0.0) as file:
        for index, step in enumerate(steps):
            each = [
                ("rollout", "generate", 0, 6, {"sample": index}),
                ("loop", "samples", 0, 6, {}),
                ("policy", "train", 6, 9, {}),
                ("loop", "training", 6, 9, {}),
                ("push", "deliver", 9, 10, {}),
                ("loop", "push", 9, 10, {}),
                (STEPS, f"step {step}", 0, 10, {"step": step}),
            ]
            spans = [(track, name, 10 * index + a, 10 * index + b, args) for track, name, a, b, args in each]
            file.write([Span(track, 0, name, scale * a, scale * b, args) for track, name, a, b, args in spans])
    return path


def texts(svg: str) -> list[str]:
    return re.findall(r"<text[^>]*>([^<]*)</text>", svg)


@pytest.mark.parametrize(
    ("scale", "unit", "some"),
    [
        (0.001, "milliseconds", {"0", "10", "20"}),
        (1.0, "seconds", {"0", "10", "20"}),
        (30.0, "minutes", {"0", "4", "10"}),
        (7200.0, "hours", {"0", "20", "40"}),
    ],
)
def test_the_last_three_steps_with_a_row_for_each_part(
    tmp_path: Path, scale: float, unit: str, some: set[str]
) -> None:
    labels = texts(draw_last_steps(a_trace(tmp_path / "trace.json", scale)))
    assert [label for label in labels if label.startswith("step")] == ["step 2", "step 3", "step 4"]
    # Rows and legend; neither names a part that the run does not have.
    for part in ("loop", "rollout", "policy", "push"):
        assert part in labels
    assert {"scoring", "critic", "evaluation", "checkpoint"}.isdisjoint(labels)
    assert unit in labels
    assert some <= set(labels)


def test_a_bar_has_the_colour_of_who_works_or_is_waited_for(tmp_path: Path) -> None:
    svg = draw_last_steps(a_trace(tmp_path / "trace.json", steps=(1,)))
    bars = re.findall(r'style="fill: var\(--(\w+)\)"', svg)
    # The parts that work until 6, 9 and 10 have that colour, and so have all that wait for them meanwhile.
    assert bars == ["blue", "green", "sky"] * 4  # the loop, rollout, policy, push


def test_steps_before_a_return_to_a_checkpoint_are_not_drawn(tmp_path: Path) -> None:
    def steps(*numbers: int) -> list[object]:
        spans = [Span(STEPS, 0, "step", 0, 1, {"step": number}) for number in numbers]
        return [step.args["step"] for step in last_steps(spans)]

    assert steps(1, 2, 3, 4) == [2, 3, 4]
    assert steps(1, 2, 3, 3) == [3]
    assert steps(1, 2, 3, 2, 3) == [2, 3]
    assert steps() == []


def test_the_page_shows_it_if_there_is_a_trace(tmp_path: Path) -> None:
    run = tmp_path / "demo"
    shares = [name for name in every_metric() if name.startswith(("work/", "wait/"))]
    measure(run, [{"step": step, "seconds/step": 30.0, **dict.fromkeys(shares, 0.5)} for step in (1, 2)])
    (run / "config.yaml").write_text("name: demo\n")
    a_trace(run / "trace.json")
    text = write_report(run).read_text()
    assert text.count("The last steps") == 2  # the heading and the picture's own name
    assert text.index("Who worked and who waited") < text.index("The last steps")
    (run / "trace.json").write_text("[")
    assert "The last steps" not in write_report(run).read_text()
