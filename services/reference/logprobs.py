"""Log-probs of given responses under a frozen model."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from services.common.arrays import Floats, Ints
from services.common.models import load_causal, response_logits
from services.common.numerics import logprobs_of
from services.common.sequences import length_batches, pad_pairs


@dataclass(frozen=True, slots=True)
class Question:
    """One response, and the temperature at which its tokens' log-probs are asked."""

    prompt_ids: Ints
    response_ids: Ints
    temperature: float


class FrozenModel:
    """A language model that is never trained."""

    def __init__(self, path: str, dtype: str, batch_tokens: int, device: torch.device) -> None:
        self.model = load_causal(path, dtype).eval().requires_grad_(False).to(device)
        self._batch_tokens = batch_tokens
        self._device = device

    @torch.inference_mode()
    def logprobs(self, questions: Sequence[Question]) -> list[Floats]:
        """For each question [T]: log pi_ref(y_t | prefix) at its temperature."""
        answers: list[Floats] = [np.empty(0, np.float32)] * len(questions)
        for temperature in sorted({question.temperature for question in questions}):
            asked = [i for i, question in enumerate(questions) if question.temperature == temperature]
            prompts = [questions[i].prompt_ids for i in asked]
            responses = [questions[i].response_ids for i in asked]
            for batch in length_batches(prompts, responses, self._batch_tokens):
                pairs = pad_pairs([prompts[i] for i in batch], [responses[i] for i in batch], self._device)
                found = logprobs_of(response_logits(self.model, pairs), pairs.response_ids, temperature)
                for i, row in zip(batch, pairs.unpad(found), strict=True):
                    answers[asked[i]] = row
        return answers
