"""Log-probs of given responses under a frozen model."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch

from quartet.columns import Columns
from quartet.models.compiled import compile_layers
from quartet.models.distribution import Distribution
from quartet.models.frozen_passes import FrozenPasses
from quartet.models.loading import load_causal, max_length
from quartet.models.offload import Residence
from quartet.models.sequences import PairTensors
from quartet.serving.token_call import Asked, joined
from quartet.wire.codec import Floats
from services.reference.config import ReferenceConfig


class Frozen(Protocol):
    """A model that is never trained, as the replica uses it."""

    vocab_size: int
    """Entries of its vocabulary, padding included."""
    max_length: int
    """Longest sequence that it takes, in tokens."""

    def logprobs(self, trajectories: Columns, distribution: Distribution) -> Floats:
        """The log-probs of the sampled tokens, [M]."""

    def check(self) -> None:
        """Raises if the model cannot compute; for health checks."""


class Question(NamedTuple):
    """A trajectory, and the distribution for the log-probs of its sampled tokens."""

    asked: Asked
    distribution: Distribution


def answers(frozen: Frozen, questions: Sequence[Question]) -> list[Floats]:
    """The log-probs of the sampled tokens of each question's trajectory; those with the same distribution are
    computed together."""
    rows: list[Floats] = [np.empty(0, np.float32)] * len(questions)
    for distribution in dict.fromkeys(question.distribution for question in questions):
        places = [i for i, question in enumerate(questions) if question.distribution == distribution]
        trajectories = joined([questions[i].asked for i in places])
        logprobs = frozen.logprobs(trajectories, distribution)
        for i, row in zip(places, trajectories.with_sampled(logprobs=logprobs).rows("logprobs"), strict=True):
            rows[i] = row
    return rows


class FrozenModel:
    """A language model that is never trained, on one device or with its layers divided over several GPUs."""

    def __init__(self, config: ReferenceConfig, device: torch.device, gpus: int = 1) -> None:
        spread = gpus > 1
        self.model = load_causal(config.model, config.dtype, packing=config.packing, spread=spread)
        self.model.eval().requires_grad_(False)
        if config.compile_layers:
            compile_layers(self.model)
        self.vocab_size = int(self.model.config.get_text_config().vocab_size)
        self.max_length = max_length(self.model.config)
        self._residence = Residence(self.model, device, config.idle_s, spread=spread)
        self._passes = FrozenPasses(config.batch_tokens, device, packing=config.packing, last=False)

    @torch.inference_mode()
    def logprobs(self, trajectories: Columns, distribution: Distribution) -> Floats:
        """The log-probs log pi_ref(y_t | prefix) of the sampled tokens, [M]."""
        apart = trajectories.apart()

        def compute(pairs: PairTensors) -> list[Floats]:
            return pairs.unpad(distribution.asked_of(self.model, pairs)[0])

        with self._residence.use():
            rows = self._passes.run(compute, apart)
        flat: Floats = np.concatenate([np.empty(0, np.float32), *rows])
        return flat[apart.response_mask]

    def check(self) -> None:
        """Raises if the model cannot compute; for health checks. Does not move offloaded weights."""
        if self._residence.offloads:
            return self._residence.check()
        one = np.zeros(1, np.int32)
        self.logprobs(Columns.of_pairs([one], [one]), Distribution())
