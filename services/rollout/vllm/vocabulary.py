"""Keeps vLLM from sampling ids that the tokenizer does not know."""

from typing import Any

import torch
from transformers import AutoTokenizer
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor

from services.common.wire.identity import vocabulary_size


class TokenizerVocabulary(LogitsProcessor):
    """Gives the padding entries of a model's vocabulary probability 0; published models have some (Qwen 2.5: 271)."""

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        self._size = vocabulary_size(AutoTokenizer.from_pretrained(vllm_config.model_config.tokenizer))

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Changes the logits [requests, V] in place."""
        logits[:, self._size :] = -torch.inf
        return logits

    def is_argmax_invariant(self) -> bool:
        """False: the largest logit may belong to a padding entry."""
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Does nothing, since the processor keeps no state."""
