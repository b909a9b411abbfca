"""A second engine, one file of examples/, in place of vLLM: a run samples with it, pushes to it, and is proved."""

from pathlib import Path
from typing import Any

import pytest

from orchestrator.monitoring.metrics import read_metrics
from quartet.security.credentials import VARIABLE
from tests.cluster import running_quartet
from tests.commands import finished


def plain(raw: dict[str, Any]) -> None:
    """Names the engine in a deployment file."""
    rollout = raw["applications"][0]
    rollout["args"]["engine"] = "examples.plain_engine:start"
    raw["orchestrator"] |= {"steps": 2, "evaluation": {"every": 0}}


@pytest.mark.timeout(900)
async def test_a_run_with_an_engine_of_transformers(
    tmp_path: Path, policy_folder: Path, reward_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)  # of the quartet that other tests share
    async with running_quartet(tmp_path, policy_folder, reward_folder, plain) as quartet:
        code, told = finished(tmp_path, "train", str(quartet.config))
        assert code == 0, told
        lines = read_metrics(tmp_path / "runs/three-steps/metrics.jsonl")
        assert [line["step"] for line in lines] == [1, 2]
        # Sampled by the weights that are trained: before the first push, and after the second.
        assert all(line["mismatch/max_abs"] < 1e-4 for line in lines)
        infos = await quartet.replicas()
        assert {info.policy_version for info in infos.values()} == {lines[-1]["policy/version"]}
        assert len({info.weights_checksum for info in infos.values()}) == 1
