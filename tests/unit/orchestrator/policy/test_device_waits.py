"""Counts the waits of training and forward passes for the device: a GPU that is waited for runs out of work."""

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from orchestrator.config.algorithm import PPOConfig
from orchestrator.policy.trainer import PolicyBatch, PolicyTrainer
from services.common.config.learner import OptimizerConfig, PolicyConfig
from services.common.models.distribution import Distribution
from services.critic.config import CriticConfig
from services.critic.trainer import CriticBatch, CriticTrainer
from services.reference.config import ReferenceConfig
from services.reference.model import FrozenModel, Question
from tests import plain
from tests.families import FAMILIES, PADDED
from tests.models import EOS, WORDS
from tests.unit.device_waits import device_waits

PROMPTS, RESPONSES = plain.random_pairs(6, seed=4, longest=20)
OPTIMIZER = OptimizerConfig(learning_rate=1e-3)
WHOLE = Distribution(0.9)
MASKED = Distribution(0.9, vocabulary=len(WORDS), min_new_tokens=3, end_ids=(EOS,))
MICRO_BATCHES = {1000: 1, 1: len(PROMPTS)}
"""Tokens of a micro-batch -> micro-batches of the batch below."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    assert len(WORDS) < PADDED
    return FAMILIES["qwen2.5"].make(tmp_path_factory.mktemp("models") / "policy")


def of_training(folder: Path, distribution: Distribution, ppo: dict[str, Any], **options: Any) -> Counter[str]:
    """Waits of one optimizer step of the policy."""
    config = PolicyConfig(model=str(folder), optimizer=OPTIMIZER, **options)
    trainer = PolicyTrainer(config, PPOConfig(epochs=1, minibatch_size=6, **ppo), distribution)
    rows = [np.linspace(-1, 1, len(response), dtype=np.float32) for response in RESPONSES]
    batch = PolicyBatch(PROMPTS, RESPONSES, rows, rows, rows, rows, 0.1)
    trainer.train(batch, seed=0)
    with device_waits() as waits:
        trainer.train(batch, seed=0)
    return waits


def check(counted: list[Counter[str]]) -> None:
    """Steps of one micro-batch and of many: each waits once for its metrics and its norm, and once, after the batch,
    for the look for NaN. torch.tensor is called by DeepSpeed alone, as often for many micro-batches."""
    one, many = counted
    assert one == many
    assert {name: count for name, count in one.items() if name != "tensor"} == {"tolist": 1, "_local_scalar_dense": 1}


@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("distribution", [WHOLE, MASKED])
@pytest.mark.parametrize("ppo", [{}, {"correction": "tis-sequence", "entropy_coef": 0.1}])
def test_a_policys_step_waits_once_however_many_micro_batches_it_has(
    folder: Path, packing: bool, distribution: Distribution, ppo: dict[str, Any]
) -> None:
    options = {"packing": packing, "gradient_checkpointing": bool(ppo)}
    check([of_training(folder, distribution, ppo, **options, micro_batch_tokens=tokens) for tokens in MICRO_BATCHES])


@pytest.mark.parametrize("packing", [False, True])
def test_a_critics_step_waits_as_often(folder: Path, packing: bool) -> None:
    counted = []
    for tokens in MICRO_BATCHES:
        config = CriticConfig(model=str(folder), optimizer=OPTIMIZER, packing=packing, micro_batch_tokens=tokens)
        trainer = CriticTrainer(config)
        rows = [np.linspace(-1, 1, len(response), dtype=np.float32) for response in RESPONSES]
        with device_waits() as waits:
            trainer.train(CriticBatch(PROMPTS, RESPONSES, rows, rows), epochs=1, minibatch_size=6, seed=0)
        counted.append(waits)
    check(counted)


@pytest.mark.parametrize("distribution", [WHOLE, MASKED])
def test_a_forward_pass_waits_for_its_result(folder: Path, distribution: Distribution) -> None:
    questions = [Question(p, r, distribution) for p, r in zip(PROMPTS, RESPONSES, strict=True)]
    for tokens, passes in MICRO_BATCHES.items():
        config = ReferenceConfig(model=str(folder), dtype="float32", batch_tokens=tokens)
        model = FrozenModel(config, torch.device("cpu"))
        with device_waits() as waits:
            model.logprobs(questions)
        assert waits == {"numpy": passes}


def test_what_waits_is_counted() -> None:
    data = torch.arange(6.0)
    with device_waits() as waits:
        for _ in range(2):
            bool((data > 9).any())
        float(data.max())
        int(data.max())
        data[data > 2].sum()
        data.nonzero()
        data.tolist()
        torch.tensor([1, 2])
        data.numpy()
    expected = {"_local_scalar_dense": 4, "index": 1, "nonzero": 1, "tolist": 1, "tensor": 1, "numpy": 1}
    assert waits == expected
