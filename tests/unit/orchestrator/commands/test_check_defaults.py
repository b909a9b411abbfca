"""A file that sets only what is required: its defaults fit each other."""

import json
from pathlib import Path
from typing import Any

from quartet.config.learner import LearnerConfig
from services.reference.config import ReferenceConfig
from services.reward.config import ModelScorerConfig
from services.rollout.config import RolloutConfig
from tests.models import make_policy
from tests.unit.preflights import SUM, checked, problems


def least(tmp_path: Path, positions: int) -> dict[str, Any]:
    """The shortest file for a machine without a GPU, with a model of so many positions and one file of prompts."""
    policy = str(make_policy(tmp_path / "policy", kind="llama", tied=False, max_position_embeddings=positions))
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"w{index}"}) + "\n" for index in range(4, 8)))
    optimizer = {"learning_rate": 1e-4}
    sections = {
        "rollout": {"model": policy, "kv_cache_mib": 64},
        "reward": {"tokenizer": policy, "scorer": {"kind": "function", "function": "tests.scorers:count"}},
        "reference": {"model": policy},
        "critic": {"model": policy, "optimizer": optimizer},
    }
    return {
        "http_options": {"host": "127.0.0.1"},
        "grpc_options": {
            "port": 19000,
            "grpc_servicer_functions": [
                "quartet.serving.proxy.end_with_caller",
                *(f"protos.{n}_pb2_grpc.add_{n.title()}Servicer_to_server" for n in sections),
                "quartet.serving.proxy.add_health",
            ],
        },
        "applications": [
            {"name": n, "route_prefix": f"/{n}", "import_path": f"services.{n}.replica:build", "args": given}
            for n, given in sections.items()
        ],
        "orchestrator": {
            "name": "least",
            "data": {"path": str(prompts)},
            "policy": {"model": policy, "optimizer": optimizer},
        },
    }


def test_what_is_required_is_enough(tmp_path: Path) -> None:
    inputs = checked(least(tmp_path, positions=2048), tmp_path)
    assert len(inputs.train.prompts) == 4
    assert inputs.held_out is None
    assert [note for note in inputs.notes if "has no split eval, so nothing is evaluated" in note]


def test_a_short_model_is_the_only_complaint(tmp_path: Path) -> None:
    [line] = problems(least(tmp_path, positions=1024), tmp_path)
    assert f"{SUM} is 1280 tokens, but orchestrator.policy.model ({tmp_path / 'policy'}) takes 1024 (" in line


def test_a_run_that_asks_for_evaluation_needs_its_split(tmp_path: Path) -> None:
    raw = least(tmp_path, positions=2048)
    raw["orchestrator"]["evaluation"] = {"every": 5}
    assert problems(raw, tmp_path) == [
        f"data.path {raw['orchestrator']['data']['path']}: no split 'eval'; the splits there are train"
    ]


def test_all_models_have_the_same_arithmetic_by_default() -> None:
    sections = (LearnerConfig, RolloutConfig, ReferenceConfig, ModelScorerConfig)
    assert {section.model_fields["dtype"].default for section in sections} == {"float32"}
