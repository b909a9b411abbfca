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
        self._taken: list[Columns] = []

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

    def take(self, part: Columns, index: int) -> None:
        """Keeps a part of the next batch, the one with this index, for `train_taken`."""
        self._taken[index:] = [part]

    def train_taken(self, parts: int, *, epochs: int, minibatch_size: int, seed: int) -> dict[str, float]:
        """Joins the first `parts` parts that were taken, and trains on them as `train` does."""
        taken, self._taken = self._taken[:parts], []
        return self.train(Columns.concatenate(taken), epochs=epochs, minibatch_size=minibatch_size, seed=seed)

    def train(self, batch: Columns, *, epochs: int, minibatch_size: int, seed: int) -> dict[str, float]:
        """Trains on one batch by Value, as Trainer.train does."""
        return self._trainer.train(batch, Value(self._config.value_clip_eps), Schedule(epochs, minibatch_size, seed))

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
