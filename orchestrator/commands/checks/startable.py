"""Checks that the services of a file can start: what its replicas would raise themselves, a minute later.

Each reason is a line. What only the machine of a replica can tell is left to its start.
"""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from orchestrator.commands.checks.architectures import too_long_for_model, unfit_heads, unpackable
from orchestrator.commands.checks.fitting import gpus_of_replicas
from orchestrator.commands.checks.models import (
    broken_models,
    broken_tokenizers,
    load_model_config,
    missing_functions,
    models,
    unlike_tokenizers,
)
from orchestrator.deployment.file import Deployment, ServicesFile
from orchestrator.deployment.memory_sums import MemorySums
from orchestrator.deployment.recomputation import decided
from quartet.config.base import MIB, ConfigError
from quartet.config.learner import LearnerConfig, LoraConfig
from quartet.folders import unusable
from quartet.learner.lora import adapters_for, add_adapters
from quartet.models.device import VISIBLE
from quartet.models.loading import native_length, shape_of_causal
from quartet.models.size import cached
from services.critic.config import CriticConfig
from services.reference.config import ReferenceConfig
from services.rollout.config import RolloutConfig
from services.rollout.engines import unknown_parsers

CPU_BLOCK = 32
"""Tokens of a block of vLLM's KV cache on a CPU (services/rollout/vllm/arguments.py)."""
OWN_RESOURCES = ("node:127.0.0.1", "node:__internal_head__")
"""Custom resources that Ray itself gives to a head of `quartet up`, 1 of each; one with GPUs has another, that begins
with ACCELERATOR and is named after their kind."""
ACCELERATOR = "accelerator_type:"


def unstartable(deployment: ServicesFile, told: int | None = None) -> Iterator[str]:
    """Reasons for which a service of the file would not start on a machine like this one.

    Args:
        deployment: the file.
        told: a length of sequences, in tokens, that the caller compares with the models itself.
    """
    if isinstance(deployment, Deployment):
        try:
            yield from sums_of(deployment).problems()
        except ConfigError as error:
            yield str(error)
    yield from missing_functions(deployment)
    yield from broken_models(deployment)
    yield from broken_tokenizers(deployment)
    yield from unlike_tokenizers(deployment)
    yield from unpackable(deployment)
    for placed in deployment.placed():
        name, section, gpus = placed.name, placed.section, placed.gpus
        where = f"applications.{name}"
        if isinstance(section, RolloutConfig):
            yield from too_long_for_model(section, name, told)
            if gpus_of_replicas(deployment) == 0:
                yield from unfit_heads(section, name)
            yield from _engine(deployment, section, f"{where}.args", gpus)
            if section.adapters and load_model_config(section.model) is not None:
                pushed = partial(adapters_for, section.model, section.dtype, section.adapters)
                yield from _problem(pushed, f"{where}.args.adapters")
            for field, known in unknown_parsers(section).items():
                yield f"{where}.args.{field}: should be one of {', '.join(known)}; got {getattr(section, field)!r}"
        if isinstance(section, ReferenceConfig) and section.offload and gpus > 1:
            yield f"{where}.args.offload: for a model on one GPU; with num_gpus {gpus:g} set it to false"
        if isinstance(section, CriticConfig):
            yield from unfit_learner(deployment.critics()[name], f"{where}.args")
            if problem := unusable(Path(section.root)):
                yield f"{where}.args.root: {problem}"


def sums_of(deployment: Deployment) -> MemorySums:
    """The memory that the file's processes need. ConfigError if a folder describes no language model."""
    return MemorySums.of(deployment, {path: load_model_config(path) for _, path in models(deployment)})


def decided_here(deployment: Deployment) -> Deployment:
    """The file with what it leaves to the sums of memory decided. ConfigError if a folder describes no language
    model."""
    return decided(deployment, {path: load_model_config(path) for _, path in models(deployment)})


def unfit_learner(section: LearnerConfig, where: str) -> Iterator[str]:
    """Reasons for which a rank of the learner, whose section stands at `where`, would not start."""
    flash = section.attn_implementation == "flash_attention_2"
    if flash and not section.num_gpus and VISIBLE not in section.env_vars:
        yield f"{where}.attn_implementation: flash_attention_2 needs a GPU, but num_gpus is 0; sdpa runs anywhere"
    size = section.tensor_parallel.size
    if size == 1 and not (section.lora and section.lora.target_modules):
        return
    try:
        shape = shape_of_causal(section.model, section.dtype)
    except ConfigError:
        return  # reported by the check of models
    if size > 1:
        # Imported here because it loads DeepSpeed.
        from quartet.learner.tensor_parallel import check_divisible

        try:
            check_divisible(shape, size)
        except ConfigError as error:
            yield f"{where}.{error}"
    if section.lora:
        yield from _unfit_adapters(shape, section, section.lora, f"{where}.lora")


