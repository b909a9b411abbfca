"""Log-probs of given responses under a frozen model."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from quartet.models.compiled import compile_layers
from quartet.models.distribution import Distribution
from quartet.models.frozen_passes import FrozenPasses
from quartet.models.loading import load_causal, max_length
from quartet.models.offload import Residence
from quartet.models.sequences import PairTensors
from quartet.wire.codec import Floats, Ints
from services.reference.config import ReferenceConfig


@dataclass(frozen=True, slots=True)
class Question:
    """A prompt and its response, and the distribution for the log-probs of the response's tokens."""

    prompt_ids: Ints
    response_ids: Ints
    distribution: Distribution
    turn_steps: Ints | None = None
    """The index of each token in its sampled segment, [T]; None: in the response, which is one segment."""


class Frozen(Protocol):
    """A model that is never trained, as the replica uses it."""

    vocab_size: int
    """Entries of its vocabulary, padding included."""
    max_length: int
    """Longest pair that it takes, in tokens."""

    def logprobs(self, questions: Sequence[Question]) -> list[Floats]:
        """The log-probs of each response's tokens, [T] for each question."""

    def check(self) -> None:
        """Raises if the model cannot compute; for health checks."""


class FrozenModel:
    """A language model that is never trained, on one device or with its layers divided over several GPUs."""

    def __init__(self, config: ReferenceConfig, device: torch.device, gpus: int = 1) -> None:
        spread = gpus > 1
        self.model = load_causal(config.model, config.dtype, packing=config.packing, spread=spread)
        self.model.eval().requires_grad_(False)
        if config.compile_layers:
            compile_layers(self.model)
        self.vocab_size = int(self.model.config.get_text_config().vocab_size)
        self.max_length = max_length(self.model)
        self._residence = Residence(self.model, device, config.idle_s, spread=spread)
        self._passes = FrozenPasses(config.batch_tokens, device, packing=config.packing, last=False)

    @torch.inference_mode()
    def logprobs(self, questions: Sequence[Question]) -> list[Floats]:
        """The log-probs log pi_ref(y_t | prefix) in each question's distribution, [T] for each question."""
        answers: list[Floats] = [np.empty(0, np.float32)] * len(questions)
        with self._residence.use():
            for distribution in dict.fromkeys(question.distribution for question in questions):

                def compute(pairs: PairTensors, distribution: Distribution = distribution) -> list[Floats]:
                    return pairs.unpad(distribution.asked_of(self.model, pairs)[0])

                places = [i for i, question in enumerate(questions) if question.distribution == distribution]
                asked = [questions[i] for i in places]
                rows = self._passes.run(compute, asked, [question.turn_steps for question in asked])
                for i, row in zip(places, rows, strict=True):
                    answers[i] = row
        return answers

    def check(self) -> None:
        """Raises if the model cannot compute; for health checks. Does not move offloaded weights."""
        if self._residence.offloads:
            return self._residence.check()
        one = np.zeros(1, np.int32)
        self.logprobs([Question(one, one, Distribution())])
