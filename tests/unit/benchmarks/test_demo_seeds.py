"""The demo of benchmarks/demo_seeds, with and without its penalty, is a file that a run takes."""

from pathlib import Path

import pytest

from benchmarks.demo_seeds import variant
from orchestrator.algorithms.registry import parse

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("kl", [True, False])
def test_the_demo_runs_with_and_without_the_penalty(kl: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    section = variant("models/reviews-3", "demo-seed3", 3, 7, kl=kl)["orchestrator"]
    assert (parse(section["algorithm"]).kl.coef > 0) is kl
    assert (section["name"], section["seed"], section["steps"]) == ("demo-seed3", 3, 7)
    assert section["policy"]["model"] == "models/reviews-3/policy"
