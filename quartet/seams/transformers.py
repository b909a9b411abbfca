"""Private names of transformers: whether a model's attention may be replaced by a registered function, and which one
it has."""

from typing import Any

VERSIONS = ">=5.19,<6"


def takes_attention(model: Any) -> bool:
    """True if every layer of the model attends through a function that AttentionInterface names."""
    return bool(model._supports_attention_backend)


def attention_of(model: Any) -> str:
    """Name of the function through which the model's layers attend, such as `sdpa`."""
    return str(model.config._attn_implementation)
