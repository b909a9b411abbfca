"""Architectures that Quartet's tests cover; docs/models.md says how."""

TESTED_ARCHITECTURES = frozenset(
    {
        "gemma2",
        "gemma3_text",
        "gpt2",
        "gpt_neox",
        "llama",
        "mistral",
        "olmo2",
        "opt",
        "phi3",
        "qwen2",
        "qwen3",
        "qwen3_moe",
    }
)
"""The `model_type` of their configurations. `quartet check` warns of others and accepts them."""
