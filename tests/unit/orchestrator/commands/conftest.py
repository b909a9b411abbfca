"""Fixtures that check a file before a run."""

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.unit.preflights import ROOT


@pytest.fixture
def raw(policy_folder: Path, reward_folder: Path, tmp_path: Path) -> dict[str, Any]:
    """deploy/ppo.yaml with models of 128 positions and 4 prompts, of 2 to 5 tokens."""
    for split, first in (("train", 4), ("eval", 30)):
        texts = [" ".join(f"w{first + index}" for index in range(count + 1)) for count in range(4)]
        (tmp_path / f"{split}.jsonl").write_text("".join(f'{{"prompt": "{text}"}}\n' for text in texts))
    loaded: dict[str, Any] = deepcopy(yaml.safe_load((ROOT / "deploy" / "ppo.yaml").read_text()))
    rollout, reward, reference, critic = (application["args"] for application in loaded["applications"])
    rollout["model"] = reference["model"] = reward["tokenizer"] = str(policy_folder)
    critic["model"] = reward["scorer"]["model"] = str(reward_folder)
    loaded["orchestrator"]["policy"]["model"] = str(policy_folder)
    loaded["orchestrator"]["data"]["path"] = str(tmp_path)
    loaded["orchestrator"]["evaluation"]["judges"] = {"words": "tests.scorers:count"}
    return loaded
