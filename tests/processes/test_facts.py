"""The smallest file of facts, trained by the real engines from `quartet up` to the trained policy."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from orchestrator.deployment.listeners import free_ports
from orchestrator.deployment.record import record
from orchestrator.monitoring.metrics import read_metrics
from tests.cluster import SERVICES, command
from tests.models import make_policy, make_reward

STEPS = 2


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    make_policy(tmp_path / "policy", kind="qwen2", tied=True)
    make_reward(tmp_path / "reward")
    rows = [{"prompt": f"w{4 + row} w{5 + row}"} for row in range(20)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    yield tmp_path
    command(tmp_path, "down")


def test_five_facts_and_where_to_listen_are_enough_to_train(folder: Path) -> None:
    http, grpc_port = free_ports(2)
    facts = {
        **{"name": "five", "model": "policy", "reward": "reward", "prompts": "prompts.jsonl"},
        "algorithm": {"kind": "ppo", "learning_rate": 1e-4},
        # Free ports and an early end, which a user need not state.
        **{"port": grpc_port, "http_port": http, "steps": STEPS, "batch_size": 16, "max_new_tokens": 16},
    }
    (folder / "five.yaml").write_text(yaml.safe_dump(facts))
    for arguments in (("check", "five.yaml"), ("up", "five.yaml"), ("train", "five.yaml")):
        done = command(folder, *arguments)
        assert done.returncode == 0, f"{arguments}\n{done.stdout}\n{done.stderr}"
    steps = read_metrics(folder / "runs" / "five" / "metrics.jsonl")
    assert [line["step"] for line in steps][-STEPS:] == [1, 2]
    assert max(line["mismatch/mean_abs"] for line in steps[-STEPS:]) < 1e-4
    assert (folder / "runs" / "five" / "policy" / "model.safetensors").is_file()
    # The run keeps the whole file that it used.
    kept = yaml.safe_load((folder / "runs" / "five" / "config.yaml").read_text())
    assert {application["name"] for application in kept["applications"]} == set(SERVICES)
    rendered = yaml.safe_load(command(folder, "render", "five.yaml").stdout)
    assert record(rendered) == kept
