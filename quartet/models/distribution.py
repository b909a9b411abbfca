"""The distribution that tokens are sampled from, the same in engine, reference and learner."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig
from transformers.utils import GENERATION_CONFIG_NAME

from quartet.models.head import Asked
from quartet.models.loading import load_config
from quartet.models.numerics import by_time, check_logits, shannon, tempered
from quartet.models.reading import reading
from quartet.models.sequences import PairTensors
from quartet.models.tiles import Softmax, filled


@dataclass(frozen=True, slots=True)
class Distribution:
    """Softmax of logits / temperature, with probability 0 for tokens that are never sampled.

    The log-prob of such a token, if it is asked for, is its logit minus the normaliser of the others, which is
    finite.
    """

    temperature: float = 1.0
    vocabulary: int | None = None
    """Ids from here on are padding: entries of the model that are not tokens of its tokenizer. None: no padding."""
    min_new_tokens: int = 0
    """Fewest tokens of a response: end tokens have probability 0 before this many, in each sampled segment."""
    end_ids: tuple[int, ...] = ()
    """Tokens that end a response."""

    def asked_of(self, model: Any, pairs: PairTensors, *, entropy: bool = False) -> tuple[Tensor, Tensor | None]:
        """[R, C], the log-probs of the response tokens under `model`, which `load_causal` loaded; and Shannon's
        entropy of the whole distribution there, [R, C], or None if it is not asked for. Both at least in float32.

        Computed in the model's head without logits (`linear_logprobs`), or from the logits if it has another head.
        """
        early = _steps(pairs) < self.min_new_tokens if self.min_new_tokens and self.end_ids else None
        softmax = Softmax(self.temperature, size=self.vocabulary, ends=self.end_ids)
        asked = Asked(
            softmax,
            pairs.response_ids,
            None if early is None else early.expand_as(pairs.response_ids),
            entropy,
            repeated=pairs.repeated,
        )
        answer = model(**pairs.inputs, use_cache=False, logits_to_keep=pairs.predictors, asked=asked)
        if isinstance(answer, Tensor):
            return answer[..., 0], answer[..., 1] if entropy else None
        if entropy:
            return self.with_entropy(answer.logits, pairs)
        return self.logprobs(answer.logits, pairs), None

    def logprobs(self, logits: Tensor, pairs: PairTensors) -> Tensor:
        """[R, C]: log-probs of the response tokens, at least in float32, from the `logits` [R, C, V] before them."""
        return self._apply(logits, pairs, entropy=False)

    def with_entropy(self, logits: Tensor, pairs: PairTensors) -> tuple[Tensor, Tensor]:
        """[R, C] twice: `logprobs`, and Shannon's entropy of the whole distribution, from one softmax."""
        logprobs, entropy = self._apply(logits, pairs, entropy=True).unbind(-1)
        return logprobs, entropy

    def _apply(self, logits: Tensor, pairs: PairTensors, *, entropy: bool) -> Tensor:
        """The log-probs of the response tokens [R, C], piece by piece; with the entropy both [R, C, 2]."""
        check_logits(logits, self.temperature)
        size = logits.shape[-1] if self.vocabulary is None else min(self.vocabulary, logits.shape[-1])
        masked = tuple(token for token in self.end_ids if token < size) if self.min_new_tokens else ()
        ends = filled(masked, logits.device) if masked else None
        whole = size == logits.shape[-1] and ends is None
        always = next((token for token in range(size) if token not in masked), 0)

        def piece(logits: Tensor, ids: Tensor, steps: Tensor) -> Tensor:
            kept, never = tempered(logits[..., :size], self.temperature), ids >= size
            if ends is not None:
                early = (steps < self.min_new_tokens).unsqueeze(-1)
                never = never | (early & (ids.unsqueeze(-1) == ends)).any(-1)
                bias = torch.zeros_like(kept[..., :1]).masked_fill(early, -torch.inf)
                kept = kept.index_add(-1, ends, bias.expand(*bias.shape[:-1], len(ends)))
            every = kept.log_softmax(-1)
            other = shannon(every) if entropy else None
            # A token without probability: what another one has, plus the difference of their logits. A branch for
            # batches that hold such a token would have to wait for the device.
            possible = ids if whole else ids.masked_fill(never, always)
            chosen = every.gather(-1, possible.unsqueeze(-1)).squeeze(-1)
            if not whole:
                both = tempered(logits.gather(-1, torch.stack([ids, possible], dim=-1)), self.temperature)
                chosen = torch.where(never, chosen + both[..., 0] - both[..., 1], chosen)
            return chosen if other is None else torch.stack([chosen, other], dim=-1)

        return by_time(piece, logits, pairs.response_ids, _steps(pairs).expand_as(pairs.response_ids))


def _steps(pairs: PairTensors) -> Tensor:
    """[R or 1, C] the index of each token among those that the engine sampled in one go."""
    return pairs.steps if pairs.turn_steps is None else pairs.turn_steps


def end_ids(folder: str, tokenizer: Any) -> tuple[int, ...]:
    """The tokens that end a text of the model in `folder`: its generation configuration's, and its tokenizer's.

    Raises:
        ConfigError: the folder's configuration or generation configuration cannot be read.
    """
    file = Path(folder) / GENERATION_CONFIG_NAME
    with reading(f"model: {file} names no tokens that end a text"):
        config = GenerationConfig.from_pretrained(folder) if file.exists() else load_config(folder)
        named = getattr(config, "eos_token_id", None)
        several = named if isinstance(named, list) else [named]
        return tuple(sorted({int(token) for token in (*several, tokenizer.eos_token_id) if token is not None}))