def _unfit_adapters(shape: torch.nn.Module, section: LearnerConfig, lora: LoraConfig, where: str) -> Iterator[str]:
    """Layers that are to get an adapter and cannot."""
    linear = {name.rpartition(".")[2] for name, layer in shape.named_modules() if isinstance(layer, torch.nn.Linear)}
    ends = {name.rpartition(".")[2] for name, _ in shape.named_modules()}
    if missing := [name for name in lora.target_modules or () if name.rpartition(".")[2] not in ends]:
        yield (
            f"{where}.target_modules: {section.model} has no layer that is called {' or '.join(missing)}; its "
            f"linear layers are {', '.join(sorted(linear))}"
        )
        return
    yield from _problem(partial(add_adapters, shape, lora), where)


def _problem(make: Callable[[], object], where: str) -> Iterator[str]:
    """Yields the error of adapters that cannot be made."""
    try:
        make()
    except ConfigError as error:
        yield str(error).replace("lora", where, 1)


def beyond_this_machine(deployment: ServicesFile, cpus: int, gpus: int) -> Iterator[str]:
    """Resources that a head on this machine alone does not have, so that Ray would wait for them for ever.

    Args:
        deployment: the file.
        cpus: cores of the machine.
        gpus: its GPUs.
    """
    asked: list[tuple[str, Any, Any, Any]] = []
    if isinstance(deployment, Deployment):
        policy = deployment.orchestrator.policy
        asked.append(("orchestrator.policy", policy.num_cpus, policy.num_gpus, policy.resources))
    for placed in deployment.placed():
        section, actor = placed.section, placed.actor
        cpus_of_one = actor.get("num_cpus")
        where = f"applications.{placed.name}: ray_actor_options"
        asked.append((where, 1 if cpus_of_one is None else cpus_of_one, placed.gpus, actor.get("resources")))
        if isinstance(section, CriticConfig) and section.ranks > 1:
            asked.append((f"applications.{placed.name}.args", section.num_cpus, section.num_gpus, section.resources))
    for where, cores, share, others in asked:
        # Schemas have checked the types; Serve allows null.
        if float(cores or 0) > cpus:
            yield f"{where}.num_cpus: {cores:g}, but this machine has {cpus} cores"
        if float(share or 0) > gpus:
            has = f"{gpus} GPUs" if gpus else "none"
            yield f"{where}.num_gpus: {share:g}, but this machine has {has}"
        for kind, amount in (others or {}).items():
            own = kind in OWN_RESOURCES or (gpus and kind.startswith(ACCELERATOR))
            if own and amount > 1:
                yield f"{where}.resources.{kind}: {amount:g}, but Ray gives each node 1 of it"
            if not own:
                yield (
                    f"{where}.resources.{kind}: a custom resource, which a head of `quartet up` does not have; leave "
                    "it out, or use a Ray cluster of your own (docs/security.md)"
                )


def _engine(deployment: ServicesFile, section: RolloutConfig, where: str, reserved: float) -> Iterator[str]:
    """Reasons for which vLLM would not start."""
    config = load_model_config(section.model)
    size, gpus = section.tensor_parallel_size, gpus_of_replicas(deployment)
    on_cpu = gpus == 0 and not torch.cuda.is_available()
    if on_cpu and section.kv_cache_mib is None:
        yield f"{where}.kv_cache_mib: required on a machine without a GPU, e.g. 256"
    if size > 1 and gpus and reserved < size:
        yield (
            f"{where}.tensor_parallel_size: {size}, but a replica's num_gpus is {reserved:g}; its engine "
            "needs a GPU for each part"
        )
    step = section.max_num_batched_tokens
    if step is not None and step < section.max_num_seqs:
        yield (
            f"{where}.max_num_batched_tokens: {step}, but max_num_seqs is {section.max_num_seqs}; vLLM wants a "
            "token for each request in a step"
        )
    text = config and config.get_text_config()
    heads = getattr(text, "num_attention_heads", None)
    groups = getattr(text, "num_key_value_heads", None) or heads
    if heads and heads % size:
        yield f"{where}.tensor_parallel_size: should divide the model's num_attention_heads {heads}, got {size}"
    elif groups and groups % size and size % groups:
        yield (
            f"{where}.tensor_parallel_size: should divide the model's num_key_value_heads {groups} or be a multiple "
            f"of it, got {size}"
        )
    if config is None or section.kv_cache_mib is None:
        return
    longest = section.longest(native_length(config))
    tokens = -(-longest // CPU_BLOCK) * CPU_BLOCK if on_cpu else longest
    # Of fewer heads with keys and values than there are parts, several parts keep the same one.
    parts = min(size, groups or size)
    least = _cached(config, section.dtype) * tokens
    if least > section.kv_cache_mib * parts * MIB:
        yield (
            f"{where}.kv_cache_mib: {section.kv_cache_mib}, but one response of max_length {longest} takes "
            f"{-(-least // (parts * MIB))}; raise it, or lower max_length"
        )


def _cached(config: Any, dtype: str) -> int:
    """Bytes of a token's keys and values in the KV cache; 0 where layers keep less than all of them."""
    text = config.get_text_config()
    kinds = set(getattr(text, "layer_types", None) or ["full_attention"])
    less = getattr(text, "kv_lora_rank", None) or getattr(text, "sliding_window", None)
    return 0 if less or kinds != {"full_attention"} else cached(text, dtype) or 0
