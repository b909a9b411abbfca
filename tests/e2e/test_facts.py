"""The smallest file of facts, trained with the real engines. That `quartet up` takes one: tests/processes."""

import yaml

from orchestrator.deployment.record import record
from orchestrator.monitoring.metrics import read_metrics
from tests.cluster import SERVICES, Quartet
from tests.commands import finished

STEPS = 2


def test_five_facts_and_where_to_listen_are_enough_to_train(quartet: Quartet) -> None:
    facts = {
        **{"name": "five", "model": str(quartet.policy), "reward": str(quartet.reward)},
        "prompts": quartet.raw["orchestrator"]["data"]["path"],
        "algorithm": {"kind": "ppo", "learning_rate": 1e-4},
        # The ports of the services that run here and an early end, which a user need not state.
        **{"port": quartet.raw["grpc_options"]["port"], "http_port": quartet.raw["http_options"]["port"]},
        **{"steps": STEPS, "batch_size": 16, "max_new_tokens": 16},
    }
    (quartet.folder / "five.yaml").write_text(yaml.safe_dump(facts))
    for arguments in (("check", "five.yaml"), ("train", "five.yaml")):
        code, told = finished(quartet.folder, *arguments)
        assert code == 0, f"{arguments}\n{told}"
    run = quartet.folder / "runs" / "five"
    steps = read_metrics(run / "metrics.jsonl")
    assert [line["step"] for line in steps][-STEPS:] == [1, 2]
    assert max(line["mismatch/mean_abs"] for line in steps[-STEPS:]) < 1e-4
    assert (run / "policy" / "model.safetensors").is_file()
    # The run keeps the whole file that it used.
    kept = yaml.safe_load((run / "config.yaml").read_text())
    assert {application["name"] for application in kept["applications"]} == set(SERVICES)
    code, rendered = finished(quartet.folder, "render", "five.yaml")
    assert record(yaml.safe_load(rendered)) == kept
