"""The critic: values, and one PPO batch's worth of training at a time."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from services.common.arrays import Floats, Ints
from services.common.learner import Learner, Ranks
from services.common.minibatches import Means, minibatches
from services.common.models import ScalarModel, load_body
from services.common.numerics import masked_sum, value_loss
from services.common.sequences import PaddedPairs, length_batches, pad_pairs, pad_rows
from services.critic.config import CriticConfig


@dataclass(frozen=True, slots=True)
class CriticBatch:
    """One PPO batch of B responses, as the critic trains on it."""

    prompts: Sequence[Ints]
    """B times [P]"""
    responses: Sequence[Ints]
    """B times [T]"""
    values: Sequence[Floats]
    """B times [T], from before the update"""
    returns: Sequence[Floats]
    """B times [T]"""


@dataclass(frozen=True, slots=True)
class _Micro:
    pairs: PaddedPairs
    values: torch.Tensor
    returns: torch.Tensor
    tokens: int


class CriticTrainer:
    """A value model under DeepSpeed. Calls must not overlap."""

    def __init__(self, config: CriticConfig, ranks: Ranks | None = None) -> None:
        self._config = config
        torch.manual_seed(config.seed)
        self._learner = Learner(ScalarModel(load_body(config.model, config.dtype), bias=True), config, ranks)
        self._model: ScalarModel = self._learner.module  # type: ignore[assignment]

    @property
    def body(self) -> torch.nn.Module:
        """The transformer under the value head."""
        return self._model.body

    @torch.inference_mode()
    def values(self, prompts: Sequence[Ints], responses: Sequence[Ints]) -> list[Floats]:
        """For each pair [T]: V(prefix) before each response token."""
        answers: list[Floats] = [np.empty(0, np.float32)] * len(prompts)
        self._model.eval()
        for batch in length_batches(prompts, responses, self._config.micro_batch_tokens):
            pairs = pad_pairs([prompts[i] for i in batch], [responses[i] for i in batch], self._learner.device)
            for i, row in zip(batch, pairs.unpad(self._model.values(pairs)), strict=True):
                answers[i] = row
        return answers

    def train(self, batch: CriticBatch, *, epochs: int, minibatch_size: int, seed: int) -> dict[str, float]:
        """Trains on one batch and returns the means over its optimizer steps."""
        means = Means()
        for chosen in minibatches(len(batch.prompts), epochs=epochs, size=minibatch_size, seed=seed):
            means.add(self._learner.step(list(self._micro_batches(batch, chosen)), self._loss))
        return means.result()

    def _micro_batches(self, batch: CriticBatch, chosen: Sequence[int]) -> Iterator[_Micro]:
        prompts, responses = [batch.prompts[i] for i in chosen], [batch.responses[i] for i in chosen]
        tokens = sum(len(response) for response in responses)
        for part in length_batches(prompts, responses, self._config.micro_batch_tokens):
            device = self._learner.device
            pairs = pad_pairs([prompts[i] for i in part], [responses[i] for i in part], device)
            yield _Micro(
                pairs=pairs,
                values=pad_rows([batch.values[chosen[i]] for i in part], pairs.width, device),
                returns=pad_rows([batch.returns[chosen[i]] for i in part], pairs.width, device),
                tokens=tokens,
            )

    def _loss(self, micro: _Micro) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        new_values = self._learner.model(micro.pairs)[:, -micro.pairs.width - 1 : -1]
        mask = micro.pairs.action_mask
        loss, clipped = value_loss(
            new_values,
            micro.values,
            micro.returns,
            mask,
            value_clip_eps=self._config.value_clip_eps,
            denominator=micro.tokens,
        )
        mean = masked_sum(new_values.detach(), mask) / micro.tokens
        return loss, {"loss": loss, "clip_fraction": clipped, "mean": mean}

    def save(self, folder: str) -> Path:
        """Writes body and head in Hugging Face's file format."""
        return self._learner.save(folder, self._write)

    def _write(self, folder: Path) -> None:
        from safetensors.torch import save_file

        self._model.body.save_pretrained(folder)  # type: ignore[operator]
        head = {f"value_head.{name}": tensor.detach().cpu() for name, tensor in self._model.head.state_dict().items()}
        save_file(head, folder / "value_head.safetensors")
