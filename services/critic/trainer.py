"""The critic: values, and one PPO batch's worth of training at a time."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from services.common.adapters import add_adapters
from services.common.arrays import Floats, Ints
from services.common.learner import Learner
from services.common.minibatches import Means, minibatches
from services.common.models import VALUE_HEAD, ScalarModel, load_tokenizer, load_value, max_length
from services.common.numerics import masked_sum, value_loss
from services.common.ranks import Ranks
from services.common.sequences import PairTensors
from services.common.shards import Part
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
    pairs: PairTensors
    values: torch.Tensor
    returns: torch.Tensor
    tokens: int


class CriticTrainer:
    """A value model under DeepSpeed, or one rank's share of it. Calls must not overlap; all ranks get all calls."""

    def __init__(self, config: CriticConfig, ranks: Ranks | None = None) -> None:
        self._config = config
        torch.manual_seed(config.seed)
        model = load_value(config.model, config.dtype, config.attn_implementation, packing=config.packing)
        add_adapters(model.body, config.lora)
        self._learner = Learner(model, config, ranks)
        self._model: ScalarModel = self._learner.module  # type: ignore[assignment]

    def limits(self) -> tuple[int, int]:
        """Entries of the vocabulary, and the longest sequence in tokens."""
        body = self._model.body
        return int(body.config.vocab_size), max_length(body)  # type: ignore[union-attr, arg-type]

    @torch.no_grad()
    def values(self, prompts: Sequence[Ints], responses: Sequence[Ints]) -> list[Floats]:
        """For each pair [T]: V(prefix) before each response token."""
        found: dict[int, Floats] = {}
        self._model.eval()
        for part in self._learner.parts(prompts, responses):
            rows = part.rows
            pairs = self._learner.tensors([prompts[i] for i in rows], [responses[i] for i in rows])
            values = self._model.values(pairs)
            if part.counts:
                found |= dict(zip(rows, pairs.unpad(values), strict=True))
        return self._learner.shared(found, [len(response) for response in responses])

    def train(self, batch: CriticBatch, *, epochs: int, minibatch_size: int, seed: int) -> dict[str, float]:
        """Trains on one batch and returns the means over its optimizer steps."""
        means = Means()
        for chosen in minibatches(len(batch.prompts), epochs=epochs, size=minibatch_size, seed=seed):
            means.add(self._learner.step(self._micro_batches(batch, chosen), self._loss))
        return means.result()

    def _micro_batches(self, batch: CriticBatch, chosen: Sequence[int]) -> list[_Micro]:
        prompts, responses = [batch.prompts[i] for i in chosen], [batch.responses[i] for i in chosen]
        tokens = sum(len(response) for response in responses)
        return [self._micro(batch, chosen, part, tokens) for part in self._learner.parts(prompts, responses)]

    def _micro(self, batch: CriticBatch, chosen: Sequence[int], part: Part, tokens: int) -> _Micro:
        rows = [chosen[i] for i in part.rows]
        pairs = self._learner.tensors([batch.prompts[i] for i in rows], [batch.responses[i] for i in rows])
        return _Micro(
            pairs=pairs if part.counts else pairs.muted(),
            values=pairs.spread([batch.values[i] for i in rows]),
            returns=pairs.spread([batch.returns[i] for i in rows]),
            tokens=tokens,
        )

    def _loss(self, micro: _Micro) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        new_values = self._learner.model(micro.pairs)[:, micro.pairs.predictors]
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
        """Writes body, head and tokenizer in Hugging Face's file format; a critic can start from the folder."""
        return self._learner.save(folder, self._write)

    def take_snapshot(self, folder: str, step: int, copies: bool = True) -> None:
        """Copies the state after `step` for `write_snapshot`. See Learner.take_snapshot."""
        self._learner.take_snapshot(Path(folder), step, copies=copies)

    def write_snapshot(self) -> None:
        """Brings it to disk; may run beside any other call."""
        self._learner.write_snapshot()

    def restore(self, folder: str) -> int:
        """Goes on from a snapshot, before any training; its step. See Learner.restore."""
        return self._learner.restore(Path(folder))

    def _write(self, folder: Path, weights: dict[str, torch.Tensor]) -> None:
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
