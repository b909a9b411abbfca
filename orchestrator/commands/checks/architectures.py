"""Checks that the architectures of models allow what a file asks of them."""

import functools
from collections.abc import Iterator

from orchestrator.commands.checks.models import load_model_config, models, with_models
from orchestrator.deployment.file import ServicesFile
from quartet.config.base import ConfigError
from quartet.models.architectures import TESTED_ARCHITECTURES
from quartet.models.attention import packed
from quartet.models.loading import max_length, native_length, shape_of_causal
from quartet.models.size import head_size
from services.rollout.config import RolloutConfig
from services.rollout.engines import kind_of


def untested(deployment: ServicesFile) -> Iterator[str]:
    """Models of architectures that the tests do not cover."""
    for field, path in models(deployment):
        kind = getattr(load_model_config(path), "model_type", None)
        if kind not in TESTED_ARCHITECTURES:
            yield (
                f"{field}: {path} is of the architecture {kind}, which Quartet was not tried with; see docs/models.md"
            )


def too_long_for_model(section: RolloutConfig, name: str, told: int | None = None) -> Iterator[str]:
    """A length beyond the model's positions, with which vLLM would not start, unless RoPE scaling stretches them or
    the length is `told` elsewhere; and one with which vLLM would rotate all sequences as transformers rotates only
    those of a pass that is as long."""
    if section.max_length is None:
        return  # it follows the model
    model = load_model_config(section.model)
    rope = getattr(model, "rope_parameters", None) or {}
    kind = rope.get("rope_type", "default")
    field = f"applications.{name}.args.max_length: {section.max_length}, but {section.model}"
    beyond = model is not None and kind == "default" and section.max_length > max_length(model)
    if beyond and section.max_length != told:
        yield f"{field} takes {max_length(model)} tokens (its max_position_embeddings)"
    native = native_length(model)
    if kind in packed.BY_LENGTH and section.max_length > native:
        yield (
            f"{field} rotates longer sequences than {native} tokens by other frequencies (rope_type {kind}), which "
            f"the engine would use for all sequences and the learner only for long ones; set it to {native} at most"
        )


def unfit_heads(section: RolloutConfig, name: str) -> Iterator[str]:
    """A size of attention heads with which the engine ends on a CPU once it computes."""
    sizes = kind_of(section).cpu_head_sizes
    model = load_model_config(section.model)
    # Multi-head latent attention has kernels of its own.
    if sizes is None or model is None or getattr(model, "kv_lora_rank", None):
        return
    size = head_size(model)
    if size is not None and size not in sizes:
        yield (
            f"applications.{name}.args.model: attention heads of {section.model} have {size} numbers, which "
            f"{section.engine} has no kernel for on a CPU; its sizes there are {', '.join(map(str, sizes))}"
        )


def unpackable(deployment: ServicesFile) -> Iterator[str]:
    """Models, but for the engine's, that would compute something else if they were packed."""
    network = functools.cache(lambda path: shape_of_causal(path, "float32"))
    for where, section in with_models(deployment):
        if isinstance(section, RolloutConfig) or not section.packing or load_model_config(section.model) is None:
            continue
        try:
            model = network(section.model)
        except ConfigError as error:
            yield f"{where}.{error}"
            continue
        if problem := packed.problem(model, section.model, getattr(section, "attn_implementation", "sdpa")):
            yield f"{where}.packing: {problem}"
