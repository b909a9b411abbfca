"""A sequence-classification model as a scorer."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from protos import reward_pb2 as pb
from quartet.columns import Columns
from quartet.config.base import ConfigError
from quartet.models.compiled import compile_layers
from quartet.models.frozen_passes import FrozenPasses
from quartet.models.loading import load_config, load_tokenizer, max_length
from quartet.models.offload import Residence
from quartet.models.scalar import load_scalar, scores_of
from quartet.wire.identity import folder_name, model_hash, tokenizer_hash
from quartet.wire.pairs import Pair
from services.reward.config import ModelScorerConfig
from services.reward.scorers.scorer import EncodedPair, Result, results


class ModelScorer:
    """Scores by a sequence-classification model's output at the response's last token."""

    def __init__(
        self, config: ModelScorerConfig, tokenizer: Any, device: torch.device, where: str = "reward.args.scorer"
    ) -> None:
        if tokenizer_hash(load_tokenizer(config.model)) != tokenizer_hash(tokenizer):
            raise ConfigError(
                f"{where}.model: the tokenizer of {config.model} is not the service's tokenizer, "
                "so its token ids mean something else"
            )
        labels = load_config(config.model).num_labels
        if labels != 1:
            raise ConfigError(f"{where}.model: {config.model} has num_labels {labels}; it must have 1")
        self._model = load_scalar(config.model, config.dtype, packing=config.packing).eval().requires_grad_(False)
        if config.compile_layers:
            compile_layers(self._model)
        self._residence = Residence(self._model, device, config.idle_s)
        extra = self._model.config
        self._mean = float(getattr(extra, "reward_mean", 0.0)) if config.normalise else 0.0
        self._std = float(getattr(extra, "reward_std", 1.0)) if config.normalise else 1.0
        self.batch_tokens = config.batch_tokens
        self._passes = FrozenPasses(config.batch_tokens, device, packing=config.packing, last=True)
        self.max_length = max_length(self._model.config)
        self.texts = False
        self.passes = 1
        self.batch_s: float | None = None
        self.patience_s: float | None = None
        self.names: tuple[str, ...] = ()
        self.vocab_size: int | None = int(extra.get_text_config().vocab_size)  # type: ignore[union-attr, operator]
        self.identity = pb.ScorerIdentity(
            name=f"model:{folder_name(config.model)}", model_hash=model_hash(config.model)
        )

    @torch.inference_mode()
    def score(self, pairs: Sequence[EncodedPair]) -> list[Result]:
        """The normalised scores."""
        trajectories = Columns.of_pairs([pair.prompt_ids for pair in pairs], [pair.response_ids for pair in pairs])
        with self._residence.use():
            # The output at the last token of each pair, an array of one number.
            rows = self._passes.run(
                lambda tensors: scores_of(self._model, tensors).cpu().numpy()[:, None], trajectories
            )
        scores = np.asarray([row[-1:] for row in rows], np.float32)
        return results((scores - self._mean) / self._std, self.identity.name)

    def check(self) -> None:
        """Runs a forward pass over one pair; with offload it checks the device without moving the weights."""
        if self._residence.offloads:
            return self._residence.check()
        one = np.zeros(1, np.int32)
        self.score([EncodedPair(one, one, Pair("", ""))])
