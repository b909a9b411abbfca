"""Slots of the KV cache for running requests, for which vLLM is asked only where a block begins or is full.

vLLM's scheduler asks the manager of the KV cache twice for each running request and token: for a slot, and to keep
full blocks for prompts that begin alike. Within a block there is nothing to do for either, but finding that out in
each group of layers takes a third of the scheduler's time.
"""

from typing import Any

from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig
from vllm.v1.request import Request


def blocks_fill_alike(config: KVCacheConfig) -> bool:
    """True if all layers keep all tokens, so that their blocks begin and fill together, and none is freed earlier."""
    return len(config.kv_cache_groups) == 1 and type(config.kv_cache_groups[0].kv_cache_spec) is FullAttentionSpec


def skip_within_blocks(manager: KVCacheManager, block_size: int) -> None:
    """Makes a manager answer by itself, without its groups of layers, where no block begins or is full."""
    allocate, cache = manager.allocate_slots, manager.cache_blocks

    def allocate_slots(request: Request, new: int, *args: Any, **kwargs: Any) -> KVCacheBlocks | None:
        # Of a request that waits nothing is computed.
        filled = request.num_computed_tokens % block_size
        if filled and filled + new < block_size:
            return manager.empty_kv_cache_blocks
        return allocate(request, new, *args, **kwargs)

    def cache_blocks(request: Request, computed: int) -> None:
        if computed % block_size == 0:
            cache(request, computed)

    vars(manager).update(allocate_slots=allocate_slots, cache_blocks=cache_blocks)
