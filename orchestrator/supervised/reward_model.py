"""Reward models: which of two answers to a prompt people prefer, as a score."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from pydantic import NonNegativeFloat

from orchestrator.data.examples import Examples, Part, examples
from orchestrator.data.splits import Row, rows_of
from orchestrator.evaluation.intervals import win_rate
from orchestrator.supervised.contract import ExamplesConfig, Supervised
from quartet.columns import Columns
from quartet.config.base import ConfigError
from quartet.wire.codec import Floats

if TYPE_CHECKING:
    from torch import Tensor, nn

    from quartet.learner.objective import Objective
    from quartet.models.sequences import PairTensors


class PreferencesConfig(ExamplesConfig):
    """Prompts with two answers each, of which one is preferred."""

    chosen_key: str = "chosen"
    """Column that holds the preferred answer: text, or messages of which the last one is the assistant's, after
    those of the prompt or without them."""
    rejected_key: str = "rejected"
    """Column that holds the other answer, in the same form."""
    margin_key: str | None = None
    """Column that holds a number, by how much the score of the preferred answer is to exceed the other's. Null: 0."""


class RewardModel(Supervised):
    """The file of `quartet reward-model`: a model that learns to score answers from comparisons."""

    about = "Train a reward model on pairs of answers of which one is preferred."
    owner: ClassVar[str] = "reward model"
    describes: ClassVar[bool] = True

    data: PreferencesConfig
    """Prompts with two answers each."""
    centring: NonNegativeFloat = 0.0
    """Weight of the squared sum of both scores in the loss, which keeps scores near zero; 0.01 is usual
    (Eisenstein et al. 2023, arXiv:2312.09244). 0: scores may be shifted by any constant, which normalisation in the
    reward service takes away."""

    def read(self, split: str, tokenizer: Any, ends: tuple[int, ...], vocabulary: int) -> Examples:
        """The comparisons of a split, see Supervised.read."""
        data = self.data
        sides = (data.chosen_key, data.rejected_key)
        keys = {"input_key": data.input_key, "chosen_key": sides[0], "rejected_key": sides[1]}
        rows = rows_of(data, split, keys | {"margin_key": data.margin_key})
        margins = [row.number_in(data.margin_key) if data.margin_key else 0.0 for row in rows]
        parts = data.parts(rows, sides, tokenizer, ends)
        for row, chosen, rejected in zip(rows, parts[::2], parts[1::2], strict=True):
            _check_different(row, chosen, rejected, sides)

        def rest(kept: list[int]) -> Mapping[str, np.ndarray]:
            own = np.repeat(np.asarray([margins[row] for row in kept], np.float32), 2)
            return {"margin": own} if data.margin_key else {}

        return examples(split, rows, parts, max_length=self.max_length, vocabulary=vocabulary, rest=rest)

    def load(self) -> "nn.Module":
        """The reward model, or the body of another model under a new head."""
        from quartet.learner.lora import add_adapters
        from quartet.models.scalar import load_reward

        model = load_reward(self.model, self.dtype, self.attn_implementation, packing=self.packing)
        add_adapters(model.body, self.lora)
        return model

    def objective(self) -> "Objective":
        """The likelihood of the comparisons."""
        from quartet.objectives.preference import Preference

        return Preference(centring=self.centring)

    def outputs(self, model: Any, pairs: "PairTensors") -> "Tensor":
        """The outputs at response tokens, of which the last one of an answer is its score."""
        from quartet.models.scalar import outputs_of

        return outputs_of(model, pairs)

    def measured(self, examples: Columns, outputs: Floats) -> dict[str, float]:
        """`accuracy`, the share of comparisons in which the preferred answer has the higher score, a tie counting one
        half, with Wilson's interval; and `loss`, the mean of -log sigmoid(difference - margin)."""
        chosen, rejected = _scores(examples, outputs).reshape(-1, 2).T
        margin = examples["margin"][::2] if "margin" in examples else np.float32(0)
        accuracy = win_rate(chosen.tolist(), rejected.tolist())
        return {
            "accuracy": accuracy.mean,
            "accuracy_low": accuracy.low,
            "accuracy_high": accuracy.high,
            "loss": float(np.logaddexp(0, margin - (chosen - rejected)).mean()),
        }

    def described(self, examples: Columns, outputs: Floats) -> dict[str, float]:
        """`reward_mean` and `reward_std` of all answers' scores, by which the reward service normalises."""
        scores = _scores(examples, outputs).astype(np.float64)
        if not (std := float(scores.std(ddof=1))):
            raise ConfigError("the trained model gives all answers the same score, and so cannot be a reward")
        return {"reward_mean": float(scores.mean()), "reward_std": std}

    def write(self, module: "nn.Module", folder: Path, weights: "Mapping[str, Tensor]") -> None:
        """Writes a sequence-classification model of one label."""
        from quartet.models.scalar import ScalarModel, write_reward

        assert isinstance(module, ScalarModel)
        write_reward(module, folder, weights)


def _scores(examples: Columns, outputs: Floats) -> Floats:
    """[B] the output at each trajectory's last token."""
    scores: Floats = outputs[np.cumsum(examples.counts) - 1]
    return scores


def _check_different(row: Row, chosen: Sequence[Part], rejected: Sequence[Part], sides: tuple[str, str]) -> None:
    one, other = (np.concatenate([ids for _, ids in parts]) for parts in (chosen, rejected))
    if np.array_equal(one, other):
        raise ConfigError(f"{row.place}: columns {sides[0]!r} and {sides[1]!r} hold the same answer; remove the row")
