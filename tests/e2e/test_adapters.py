"""Runs that push their adapters alone: to a replica that is there and to one that comes while the run trains, which
goes on after it was killed; and to a replica that keeps several versions."""

import signal
from copy import deepcopy

import msgpack
import torch
import yaml
from safetensors.torch import load_file

from orchestrator.deployment import serving
from orchestrator.deployment.redeployment import fixed
from orchestrator.experience.experience import SCHEMA
from orchestrator.monitoring.metrics import RUN_LOG, read_metrics
from quartet.columns import Columns
from services.rollout.client import RolloutClient
from tests.cluster import START_S, Quartet, eventually
from tests.runs import Run

LORA = {"rank": 4, "alpha": 8}
STEPS = 1000
"""More than there are until the second replica has come."""


async def test_replicas_compute_with_the_adapters_that_a_run_pushes(quartet: Quartet) -> None:
    adapted = deepcopy(quartet.raw["applications"][0]) | {"name": "adapted", "route_prefix": "/adapted"}
    adapted["args"]["adapters"] = LORA
    adapted["deployments"][0] |= fixed(1)
    run = Run(quartet, "adapted", without=["rollout"])
    raw = yaml.safe_load(run.config.read_text())
    own = raw["orchestrator"]
    own |= {"steps": STEPS, "services": {"rollout": {"application": "adapted"}}}
    own["policy"] |= {"lora": LORA}
    own["weights"] = own.get("weights", {}) | {"adapters": True}
    raw["applications"] = [adapted, *raw["applications"]]
    run.config.write_text(yaml.safe_dump(raw))
    rollout = RolloutClient(quartet.channel, "adapted")
    quartet.deploy([adapted], "with-adapted")
    found: dict[str, tuple[int, str]] = {}

    async def both() -> bool:
        """True if two replicas have told of weights that were pushed."""
        info = await rollout.info(30)
        found[info.replica] = info.policy_version, info.weights_checksum
        return len([version for version, _ in found.values() if version]) == 2

    try:
        serving.await_running(quartet.cluster, ("adapted",), print, START_S)
        process = run.start()
        run.wait(run.reached(2), process)
        adapted["deployments"][0] |= fixed(2)
        quartet.deploy([adapted], "with-two-adapted")
        await eventually(both, START_S)
        assert process.poll() is None, run.log.read_text()
        run.wait(run.reached(max(run.steps()) + 3), process)
        process.send_signal(signal.SIGKILL)
        process.wait()
        own["steps"] = max(run.steps()) + 2
        run.config.write_text(yaml.safe_dump(raw))
        run.finish("--resume")
        lines = read_metrics(run.folder / "metrics.jsonl")
        assert [line["step"] for line in lines] == [*range(1, own["steps"] + 1)]
        happened = (run.folder / RUN_LOG).read_text()
        assert ": joined with version " in happened.partition("  resuming ")[0]
        assert happened.endswith("  finished\n")
        # Sampled by the weights that are trained, of both replicas, before the first push and after each.
        assert max(line["mismatch/max_abs"] for line in lines) < 1e-4
        found.clear()
        await eventually(both, 30)
        assert {version for version, _ in found.values()} == {lines[-1]["policy/version"]}
        assert len({checksum for _, checksum in found.values()}) == 1
        before, after = (
            load_file(folder / "model.safetensors") for folder in (quartet.policy, run.folder / "policy")
        )
        moved = {name for name in before if not torch.equal(before[name], after[name])}
        assert moved
        assert all(name.endswith("_proj.weight") for name in moved)
        alone = load_file(run.folder / "policy" / "adapters" / "adapter_model.safetensors")
        layers = {name.removeprefix("base_model.model.").rpartition(".lora_")[0] for name in alone}
        assert layers >= {name.removesuffix(".weight") for name in moved}
    finally:
        run.end()
        quartet.deploy([], "without-adapted")


async def test_responses_that_are_sampled_ahead_are_of_one_version_each(quartet: Quartet) -> None:
    stale = 2
    kept = deepcopy(quartet.raw["applications"][0]) | {"name": "kept", "route_prefix": "/kept"}
    kept["args"] |= {"adapters": LORA, "adapter_versions": 1 + stale}
    kept["deployments"][0] |= fixed(1)
    run = Run(quartet, "kept", without=["rollout"])
    raw = yaml.safe_load(run.config.read_text())
    own = raw["orchestrator"]
    own |= {"services": {"rollout": {"application": "kept"}}, "loop": {"max_staleness": stale}}
    own["policy"] |= {"lora": LORA}
    own["weights"] = own.get("weights", {}) | {"adapters": True, "in_flight": "finish", "prove_every": 1}
    raw["applications"] = [kept, *raw["applications"]]
    run.config.write_text(yaml.safe_dump(raw))
    quartet.deploy([kept], "with-kept")
    try:
        serving.await_running(quartet.cluster, ("kept",), print, START_S)
        run.finish()
        lines = read_metrics(run.folder / "metrics.jsonl")
        ages = [line["policy/staleness"] for line in lines if line["step"] > 0]
        assert 1 <= max(ages) <= stale
        steps = [msgpack.unpackb(path.read_bytes()) for path in sorted((run.folder / "journal").glob("step-*"))]
        versions = [row for step in steps for row in Columns.unpack(step["columns"], SCHEMA).rows("versions")]
        assert len(versions) == 16 * len(steps)
        assert [len(set(row.tolist())) for row in versions] == [1] * len(versions)
    finally:
        run.end()
        quartet.deploy([], "without-kept")
