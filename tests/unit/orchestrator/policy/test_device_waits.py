"""Counts the waits of training and forward passes for the device, in both directions, and the bytes copied to it: a
GPU that is waited for runs out of work."""

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from orchestrator.algorithms.ppo import PPO
from orchestrator.policy.trainer import PolicyTrainer
from quartet.columns import Columns
from quartet.config.learner import GROUP_ELEMENTS, OptimizerConfig, PolicyConfig
from quartet.learner import module
from quartet.models import tiles
from quartet.models.distribution import Distribution
from quartet.models.loading import load_causal
from quartet.models.sequences import PairTensors, pair_tensors
from services.critic.config import CriticConfig
from services.critic.trainer import CriticTrainer
from services.reference.config import ReferenceConfig
from services.reference.model import FrozenModel
from tests import plain
from tests.families import FAMILIES
from tests.learner_batches import CriticBatch, PolicyBatch, train_critic, train_policy
from tests.models import EOS, WORDS
from tests.unit.device_waits import Copies, device_waits

PROMPTS, RESPONSES = plain.random_pairs(6, seed=4, longest=20)
OPTIMIZER = OptimizerConfig(learning_rate=1e-3)
WHOLE = Distribution(0.9)
MASKED = Distribution(0.9, vocabulary=len(WORDS), min_new_tokens=3, end_ids=(EOS,))
MICRO_BATCHES = {1000: 1, 1: len(PROMPTS)}
"""Tokens of a micro-batch -> micro-batches of the batch below."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return FAMILIES["qwen2.5"].make(tmp_path_factory.mktemp("models") / "policy")


def of_training(folder: Path, distribution: Distribution, algorithm: dict[str, Any], **options: Any) -> Counter[str]:
    """Waits of one optimizer step of the policy."""
    config = PolicyConfig(model=str(folder), optimizer=OPTIMIZER, **options)
    trainer = PolicyTrainer(config, PPO(epochs=1, minibatch_size=6, **algorithm), distribution)
    rows = [np.linspace(-1, 1, len(response), dtype=np.float32) for response in RESPONSES]
    batch = PolicyBatch(PROMPTS, RESPONSES, rows, rows, rows, rows, 0.1)
    train_policy(trainer, batch, seed=0)
    with device_waits() as waits:
        train_policy(trainer, batch, seed=0)
    return waits


def check(counted: list[Counter[str]]) -> None:
    """Steps of one micro-batch and of many: each waits once for its metrics and its norm, and once, after the batch,
    for the look for NaN. torch.tensor is called by DeepSpeed alone, as often for many micro-batches."""
    one, many = counted
    assert one == many
    assert {name: count for name, count in one.items() if name != "tensor"} == {"tolist": 1, "_local_scalar_dense": 1}


@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("distribution", [WHOLE, MASKED])
@pytest.mark.parametrize("algorithm", [{}, {"correction": "tis-sequence", "entropy_coef": 0.1}])
def test_a_policys_step_waits_once_however_many_micro_batches_it_has(
    folder: Path, packing: bool, distribution: Distribution, algorithm: dict[str, Any]
) -> None:
    options = {"packing": packing, "gradient_checkpointing": bool(algorithm)}
    check(
        [
            of_training(folder, distribution, algorithm, **options, micro_batch_tokens=tokens)
            for tokens in MICRO_BATCHES
        ]
    )


@pytest.mark.parametrize("most", [GROUP_ELEMENTS, 2000])
def test_a_step_with_zero_waits_once_more_however_many_groups_it_has(
    folder: Path, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    """DeepSpeed reads before the step whether the norm is finite."""
    monkeypatch.setattr(module, "GROUP_ELEMENTS", most)
    options = {"packing": True, "dtype": "bfloat16", "zero_stage": 1}
    one, many = (of_training(folder, WHOLE, {}, **options, micro_batch_tokens=tokens) for tokens in MICRO_BATCHES)
    assert one == many == {"tolist": 1, "_local_scalar_dense": 2}


@pytest.mark.parametrize("packing", [False, True])
def test_a_critics_step_waits_as_often(folder: Path, packing: bool) -> None:
    counted = []
    for tokens in MICRO_BATCHES:
        config = CriticConfig(model=str(folder), optimizer=OPTIMIZER, packing=packing, micro_batch_tokens=tokens)
        trainer = CriticTrainer(config)
        rows = [np.linspace(-1, 1, len(response), dtype=np.float32) for response in RESPONSES]
        with device_waits() as waits:
            train_critic(trainer, CriticBatch(PROMPTS, RESPONSES, rows, rows), epochs=1, minibatch_size=6, seed=0)
        counted.append(waits)
    check(counted)


@pytest.mark.parametrize("distribution", [WHOLE, MASKED])
def test_a_forward_pass_waits_for_its_result(folder: Path, distribution: Distribution) -> None:
    trajectories = Columns.of_pairs(PROMPTS, RESPONSES)
    for tokens, passes in MICRO_BATCHES.items():
        config = ReferenceConfig(model=str(folder), dtype="float32", batch_tokens=tokens)
        model = FrozenModel(config, torch.device("cpu"))
        with device_waits() as waits:
            model.logprobs(trajectories, distribution)
        assert waits == {"numpy": passes}


def micro_batch(packing: bool) -> tuple[PairTensors, list[torch.Tensor]]:
    """The tensors of a policy's micro-batch on a device: the pairs, and four numbers of each response token."""
    pairs = pair_tensors(Columns.of_pairs(PROMPTS, RESPONSES), torch.device("meta"), packing=packing, last=False)
    rows = [np.linspace(-1, 1, len(response), dtype=np.float32) for response in RESPONSES]
    return pairs, [pairs.spread(rows) for _ in range(4)] + [pairs.trained([row > 0 for row in rows])]


