"""Log-probs of given responses under a frozen model."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from services.common.arrays import Floats, Ints
from services.common.models import load_causal, response_logits
from services.common.numerics import logprobs_of
from services.common.residence import Residence
from services.common.sequences import length_batches, pad_pairs
from services.reference.config import ReferenceConfig


@dataclass(frozen=True, slots=True)
class Question:
    """One response, and the temperature at which its tokens' log-probs are asked."""

    prompt_ids: Ints
    response_ids: Ints
    temperature: float


class FrozenModel:
    """A language model that is never trained, on one device, or its layers over all of several GPUs."""

    def __init__(self, config: ReferenceConfig, device: torch.device, gpus: int = 1) -> None:
        spread = gpus > 1
        self.model = load_causal(config.model, config.dtype, spread=spread).eval().requires_grad_(False)
        self._residence = Residence(self.model, device, config.idle_s, spread=spread)
        self._batch_tokens = config.batch_tokens
        self._device = device

    @torch.inference_mode()
    def logprobs(self, questions: Sequence[Question]) -> list[Floats]:
        """For each question [T]: log pi_ref(y_t | prefix) at its temperature."""
        answers: list[Floats] = [np.empty(0, np.float32)] * len(questions)
        with self._residence.use():
            for temperature in sorted({question.temperature for question in questions}):
                asked = [i for i, question in enumerate(questions) if question.temperature == temperature]
                for i, row in zip(asked, self._at([questions[i] for i in asked], temperature), strict=True):
                    answers[i] = row
        return answers

    def check(self) -> None:
        """Raises when the model cannot answer; for health checks. With offload its weights stay where they are."""
        if self._residence.offloads:
            return self._residence.check()
        one = np.zeros(1, np.int32)
        self.logprobs([Question(one, one, 1.0)])

    def _at(self, questions: Sequence[Question], temperature: float) -> list[Floats]:
        prompts = [question.prompt_ids for question in questions]
        responses = [question.response_ids for question in questions]
        answers: list[Floats] = [np.empty(0, np.float32)] * len(questions)
        for batch in length_batches(prompts, responses, self._batch_tokens):
            pairs = pad_pairs([prompts[i] for i in batch], [responses[i] for i in batch], self._device)
            found = logprobs_of(response_logits(self.model, pairs), pairs.response_ids, temperature)
            for i, row in zip(batch, pairs.unpad(found), strict=True):
                answers[i] = row
        return answers
