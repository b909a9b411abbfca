"""The distribution that tokens are sampled from, the same in engine, reference and learner."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, GenerationConfig

from services.common.models.numerics import by_time, check_logits, widen
from services.common.models.sequences import PairTensors


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
    """Fewest tokens of a response: end tokens have probability 0 before this many."""
    end_ids: tuple[int, ...] = ()
    """Tokens that end a response."""

    def logprobs(self, logits: Tensor, pairs: PairTensors) -> Tensor:
        """[R, C]: log-probs of the response tokens, at least in float32, from the `logits` [R, C, V] before them."""
        return self._apply(lambda x, kept, ids: _chosen(kept.log_softmax(-1), x, kept, ids), logits, pairs)

    def with_entropy(self, logits: Tensor, pairs: PairTensors, *, trained: bool) -> tuple[Tensor, Tensor]:
        """[R, C] twice: `logprobs`, and Shannon's entropy of the whole distribution, from one softmax. The entropy
        has a gradient only if `trained`."""

        def both(x: Tensor, kept: Tensor, ids: Tensor) -> Tensor:
            every = kept.log_softmax(-1)
            whole = every if trained else every.detach()
            entropy = -(whole.exp() * whole.clamp(min=torch.finfo(whole.dtype).min)).sum(-1)
            return torch.stack([_chosen(every, x, kept, ids), entropy], dim=-1)

        logprobs, entropy = self._apply(both, logits, pairs).unbind(-1)
        return logprobs, entropy

    def _apply(self, function: Callable[..., Tensor], logits: Tensor, pairs: PairTensors) -> Tensor:
        check_logits(logits, self.temperature)
        ends = torch.tensor(self.end_ids, device=logits.device, dtype=torch.long)

        def piece(logits: Tensor, ids: Tensor, steps: Tensor) -> Tensor:
            x = widen(logits) / self.temperature
            kept = x[..., : self.vocabulary]
            if self.min_new_tokens and self.end_ids:
                early = (steps < self.min_new_tokens).unsqueeze(-1)
                bias = torch.zeros_like(kept[..., :1]).masked_fill(early, -torch.inf)
                kept = kept.index_add(-1, ends, bias.expand(*bias.shape[:-1], len(ends)))
            return function(x, kept, ids)

        return by_time(piece, logits, pairs.response_ids, pairs.steps.expand_as(pairs.response_ids))


def _chosen(every: Tensor, x: Tensor, kept: Tensor, ids: Tensor) -> Tensor:
    """Log-probs at `ids` [R, t], taken from `every` token's; for a token of probability 0 its logit in `x` minus the
    normaliser."""
    places = ids.unsqueeze(-1)
    if x is kept:
        return every.gather(-1, places).squeeze(-1)
    size = kept.shape[-1]
    logprobs = every.gather(-1, places.clamp(max=size - 1))
    outside = (places >= size) | logprobs.isneginf()
    if bool(outside.any()):
        logprobs = torch.where(outside, x.gather(-1, places) - kept.logsumexp(-1, keepdim=True), logprobs)
    return logprobs.squeeze(-1)


def end_ids(folder: str, tokenizer: Any) -> tuple[int, ...]:
    """The tokens that end a text of the model in `folder`: its generation configuration's, and its tokenizer's."""
    try:
        named = GenerationConfig.from_pretrained(folder).eos_token_id
    except OSError:
        named = getattr(AutoConfig.from_pretrained(folder), "eos_token_id", None)
    several = named if isinstance(named, list) else [named]
    return tuple(sorted({int(token) for token in (*several, tokenizer.eos_token_id) if token is not None}))
