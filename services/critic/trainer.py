"""The critic's model on one rank: values, and training on one PPO batch at a time."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np
import torch

from quartet.columns import Columns
from quartet.learner.learner import RankLearner, Snapshots
from quartet.learner.lora import add_adapters
from quartet.learner.minibatches import Means, minibatches, tokens_trained, weight_of
from quartet.learner.shards import Pass
from quartet.models.loading import load_tokenizer, max_length
from quartet.models.numerics import masked_sum, value_loss
from quartet.models.scalar import VALUE_HEAD, ScalarModel, load_value
from quartet.models.sequences import PairTensors
from quartet.ranks.ranks import Ranks
from quartet.wire.codec import Bools, Floats, Ints
from services.critic.config import CriticConfig


@dataclass(frozen=True, slots=True)
class CriticBatch:
    """One PPO batch of B responses for the critic's training."""

    prompts: Sequence[Ints]
    """Token ids, B times [P]."""
    responses: Sequence[Ints]
    """Token ids, B times [T]."""
    values: Sequence[Floats]
    """Values from before the update, B times [T]."""
    returns: Sequence[Floats]
    """Returns, B times [T]."""
    trained: Sequence[Bools] | None = None
    """True at the tokens that are trained on, B times [T]; None: all are."""

    @classmethod
    def of(cls, columns: Columns) -> Self:
        """The batch, divided into its responses."""
        ends = columns.responses.ends[:-1]
        marks = columns.on_responses(columns["trained"])
        return cls(
            list(columns.prompts),
            list(columns.responses),
            np.split(columns.on_responses(columns["values"]), ends),
            np.split(columns.on_responses(columns["returns"]), ends),
            None if marks.all() else np.split(marks, ends),
        )


@dataclass(frozen=True, slots=True)
class _Micro:
    pairs: PairTensors
    mask: torch.Tensor
    """The tokens that are trained on; none on a rank whose share only makes the ranks' counts equal."""
    values: torch.Tensor
    returns: torch.Tensor
    tokens: int
    """Tokens of the whole minibatch that are trained on."""
    weight: float
    """Weight of the minibatch's loss."""


class CriticTrainer:
    """A value model under DeepSpeed, or one rank's share of it. Calls must not overlap, and all ranks get all
    calls."""

    def __init__(self, config: CriticConfig, ranks: Ranks | None = None) -> None:
        self._config = config
        torch.manual_seed(config.seed)
        model = load_value(config.model, config.dtype, config.attn_implementation, packing=config.packing)
        add_adapters(model.body, config.lora)
        self._learner = RankLearner(model, config, ranks)
        self._model: ScalarModel = self._learner.module  # type: ignore[assignment]
        self.snapshots = Snapshots(self._learner, self._write, kind="critic", exported=False)
        self._taken: list[Columns] = []

    @property
    def parts(self) -> tuple[object, ...]:
        """The objects whose methods a rank runs: this trainer, and its snapshots."""
        return self, self.snapshots

    def limits(self) -> tuple[int, int]:
        """Entries of the vocabulary, and the longest sequence in tokens."""
        body = self._model.body
        return int(body.config.vocab_size), max_length(body)  # type: ignore[union-attr, arg-type]

    @torch.no_grad()
    def values(self, prompts: Sequence[Ints], responses: Sequence[Ints]) -> list[Floats]:
        """The values V(prefix) before each response token, [T] for each pair."""
        valued: dict[int, Floats] = {}
        for each in self._learner.passes(prompts, responses):
            rows = each.rows
            pairs = self._learner.tensors([prompts[i] for i in rows], [responses[i] for i in rows])
            values = self._model.values(pairs)
            if each.counts:
                valued |= dict(zip(rows, pairs.unpad(values), strict=True))
        return self._learner.shared(valued, [len(response) for response in responses])

    def take(self, part: Columns, index: int) -> None:
        """Keeps a part of the next batch, the one with this index, for `train_taken`."""
        self._taken[index:] = [part]

    def train_taken(self, parts: int, *, epochs: int, minibatch_size: int, seed: int) -> dict[str, float]:
        """Joins the first `parts` parts that were taken, and trains on them as `train` does."""
        taken, self._taken = self._taken[:parts], []
        batch = CriticBatch.of(Columns.concatenate(taken))
        return self.train(batch, epochs=epochs, minibatch_size=minibatch_size, seed=seed)

    def train(self, batch: CriticBatch, *, epochs: int, minibatch_size: int, seed: int) -> dict[str, float]:
        """Trains on one batch; returns the mean metrics over its optimizer steps, the number of steps skipped for a
        gradient that was not finite, and how many were skipped in a row up to now. A minibatch of which no token is
        trained on is left out and counted (`empty_steps`). NotFinite if a weight is not finite."""
        means, counts = Means(), tokens_trained(batch.responses, batch.trained)
        with self._learner.optimizer_state.resident():
            for chosen in minibatches(len(batch.prompts), epochs=epochs, size=minibatch_size, seed=seed):
                if not (tokens := sum(counts[i] for i in chosen)):
                    means.leave_out()
                    continue
                weight = weight_of(chosen, counts, minibatch_size)
                means.add(self._learner.step(self._micro_batches(batch, chosen, tokens, weight), self._loss), weight)
        self._learner.check_weights()
        return means.result() | {"skipped_in_a_row": float(self._learner.skipped_in_a_row)}

    def _micro_batches(self, batch: CriticBatch, chosen: Sequence[int], tokens: int, weight: float) -> list[_Micro]:
        prompts, responses = [batch.prompts[i] for i in chosen], [batch.responses[i] for i in chosen]
        return [self._micro(batch, chosen, each, tokens, weight) for each in self._learner.passes(prompts, responses)]

    def _micro(self, batch: CriticBatch, chosen: Sequence[int], one: Pass, tokens: int, weight: float) -> _Micro:
        rows = [chosen[i] for i in one.rows]
        pairs = self._learner.tensors([batch.prompts[i] for i in rows], [batch.responses[i] for i in rows])
        marks = None if batch.trained is None else [batch.trained[i] for i in rows]
        return _Micro(
            pairs=pairs,
            mask=pairs.trained(marks, counts=one.counts),
            values=pairs.spread([batch.values[i] for i in rows]),
            returns=pairs.spread([batch.returns[i] for i in rows]),
            tokens=tokens,
            weight=weight,
        )

    def _loss(self, micro: _Micro) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        new_values = self._learner.model(micro.pairs)[:, micro.pairs.predictors]
        mask = micro.mask
        loss, clipped = value_loss(
            new_values,
            micro.values,
            micro.returns,
            mask,
            value_clip_eps=self._config.value_clip_eps,
            denominator=micro.tokens,
        )
        mean = masked_sum(new_values.detach(), mask) / micro.tokens
        return loss * micro.weight, {"loss": loss, "clip_fraction": clipped, "mean": mean}

    def _write(self, folder: Path, weights: dict[str, torch.Tensor]) -> None:
        """Body, head and tokenizer in Hugging Face's file format; a critic can start from the folder."""
        from safetensors.torch import save_file

        parts: dict[str, dict[str, torch.Tensor]] = {"body": {}, "head": {}}
        for name, tensor in weights.items():
            part, _, rest = name.partition(".")
            parts[part][rest] = tensor.detach().cpu()
        self._model.body.save_pretrained(folder, state_dict=parts["body"])  # type: ignore[operator]
        save_file(
            {f"{VALUE_HEAD}.{name}": tensor for name, tensor in parts["head"].items()},
            folder / f"{VALUE_HEAD}.safetensors",
        )
        load_tokenizer(self._config.model).save_pretrained(folder)
