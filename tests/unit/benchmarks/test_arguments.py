"""Benchmarks refuse an option that they cannot follow before they start anything, and name what would be right."""

from collections.abc import Callable
from typing import Any, NoReturn

import pytest
import typer

from benchmarks import adapters, agents, beside, demo_seeds, loop_cost, pipeline, push
from benchmarks.arguments import numbers
from benchmarks.gpu import engine, step, training
from benchmarks.vs_trl import __main__ as vs_trl


def started(*_: Any, **__: Any) -> NoReturn:
    raise AssertionError("started")


@pytest.fixture(autouse=True)
def nothing_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    for place in ("adapters.make", "agents.Quartet", "beside.Quartet", "demo_seeds._train", "loop_cost.measured"):
        monkeypatch.setattr(f"benchmarks.{place}", started)
    for place in (
        "gpu.engine.Results",
        "gpu.step.Results",
        "gpu.training.Results",
        "loop_cost.subprocess.run",
        "pipeline.quartet",
        "push.Fleet",
        "vs_trl.__main__.make_environment",
    ):
        monkeypatch.setattr(f"benchmarks.{place}", started)


@pytest.mark.parametrize(
    ("main", "options", "right"),
    [
        (adapters.main, {"size": "5B"}, "0.5B"),
        (adapters.main, {"dtype": "float16"}, "bfloat16"),
        (agents.main, {"case": "none"}, "demo"),
        (agents.main, {"case": "20M-uneven"}, "20M-bf16"),
        (beside.main, {"case": "none"}, "20M-uneven"),
        (beside.main, {"client": ["chat", "evaluations"]}, "evaluation"),
        (demo_seeds.main, {"seeds": "0,one"}, "1,2,4"),
        (demo_seeds.main, {"seeds": "0", "without_kl": "-1"}, "from 0 on"),
        (engine.main, {"settings": "graphs;lazy"}, "eager"),
        (loop_cost.main, {"size": ["16x16", "512"]}, "512x1024"),
        (loop_cost.main, {"size": ["0x16"]}, "512x1024"),
        (pipeline.main, {"case": ["none"]}, "reward-bound"),
        (push.main, {"replicas": "1,0"}, "from 1 on"),
        (step.main, {"ways": "lock-step;behind"}, "two engines"),
        (step.main, {"only": "verl"}, "trl"),
        (training.main, {"sides": "learner;plain"}, "plain loop"),
        (push.main, {"backend": "nccl"}, "cuda-ipc"),
        (vs_trl.main, {"case": ["demo", "grpo", "none"]}, "20M-grpo"),
    ],
)
def test_a_wrong_option_is_refused_at_once(main: Callable[..., None], options: dict[str, Any], right: str) -> None:
    with pytest.raises(typer.BadParameter, match=right):
        main(**options)


def test_numbers_of_a_list_and_of_an_empty_one() -> None:
    assert numbers("1, 2,4", "--replicas", least=1) == [1, 2, 4]
    assert numbers("", "--seeds") == []
