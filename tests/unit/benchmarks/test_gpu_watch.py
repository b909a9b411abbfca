"""Looks at a GPU count in the part of the time that is asked for, and in the wait of the loop that they fall into."""

from benchmarks.gpu.watch import busy
from orchestrator.tracing.activity import LOOP
from orchestrator.tracing.spans import Span

LOOKS = [(float(second), 10.0 * second) for second in range(11)]


def wait(name: str, began: float, ended: float) -> Span:
    return Span(LOOP, 0, name, began, ended, {})


def test_only_looks_of_the_asked_time_count() -> None:
    assert busy(LOOKS, 4, 6) == {"busy_percent": 55}
    assert busy(LOOKS, 20, 30) == {}


def test_each_wait_of_the_loop_has_its_share_and_the_rest_is_the_loops_own() -> None:
    spans = [wait("samples", 0, 2), wait("training", 3, 5), wait("training", 6, 8)]
    assert busy(LOOKS, 1, 9, spans) == {
        "busy_percent": 55,
        "busy_samples_percent": 20,
        "busy_own_percent": 60,  # 3, 6 and 9
        "busy_training_percent": 60,  # 4, 5, 7 and 8
    }
