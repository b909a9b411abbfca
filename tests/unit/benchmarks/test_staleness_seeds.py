"""The arithmetic of benchmarks/staleness_seeds."""

import math
from pathlib import Path

import yaml

from benchmarks.staleness_seeds.__main__ import compared, pooled_variance
from benchmarks.staleness_seeds.arm import NONE, Result, Results, Setting
from orchestrator.config.run import OrchestratorConfig

ROOT = Path(__file__).parents[3]


def setting(staleness: int, correction: str = "tis") -> Setting:
    return Setting(staleness, correction, learning_rate=1e-3, epochs=2, steps=20)


def result(of: Setting, seed: int, gold: float) -> Result:
    return Result(of, seed, [0, 20], [-0.3, gold], [0.0, 1.0], kl=3.0, age=1.0, oldest=1, ess=0.9, corrected=0.1)


def test_finished_runs_are_added_to_the_file(tmp_path: Path) -> None:
    results, both = Results(tmp_path / "results.jsonl"), (setting(0), setting(2))
    assert results.of(both, [0, 1]) == {}
    first, other = result(both[0], 1, 0.5), result(both[0], 7, 0.6)
    results.add(first)
    results.add(other)
    assert Results(tmp_path / "results.jsonl").read() == [first, other]
    assert results.of(both, [0, 1]) == {both[0]: [first]}


def test_differences_are_between_the_same_seeds_and_share_a_variance() -> None:
    base = [result(setting(0), seed, gold) for seed, gold in enumerate((0.4, 0.5, 0.6))]
    ahead = [result(setting(2), seed, gold) for seed, gold in ((0, 0.5), (2, 0.5))]
    variance = pooled_variance([[run.gold[-1] for run in runs] for runs in (base, ahead)])
    # Squares 0.01 + 0 + 0.01 and 0, with two degrees of freedom and one.
    assert math.isclose(variance, 0.02 / 3)
    difference, error = compared(ahead, base, variance)
    assert math.isclose(difference, 0, abs_tol=1e-12)
    assert math.isclose(error, math.sqrt(variance))
    assert pooled_variance([[1.0], [2.0]]) == 0


def test_a_setting_changes_the_demo_and_nothing_else() -> None:
    section = yaml.safe_load((ROOT / "deploy" / "ppo.yaml").read_text())["orchestrator"]
    section["policy"]["model"] = str(ROOT)
    fields = {"name": "x", "data": section["data"] | {"path": str(ROOT)}}
    config = setting(2, NONE).orchestrator(section | fields)
    assert (config["steps"], config["loop"]) == (20, {"max_staleness": 2})
    assert config["policy"]["optimizer"] == section["policy"]["optimizer"] | {"learning_rate": 1e-3}
    assert section["steps"] == 40
    assert (config["ppo"]["correction"], config["ppo"]["importance_band"]) == ("geometric", [0.0, 1e30])
    assert setting(2).orchestrator(section)["ppo"]["correction"] == "tis"
    assert set(config) <= set(OrchestratorConfig.model_fields)
