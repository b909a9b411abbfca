"""Trajectories of several sequences: each model computes what it does for the sequences alone, and they are trained
on as one trajectory."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from orchestrator.algorithms.contract import KLConfig
from quartet.columns import Columns
from quartet.config.learner import OptimizerConfig
from quartet.models.distribution import Distribution
from quartet.models.sequences import pair_tensors
from quartet.trajectory import Segment, Trajectory, as_one, columns_of
from services.critic.config import CriticConfig
from services.critic.trainer import CriticTrainer
from services.reference.config import ReferenceConfig
from services.reference.model import FrozenModel
from tests.unit.policy_batches import TEMPERATURE, make_trainer, weights

DRAW = np.random.default_rng(12)
LONG = DRAW.integers(4, 64, 30).astype(np.int32)
"""A prompt that is worth computing once for the trajectories that begin with it."""


def given(length: int) -> Segment:
    return Segment(DRAW.integers(4, 64, length).astype(np.int32))


def sampled(length: int) -> Segment:
    return Segment(given(length).ids, DRAW.normal(-2, 0.3, length).astype(np.float32), ((0, 0, length),))


def trajectory(number: int, *sequences: list[Segment]) -> Trajectory:
    return Trajectory(number, number, number, as_one([Trajectory(0, 0, 0, segments) for segments in sequences]))


@pytest.fixture(scope="module")
def batch() -> Columns:
    """Four trajectories of seven sequences, of which two begin with the same prompt, and one ends with a given
    token."""
    columns = columns_of(
        [
            trajectory(0, [Segment(LONG), sampled(3), given(2), sampled(2)], [given(4), sampled(5)]),
            trajectory(1, [Segment(LONG), sampled(4)], [given(1), sampled(1)], [Segment(LONG), sampled(2), given(1)]),
            trajectory(2, [given(6), sampled(6)]),
            trajectory(3, [given(2), sampled(1), given(3), sampled(2)]),
        ]
    )
    old = columns["logprobs"] + DRAW.normal(0, 0.2, columns.size("sampled")).astype(np.float32)
    advantages = DRAW.normal(0, 1, columns.size("sampled")).astype(np.float32)
    return columns.with_sampled(old_logprobs=old, advantages=advantages)


@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("tokens", [1, 60, 1000])
def test_log_probs_and_values_are_those_of_the_sequences_alone(
    policy_folder: Path, reward_folder: Path, batch: Columns, tokens: int, packing: bool
) -> None:
    single = batch.apart()
    assert (len(batch), len(single)) == (4, 7)
    packed = make_trainer(policy_folder, packing=packing, micro_batch_tokens=tokens)
    expected = make_trainer(policy_folder).logprobs(single)
    np.testing.assert_allclose(packed.logprobs(batch), expected, atol=1e-5)
    reference = ReferenceConfig(model=str(policy_folder), dtype="float32", packing=packing, batch_tokens=tokens)
    frozen = FrozenModel(reference, torch.device("cpu"))
    np.testing.assert_allclose(frozen.logprobs(batch, Distribution(TEMPERATURE)), expected, atol=1e-5)
    critic: dict[str, Any] = {"model": str(reward_folder), "optimizer": OptimizerConfig(learning_rate=1e-3)}
    packed_critic = CriticTrainer(CriticConfig(**critic, packing=packing, micro_batch_tokens=tokens))
    values = CriticTrainer(CriticConfig(**critic)).values(single)
    np.testing.assert_allclose(packed_critic.values(batch), values, atol=1e-5)


def test_a_pass_that_trains_nothing_need_not_hold_a_whole_trajectory(policy_folder: Path, batch: Columns) -> None:
    """A caller of the service chooses how many sequences a trajectory has."""
    frozen = FrozenModel(
        ReferenceConfig(model=str(policy_folder), dtype="float32", packing=True, batch_tokens=1), torch.device("cpu")
    )
    held, forward = [], frozen.model.forward

    def counted(*inputs: Any, **options: Any) -> Any:
        held.append(options["input_ids"].numel())
        return forward(*inputs, **options)

    frozen.model.forward = counted  # type: ignore[method-assign]
    frozen.logprobs(batch, Distribution(TEMPERATURE))
    assert max(held) < int(batch.sequence_lengths.max()) < int(batch.lengths.max())


@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("tokens", [1, 1000])
@pytest.mark.parametrize("settings", [{}, {"reduction": "trajectories"}, {"correction": "tis-sequence"}], ids=str)
def test_they_are_trained_on_as_one_trajectory(
    policy_folder: Path, batch: Columns, tokens: int, packing: bool, settings: dict[str, Any]
) -> None:
    """With a reduction over trajectories, each of four counts as any other, however many sequences it has; the
    correction of a sequence is of each by itself."""
    trainer = make_trainer(policy_folder, packing=packing, micro_batch_tokens=tokens, **settings)
    before = weights(trainer)
    metrics = trainer.train(batch, 0.0, seed=0)
    single = batch.apart()
    if "reduction" in settings:
        share = batch.size("sampled") / (len(batch) * batch.counts)
        single = single.with_sampled(advantages=batch["advantages"] * share[batch.owners].astype(np.float32))
    alone = make_trainer(policy_folder, size=7, **settings | {"reduction": "tokens"})
    wanted = alone.train(single, 0.0, seed=0)
    assert metrics["loss"] == pytest.approx(wanted["loss"], abs=1e-5)
    assert metrics["grad_norm"] == pytest.approx(wanted["grad_norm"], rel=1e-4)
    moved, expected = weights(trainer) - before, weights(alone) - before
    assert expected.abs().max() > 1e-3
    torch.testing.assert_close(moved, expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("packing", [False, True])
def test_what_the_first_step_computed_is_that_of_all_their_tokens(
    policy_folder: Path, batch: Columns, packing: bool
) -> None:
    trainer = make_trainer(policy_folder, packing=packing, micro_batch_tokens=40, kl=KLConfig(coef=0.0))
    expected = trainer.logprobs(batch)
    trainer.train(batch.without("old_logprobs"), 0.0, seed=0)
    computed = trainer.trained_logprobs()
    assert [len(row) for row in computed] == batch.counts.tolist()
    np.testing.assert_allclose(np.concatenate(computed), expected, atol=1e-5)


@pytest.mark.parametrize("packing", [False, True])
def test_a_model_is_given_sequences(batch: Columns, packing: bool) -> None:
    with pytest.raises(ValueError, match="take them apart"):
        pair_tensors(batch, torch.device("cpu"), packing=packing, last=False)
    assert pair_tensors(batch.apart(), torch.device("cpu"), packing=packing, last=False).lengths
