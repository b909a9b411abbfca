"""A second engine, one file of examples/, in place of vLLM: a run samples with it, pushes to it, and is proved."""

from copy import deepcopy

import yaml

from orchestrator.deployment import serving
from orchestrator.deployment.redeployment import fixed
from orchestrator.monitoring.metrics import read_metrics
from services.rollout.client import RolloutClient
from tests.cluster import START_S, Quartet
from tests.commands import finished


async def test_a_run_with_an_engine_of_transformers(quartet: Quartet) -> None:
    plain = deepcopy(quartet.raw["applications"][0]) | {"name": "plain", "route_prefix": "/plain"}
    plain["args"]["engine"] = "examples.plain_engine:start"
    plain["deployments"][0] |= fixed(1)
    run = {"name": "plain", "steps": 2, "evaluation": {"every": 0}, "services": {"rollout": {"application": "plain"}}}
    file = quartet.folder / "with-plain.yaml"
    file.write_text(yaml.safe_dump(quartet.raw | {"orchestrator": quartet.raw["orchestrator"] | run}))
    quartet.deploy([plain], "plain")
    try:
        serving.await_running(quartet.cluster, ("plain",), print, START_S)
        code, told = finished(quartet.folder, "train", str(file))
        assert code == 0, told
        lines = read_metrics(quartet.folder / "runs/plain/metrics.jsonl")
        assert [line["step"] for line in lines] == [1, 2]
        # Sampled by the weights that are trained: before the first push, and after the second.
        assert all(line["mismatch/max_abs"] < 1e-4 for line in lines)
        info = await RolloutClient(quartet.channel, "plain").info(30)
        assert info.policy_version == lines[-1]["policy/version"]
        assert info.weights_checksum
    finally:
        quartet.deploy([], "as-before")
