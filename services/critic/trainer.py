"""The critic's model on one rank: values, and training on one PPO batch at a time."""

from pathlib import Path

import torch

from quartet.columns import Columns
from quartet.learner.learner import RankLearner, Snapshots
from quartet.learner.lora import add_adapters
from quartet.learner.trainer import Schedule, Trainer
from quartet.models.loading import load_tokenizer, max_length
from quartet.models.scalar import VALUE_HEAD, ScalarModel, load_value, values_of
from quartet.objectives.value import Value
from quartet.ranks.ranks import Ranks
from quartet.wire.codec import Floats
from services.critic.config import CriticConfig


class CriticTrainer:
    """A value model under DeepSpeed, or one rank's share of it. Calls must not overlap, and all ranks get all
    calls."""

    def __init__(self, config: CriticConfig, ranks: Ranks | None = None) -> None:
        self._config = config
        torch.manual_seed(config.seed)
        model = load_value(config.model, config.dtype, config.attn_implementation, packing=config.packing)
        add_adapters(model.body, config.lora)
        self._learner = RankLearner(model, config, ranks)
        self._trainer = Trainer(self._learner)
        self._model: ScalarModel = self._learner.module  # type: ignore[assignment]
        self.snapshots = Snapshots(self._learner, self._write, kind="critic", exported=False)

    @property
    def parts(self) -> tuple[object, ...]:
        """The objects whose methods a rank runs: this trainer, and its snapshots."""
        return self, self.snapshots

    def limits(self) -> tuple[int, int]:
        """Entries of the vocabulary, and the longest sequence in tokens."""
        body = self._model.body
        return int(body.config.vocab_size), max_length(body)  # type: ignore[union-attr, arg-type]

    def values(self, trajectories: Columns) -> Floats:
        """The values V(prefix) before each sampled token, [M]."""
        values: Floats = self._trainer.evaluate(trajectories, values_of)
        return values

    def train(self, *parts: Columns, epochs: int, minibatch_size: int, seed: int) -> dict[str, float]:
        """Trains by Value on the batch that these parts are, as Trainer.train does."""
        batch, objective = Columns.concatenate(parts), Value(self._config.value_clip_eps)
        return self._trainer.train(batch, objective, Schedule(epochs, minibatch_size, seed))

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
