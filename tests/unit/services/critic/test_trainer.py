"""The critic's values, clipped loss, training and checkpoint."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModel

from quartet.config.base import ConfigError
from quartet.config.learner import LoraConfig, OptimizerConfig
from quartet.models.loading import load_tokenizer
from services.critic.config import CriticConfig
from services.critic.trainer import CriticTrainer
from tests.learner_batches import CriticBatch, train_critic, value_rows
from tests.models import make_tokenizer
from tests.unit.naive import PROMPTS, RESPONSES, TOKENS, arrays

pytestmark = pytest.mark.processes


def make_trainer(folder: Path, *, rate: float = 1e-3, **options: Any) -> CriticTrainer:
    optimizer = OptimizerConfig(learning_rate=rate)
    return CriticTrainer(CriticConfig(model=str(folder), optimizer=optimizer, **options))


def make_batch(values: float | list[Any], returns: float | list[Any]) -> CriticBatch:
    def rows(given: float | list[Any]) -> list[Any]:
        if isinstance(given, list):
            return arrays(given, np.float32)
        return arrays([[given] * len(response) for response in RESPONSES], np.float32)

    return CriticBatch(arrays(PROMPTS), arrays(RESPONSES), rows(values), rows(returns))


def saved_values(folder: Path) -> list[list[float]]:
    """Values by the saved body and head, one sequence at a time."""
    body = AutoModel.from_pretrained(folder).eval()
    head = load_file(folder / "value_head.safetensors")
    assert sorted(head) == ["value_head.bias", "value_head.weight"]
    actual = []
    for prompt, response in zip(PROMPTS, RESPONSES, strict=True):
        with torch.no_grad():
            hidden = body(torch.tensor([prompt + response])).last_hidden_state[0, len(prompt) - 1 : -1]
        actual.append((hidden @ head["value_head.weight"][0] + head["value_head.bias"]).tolist())
    return actual


@pytest.mark.parametrize("micro_batch_tokens", [1, 12, 1000])
def test_values_are_those_of_the_saved_model(reward_folder: Path, tmp_path: Path, micro_batch_tokens: int) -> None:
    trainer = make_trainer(reward_folder, micro_batch_tokens=micro_batch_tokens)
    train_critic(trainer, make_batch(0.0, 1.0), epochs=2, minibatch_size=2, seed=0)
    actual = value_rows(trainer, arrays(PROMPTS), arrays(RESPONSES))
    saved = tmp_path / "critic"
    trainer.learner.save(saved)
    assert [row.dtype for row in actual] == [np.float32] * 4
    for row, wanted in zip(actual, saved_values(saved), strict=True):
        assert row.tolist() == pytest.approx(wanted, abs=1e-5)


def test_a_critic_starts_from_what_a_critic_saved_head_and_all(reward_folder: Path, tmp_path: Path) -> None:
    trained = make_trainer(reward_folder)
    train_critic(trained, make_batch(0.0, 1.0), epochs=2, minibatch_size=2, seed=0)
    saved = tmp_path / "critic"
    trained.learner.save(saved)
    expected = value_rows(trained, arrays(PROMPTS), arrays(RESPONSES))
    again = make_trainer(saved, seed=9)
    for row, wanted in zip(value_rows(again, arrays(PROMPTS), arrays(RESPONSES)), expected, strict=True):
        assert row.tolist() == wanted.tolist()
    assert load_tokenizer(str(saved)).get_vocab() == make_tokenizer().get_vocab()
    # Adapters are laid around the body and leave the head as it was saved.
    adapted = make_trainer(saved, lora=LoraConfig(rank=2))
    for row, wanted in zip(value_rows(adapted, arrays(PROMPTS), arrays(RESPONSES)), expected, strict=True):
        assert row.tolist() == pytest.approx(wanted.tolist(), abs=1e-6)


@pytest.mark.parametrize(
    ("head", "actual"),
    [
        ({"weight": [1, 32], "bias": [1]}, r"value_head\.bias \[1\], value_head\.weight \[1, 32\]"),
        ({"weight": [1, 64]}, r"value_head\.weight \[1, 64\]"),
        ({}, "nothing"),
    ],
)
def test_a_head_that_does_not_fit_is_refused(
    reward_folder: Path, tmp_path: Path, head: dict[str, list[int]], actual: str
) -> None:
    folder = Path(shutil.copytree(reward_folder, tmp_path / "critic"))
    tensors = {f"value_head.{name}": torch.zeros(shape) for name, shape in head.items()}
    save_file(tensors, folder / "value_head.safetensors")
    takes = r"but the body beside it takes value_head\.bias \[1\], value_head\.weight \[1, 64\]$"
    with pytest.raises(ConfigError, match=rf"^model: .*value_head\.safetensors holds {actual}, {takes}"):
        make_trainer(folder)


def test_a_head_that_is_not_a_file_of_tensors_is_refused(reward_folder: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(reward_folder, tmp_path / "critic"))
    (folder / "value_head.safetensors").write_text("weights")
    with pytest.raises(ConfigError, match=r"^model: .*value_head\.safetensors cannot be read: "):
        make_trainer(folder)


def test_the_first_values_are_small_and_follow_the_seed(reward_folder: Path) -> None:
    first, same, other = (make_trainer(reward_folder, seed=seed) for seed in (1, 1, 2))
    actual, again, different = (
        np.concatenate(value_rows(trainer, arrays(PROMPTS), arrays(RESPONSES))) for trainer in (first, same, other)
    )
    assert actual.tolist() == again.tolist()
    assert np.abs(actual - different).max() > 1e-3
    assert 0 < np.abs(actual).max() < 1


def test_the_loss_is_half_the_mean_squared_error_over_all_tokens(reward_folder: Path) -> None:
    trainer = make_trainer(reward_folder, value_clip_eps=None, micro_batch_tokens=12)
    values = np.concatenate(value_rows(trainer, arrays(PROMPTS), arrays(RESPONSES)))
    assert len(values) == TOKENS
    metrics = train_critic(trainer, make_batch(7.0, 2.0), epochs=1, minibatch_size=4, seed=0)
    assert metrics["loss"] == pytest.approx(float(((values - 2) ** 2).mean() / 2), abs=1e-5)
    assert metrics["mean"] == pytest.approx(float(values.mean()), abs=1e-5)
    assert metrics["clip_fraction"] == 0
    assert metrics["learning_rate"] == 1e-3


def test_a_clipped_value_does_not_train(reward_folder: Path) -> None:
    # Values are near 0 and were said to be 5, so they count as 5 - 0.2 = 4.8; against a return of 0 the clipped
    # error is the larger one: the loss is 4.8^2 / 2 = 11.52 and has no gradient.
    trainer = make_trainer(reward_folder, value_clip_eps=0.2)
    metrics = train_critic(trainer, make_batch(5.0, 0.0), epochs=1, minibatch_size=4, seed=0)
    assert metrics["loss"] == pytest.approx(11.52, abs=1e-4)
    assert (metrics["clip_fraction"], metrics["grad_norm"]) == (1, 0)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_critic_learns(reward_folder: Path, checkpointing: bool) -> None:
    returns = [[0.5, -0.5], [-1.0, 0.0, 1.0, 0.25], [0.3], [1.0, -1.0, 0.5]]
    trainer = make_trainer(reward_folder, rate=3e-3, value_clip_eps=None, gradient_checkpointing=checkpointing)
    first = train_critic(trainer, make_batch(0.0, returns), epochs=1, minibatch_size=4, seed=0)["loss"]
    train_critic(trainer, make_batch(0.0, returns), epochs=40, minibatch_size=2, seed=1)
    last = train_critic(trainer, make_batch(0.0, returns), epochs=1, minibatch_size=4, seed=0)["loss"]
    assert last < 0.05 * first


def test_micro_batches_and_checkpointing_change_nothing(reward_folder: Path) -> None:
    # Rates so small that rounding cannot grow over the four steps.
    options: list[dict[str, Any]] = [{}, {"micro_batch_tokens": 1}, {"gradient_checkpointing": True}]
    trainers = [make_trainer(reward_folder, rate=1e-5, **option) for option in options]
    measured = [train_critic(t, make_batch(0.0, 1.0), epochs=2, minibatch_size=2, seed=3) for t in trainers]
    for actual in measured[1:]:
        assert actual == pytest.approx(measured[0], abs=1e-4)
    values = [np.concatenate(value_rows(trainer, arrays(PROMPTS), arrays(RESPONSES))) for trainer in trainers]
    for row in values[1:]:
        assert row.tolist() == pytest.approx(values[0].tolist(), abs=1e-4)
