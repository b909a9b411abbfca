"""Sizes of a model that determine its memory."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from quartet.models.reading import reading

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Bytes of a number of each dtype."""


@dataclass(frozen=True, slots=True)
class ModelSize:
    """The sizes of a model that determine its memory."""

    parameters: int
    layers: int
    hidden: int
    intermediate: int
    vocabulary: int
    queries: int
    """Numbers in the queries of a token, of all heads of a layer."""
    keys: int
    """Numbers in the keys of a token, or in its values, of a layer."""
    head: int = 0
    """Parameters of the head, 0 if it shares those of the embeddings."""
    normed_heads: bool = False
    """True if queries and keys have a norm of their own, as in Qwen 3."""

    @classmethod
    def of(cls, config: Any) -> "ModelSize":
        """Sizes from a transformers configuration of a causal language model. Allocates nothing. ConfigError if it
        describes no such model."""
        from transformers import AutoModelForCausalLM

        with reading(f"model: {config.name_or_path} does not describe a language model"), torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
        hidden = int(config.hidden_size)
        heads = int(getattr(config, "num_attention_heads", None) or 1)
        width = int(getattr(config, "head_dim", None) or hidden // heads)
        groups = int(getattr(config, "num_key_value_heads", None) or heads)
        return cls(
            parameters=sum(parameter.numel() for parameter in model.parameters()),
            layers=int(config.num_hidden_layers),
            hidden=hidden,
            intermediate=int(getattr(config, "intermediate_size", None) or 4 * hidden),
            vocabulary=int(config.vocab_size),
            queries=heads * width,
            keys=groups * width,
            head=0 if config.tie_word_embeddings else int(config.vocab_size) * hidden,
            normed_heads=any(name.endswith(".q_norm") for name, _ in model.named_modules()),
        )

    @property
    def body(self) -> "ModelSize":
        """Sizes without the head, as in a reward or value model."""
        return replace(self, parameters=self.parameters - self.head, head=0)

    @property
    def largest(self) -> int:
        """Numbers in the largest weight."""
        return self.hidden * max(self.vocabulary, self.intermediate)

    def layer(self, tokens: int, width: int, *, compiled: bool = False) -> int:
        """Bytes that one layer keeps for the backward pass, with numbers of `width` bytes.

        Plain, a norm keeps its input in float32 and its result, the two norms are followed by linear layers, which
        keep their inputs; attention keeps queries, keys, values and its output, and the gated unit four of its
        states. Compiled, what follows from a kept state by cheap operations is computed again: the layer's input, the
        outputs of its linear layers and of attention remain.
        """
        heads = self.queries + self.keys if self.normed_heads else 0
        attention = 2 * self.queries + 2 * self.keys
        if compiled:
            return tokens * width * (4 * self.hidden + attention + 3 * self.intermediate + heads)
        normed = 2 * self.hidden + heads
        states = 2 * self.hidden + attention + 4 * self.intermediate
        return tokens * ((4 + width) * normed + width * states)

    def passing(self, tokens: int, width: int) -> int:
        """Bytes of a pass without gradients, in which little more than one layer's states are there at a time: most
        in the gated unit, its three and four of the layer's."""
        return tokens * width * (4 * self.hidden + 3 * self.intermediate)

    @property
    def weights(self) -> list[int]:
        """Numbers of each weight in layers as most models have them, embeddings first and the head last; then, as
        one, of all that these do not account for. Of a model whose layers have fewer, that of all."""
        matrices = [self.hidden * wide for wide in (self.queries, self.queries, self.keys, self.keys)]
        matrices += [self.hidden * self.intermediate] * 3
        end = self.vocabulary * self.hidden
        counted = [end, *matrices * self.layers, *[end] * bool(self.head)]
        rest = self.parameters - sum(counted)
        return [*counted, rest] if rest >= 0 else [self.parameters]

    def by_weights(self, width: int, taken: Callable[[int], int]) -> int:
        """Bytes of all weights where one of `size` bytes takes `taken(size)`; what layers do not account for is
        counted as it is."""
        *counted, rest = self.weights
        return sum(taken(count * width) for count in counted) + rest * width

    def adapters(self, rank: int) -> int:
        """Upper bound of the parameters of low-rank adapters on all linear layers."""
        return self.layers * rank * (8 * self.hidden + 3 * (self.hidden + self.intermediate))


def cached(config: Any, dtype: str) -> int | None:
    """Bytes of a token's keys and values where each layer keeps all of them; None where `head_size` has none."""
    text = config.get_text_config()
    if (size := head_size(text)) is None:
        return None
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    return int(2 * text.num_hidden_layers * heads * size * BYTES[dtype])


def head_size(config: Any) -> int | None:
    """Numbers per attention head of a model, from its configuration as transformers reads it. None without such
    heads, or where layers have several sizes."""
    text = config.get_text_config()
    try:
        return int(getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads)
    except (AttributeError, TypeError, ValueError, RuntimeError):
        return None
