"""Arguments of a rollout replica's vLLM engine."""

from collections.abc import Collection

import torch
from vllm import AsyncEngineArgs
from vllm.config import WeightTransferConfig
from vllm.model_executor.models import ModelRegistry, supports_lora

from quartet.config.base import ConfigError
from quartet.models.loading import load_config, load_tokenizer, native_length
from quartet.wire.identity import vocabulary_size
from services.rollout.config import RolloutConfig

FREE_SHARE = 0.02
"""Share of a GPU that has to be free for an engine with a configured cache size."""

CPU_BLOCK = 32
"""Tokens of a block of the KV cache on a CPU. With vLLM's own 128 short responses take longer there."""


def engine_args(config: RolloutConfig, adapted: Collection[str] = ()) -> AsyncEngineArgs:
    """vLLM's arguments for this configuration. `adapted` are the last parts of the names of layers with an adapter.

    Raises:
        ConfigError: the size of the KV cache is missing on a machine without a GPU.
    """
    gpu = torch.cuda.is_available()
    if config.kv_cache_mib is None and not gpu:
        raise ConfigError("rollout.args.kv_cache_mib: required on a machine without a GPU, e.g. 256")
    return AsyncEngineArgs(
        model=config.model,
        trust_remote_code=False,
        dtype=config.dtype,
        max_model_len=config.longest(native_length(load_config(config.model))),
        max_num_seqs=config.max_num_seqs,
        kv_cache_memory_bytes=config.kv_cache_mib << 20 if config.kv_cache_mib else None,
        gpu_memory_utilization=utilization(config, gpu=gpu),
        tensor_parallel_size=config.tensor_parallel_size,
        distributed_executor_backend="uni" if config.one_process else "mp",
        max_num_batched_tokens=config.max_num_batched_tokens,
        enforce_eager=eager(config, gpu=gpu),
        block_size=None if gpu else CPU_BLOCK,
        # Allocates weights and KV cache so that they can be released apart.
        enable_sleep_mode=config.colocate and gpu,
        seed=config.seed,
        # Log-probs of the distribution that tokens are sampled from, after temperature.
        logprobs_mode="processed_logprobs",
        weight_transfer_config=WeightTransferConfig(backend="quartet"),
        worker_extension_cls="services.rollout.vllm.transfer.WorkerExtension",
        scheduler_cls="services.rollout.vllm.scheduler.WholeResponseScheduler",
        enable_lora=config.adapters is not None,
        max_lora_rank=config.adapter_room,  # type: ignore[arg-type]
        max_loras=config.adapter_versions,
        # Without these the head has one too, which fails for a prompt's log-probs.
        lora_target_modules=sorted(adapted) or None,
        disable_log_stats=True,
        logits_processors=["services.rollout.vllm.sampling:TokenizerVocabulary"] if _is_padded(config) else None,
        generation_config="auto",
    )


def check_adapters(arguments: AsyncEngineArgs) -> None:
    """Raises ConfigError unless vLLM can compute with adapters of the model, if it is to."""
    if arguments.enable_lora:
        config = arguments.create_model_config()
        kind, name = ModelRegistry.resolve_model_cls(config.architectures, config)
        if not supports_lora(kind):
            raise ConfigError(
                f"rollout.args.adapters: vLLM has none for {name}; leave it and orchestrator.weights.adapters out, "
                "so that pushes bring merged weights"
            )


def _is_padded(config: RolloutConfig) -> bool:
    """True if the model's vocabulary has entries that its tokenizer does not know."""
    entries = load_config(config.model).get_text_config().vocab_size
    return bool(entries > vocabulary_size(load_tokenizer(config.model)))


def utilization(config: RolloutConfig, *, gpu: bool) -> float:
    """The share of the GPU to pass to vLLM. vLLM refuses to start unless that much is free, even if the size of the
    cache is configured; beside other processes that may never happen."""
    return FREE_SHARE if gpu and config.kv_cache_mib else config.gpu_memory_utilization


def eager(config: RolloutConfig, *, gpu: bool) -> bool:
    """True to run without graphs and compilation."""
    return not gpu if config.enforce_eager is None else config.enforce_eager
