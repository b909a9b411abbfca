"""The deployment file of the quartet that tests run, and its prompts."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from orchestrator.deployment.redeployment import fixed

REPO = Path(__file__).parents[1]
PROMPTS = 24
EVALUATED = 4


def write_prompts(folder: Path) -> Path:
    """Prompts of three to six words, the last few for evaluation."""
    texts = [" ".join(f"w{4 + (7 * row + 5 * i) % 60}" for i in range(3 + row % 4)) for row in range(PROMPTS)]
    path = folder / "prompts.jsonl"
    path.write_text("".join(f'{{"prompt": "{text}"}}\n' for text in texts))
    return path


def configuration(policy: Path, reward: Path, prompts: Path, http: int, grpc_port: int) -> dict[str, Any]:
    """The shipped deploy/ppo.yaml with other models, ports and sizes, so that the tests run what users run."""
    raw: dict[str, Any] = yaml.safe_load((REPO / "deploy" / "ppo.yaml").read_text())
    raw["http_options"]["port"], raw["grpc_options"]["port"] = http, grpc_port
    rollout, scorer, reference, critic = raw["applications"]
    # Leases outlast the tests that claim them; the requests of others need not make way for those.
    rollout["args"] |= {"model": str(policy), "max_length": 128, "foreign_share": 1.0}
    rollout["deployments"][0] |= fixed(2)
    scorer["args"] = {"tokenizer": str(policy), "scorer": model_scorer(reward)}
    reference["args"]["model"] = str(policy)
    # Absolute: a run may be started in another folder than the services were.
    root = str(prompts.parent / "runs")
    critic["args"] |= {"model": str(reward), "root": root}
    raw["orchestrator"] |= {
        "checkpoint": raw["orchestrator"].get("checkpoint", {}) | {"root": root},
        "name": "three-steps",
        "target": f"127.0.0.1:{grpc_port}",
        "steps": 3,
        "batch_size": 16,
        "prompts_per_call": 4,
        "data": {
            "path": str(prompts),
            "prompt_split": f"train[:{PROMPTS - EVALUATED}]",
            "eval_split": f"train[{PROMPTS - EVALUATED}:]",
            "max_prompt_length": 16,
        },
        "evaluation": {"every": 2, "judges": {"words": "tests.scorers:count"}},
    }
    raw["orchestrator"]["algorithm"]["minibatch_size"] = 8
    raw["orchestrator"]["policy"]["model"] = str(policy)
    return raw


def model_scorer(reward: Path) -> Mapping[str, str]:
    """The reward service's scorer: the model in this folder."""
    return {"kind": "model", "model": str(reward), "dtype": "float32"}
