"""Attention layers that are not trained."""

from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from quartet.config.base import ConfigError
from quartet.config.learner import OptimizerConfig
from quartet.learner.frozen import freeze_attention
from quartet.wire.errors import InvalidArgument
from services.critic.config import CriticConfig
from services.critic.trainer import CriticTrainer
from tests.families import FAMILIES


@pytest.mark.parametrize("family", FAMILIES)
def test_every_architecture_has_its_attention_frozen_and_nothing_else(family: str) -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(FAMILIES[family].config())
    freeze_attention(model)
    parts = [name.split(".") for name, parameter in model.named_parameters() if not parameter.requires_grad]
    layers = {part for name in parts for part in name if part.isdecimal()}
    assert layers == {"0", "1"}
    assert all({"self_attn", "attn", "attention"} & {*name} for name in parts)
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    assert not [name for name in trained if "attn." in name or "attention." in name]
    assert [name for name in trained if "mlp" in name or "fc1" in name]


def test_a_model_without_attention_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^freeze_attention: the model has no layer whose class is called"):
        freeze_attention(nn.Sequential(nn.Linear(2, 2)))


@pytest.mark.processes
def test_a_checkpoint_of_a_critic_that_trained_more_or_less_is_refused(reward_folder: Path, tmp_path: Path) -> None:
    def critic(*, frozen: bool) -> CriticTrainer:
        rate = OptimizerConfig(learning_rate=1e-3)
        return CriticTrainer(CriticConfig(model=str(reward_folder), optimizer=rate, freeze_attention=frozen))

    made = critic(frozen=True)
    made.learner.take_snapshot(tmp_path / "critic", 1)
    made.learner.write_snapshot()
    with pytest.raises(InvalidArgument, match="freeze_attention: True in the checkpoint, False here"):
        critic(frozen=False).learner.restore(tmp_path / "critic")