@pytest.mark.parametrize("packing", [False, True])
def test_a_micro_batch_is_copied_to_the_device_without_a_wait(packing: bool) -> None:
    with device_waits() as waits:
        pairs, others = micro_batch(packing)
    assert not waits
    assert {tensor.device.type for tensor in (pairs.input_ids, pairs.steps, *others)} == {"meta"}


def test_the_bytes_of_a_packed_micro_batch() -> None:
    """At the least the host sends each token's id and five numbers of each response token, of four bytes: it also
    sends each token's position, and of each response token its id again, its column and its index, and the
    boundaries. Padding is additional."""
    tokens = sum(len(p) + len(r) - 1 for p, r in zip(PROMPTS, RESPONSES, strict=True))
    answers = sum(len(response) for response in RESPONSES)
    sent = {}
    for packing in (True, False):
        copies = Copies()
        with device_waits(copies):
            micro_batch(packing)
        sent[packing] = copies.bytes
    least = 4 * tokens + 20 * answers
    assert sent[True] == least + 4 * tokens + 12 * answers + 4 * (len(PROMPTS) + 1)
    assert least < sent[True] < 1.8 * least
    assert sent[False] > sent[True]


@pytest.mark.parametrize("distribution", [WHOLE, MASKED])
@pytest.mark.parametrize("packing", [False, True])
def test_a_pass_on_the_device_copies_nothing_more_to_it(
    folder: Path, packing: bool, distribution: Distribution
) -> None:
    """Forward and backward pass, with the vocabulary in tiles."""
    model: Any = load_causal(str(folder), "float32", packing=packing)
    model.to("meta")
    with device_waits():
        pairs, _ = micro_batch(packing)
    copies = Copies()
    with device_waits(copies) as waits, pytest.MonkeyPatch.context() as patch:
        patch.setitem(tiles.TILE_ELEMENTS, "cuda", 1)
        patch.setattr(tiles, "LEAST_WIDTH", 13)
        logprobs, entropies = distribution.asked_of(model, pairs, entropy=True)
        assert entropies is not None
        (logprobs.sum() + entropies.sum()).backward()
    assert not waits
    assert copies.bytes == 0
    assert all(parameter.grad is not None for parameter in model.parameters())


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


def test_copies_to_the_device_wait_unless_they_are_pinned_and_told_not_to() -> None:
    data, there, copies = torch.arange(6.0), torch.zeros(6, device="meta"), Copies()
    with device_waits(copies) as waits:
        data.to("meta")
        data.to("meta", non_blocking=True)
        data.pin_memory().to("meta")
        there.copy_(data)
        there.copy_(data, non_blocking=True)
    assert waits == {"to device": 5}
    with device_waits(copies) as waits:
        data.pin_memory().to("meta", non_blocking=True)
        there.copy_(data.pin_memory(), non_blocking=True)
        there.to(torch.float64)
        data.to(torch.float64)
    assert not waits
    assert copies.bytes == 7 * 24
