"""The learners that recompute their activations because the sums of memory do not fit without."""

from pathlib import Path
from typing import Any

import pytest

from orchestrator.deployment.file import Deployment
from orchestrator.deployment.memory import footprints, shortage
from orchestrator.deployment.recomputation import choices, decided
from quartet.config.base import GIB
from quartet.models.size import ModelSize
from services.critic.config import CriticConfig
from tests.gpu_requests import written
from tests.unit.orchestrator.deployment.test_memory import LLAMA, QWEN


@pytest.fixture(autouse=True)
def sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models are given by their sizes, not by transformers' configurations."""
    monkeypatch.setattr(ModelSize, "of", lambda size: size)


def configs(folder: Path, policy: ModelSize | None, reward: ModelSize) -> dict[str, Any]:
    return {str(folder): policy, str(folder / "reward"): reward}


def outcome(deployment: Deployment) -> tuple[Any, Any]:
    """The choices of policy and critic, the same in their sections and in the file's contents."""
    critic = next(section for section in deployment.services.values() if isinstance(section, CriticConfig))
    raw = next(one for one in deployment.raw["applications"] if one["name"] == "critic")
    asked = deployment.raw["orchestrator"]["policy"]["gradient_checkpointing"], raw["args"]["gradient_checkpointing"]
    assert asked == (deployment.orchestrator.policy.gradient_checkpointing, critic.gradient_checkpointing)
    return asked


@pytest.mark.parametrize(
    ("gib", "policy", "reward", "wanted"),
    [
        (139, "1.5B", "1.5B", (False, False)),  # 105 without
        (95, "1.5B", "1.5B", (False, True)),  # 91 if the critic does, 90 if the policy does: of equals the critic
        (79, "1.5B", "1.5B", (True, True)),  # 76
        (75, "1.5B", "1.5B", (True, True)),  # too little in any case, which the check of sums reports
        (110, "0.5B", "3B", (True, False)),  # 104: the smaller one, if that suffices
        (118, "3B", "0.5B", (False, True)),  # 114
    ],
)
def test_as_few_recompute_as_the_sums_allow(
    gib: int, policy: str, reward: str, wanted: tuple[bool, bool], tmp_path: Path
) -> None:
    file = written("ppo-1gpu", tmp_path, **{"gpu_gib: 79": f"gpu_gib: {gib}"})
    sizes = configs(tmp_path, QWEN[policy], QWEN[reward])
    assert outcome(decided(file, sizes)) == wanted
    assert outcome(decided(file, sizes)) == wanted
    assert outcome(file) == ("auto", "auto")
    parts = footprints(decided(file, sizes), gib * GIB, lambda path: sizes[path])
    assert bool(shortage(parts, gib * GIB)) == (gib == 75)


def test_each_choice_is_told_by_its_field(tmp_path: Path) -> None:
    file = written("ppo-1gpu", tmp_path, **{"gpu_gib: 79": "gpu_gib: 105"})
    assert choices(file, decided(file, configs(tmp_path, QWEN["1.5B"], QWEN["1.5B"]))) == [
        "applications.critic.args.gradient_checkpointing: auto is true here",
        "orchestrator.policy.gradient_checkpointing: auto is false here",
    ]


def test_without_sums_all_recompute_on_gpus_and_none_on_a_cpu(tmp_path: Path) -> None:
    sizes = configs(tmp_path, QWEN["0.5B"], QWEN["0.5B"])
    assert outcome(decided(written("ppo-1gpu", tmp_path, **{"  gpu_gib: 79": "  # "}), sizes)) == (True, True)
    unread = configs(tmp_path, None, QWEN["0.5B"])
    assert outcome(decided(written("ppo-1gpu", tmp_path), unread)) == (True, True)
    no_gpus = written("ppo-1gpu", tmp_path, **{"num_gpus: 0.3": "num_gpus: 0"})
    assert outcome(decided(no_gpus, sizes)) == (False, False)
    by_hand = written(
        "ppo-1gpu", tmp_path, **{"    num_gpus: 0.3": "    num_gpus: 0\n    env_vars: {CUDA_VISIBLE_DEVICES: '0'}"}
    )
    assert outcome(decided(by_hand, sizes)) == (True, False)


def test_nothing_changes_where_the_file_decides(tmp_path: Path) -> None:
    file = written("ppo-1gpu", tmp_path, **{"&recomputed auto": "&recomputed false"})
    assert decided(file, configs(tmp_path, QWEN["1.5B"], QWEN["1.5B"])) is file
    assert choices(file, file) == []


@pytest.mark.parametrize(("name", "policy"), [("ppo-8b-8gpu", "8B"), ("ppo-70b-32gpu", "70B")])
def test_the_larger_files_recompute_for_policy_and_critic(name: str, policy: str, tmp_path: Path) -> None:
    file = written(name, tmp_path)
    assert outcome(decided(file, configs(tmp_path, LLAMA[policy], LLAMA["8B"]))) == (True, True)


def test_a_gpu_for_each_learner_has_room_for_activations(tmp_path: Path) -> None:
    file = written("ppo-gpu", tmp_path)
    assert outcome(decided(file, configs(tmp_path, QWEN["1.5B"], QWEN["1.5B"]))) == (False, False)
