"""vLLM's engine core as it runs on a GPU: its own loop, a queue of two batches, and Quartet's scheduler. Or without
the queue, as on a CPU. Workers are imitated: their tokens tell which weights sampled them."""

import asyncio
import os
import queue
from collections import deque
from concurrent.futures import Future
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from vllm import SamplingParams
from vllm.usage.usage_lib import UsageContext
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.engine import EngineCoreOutputs, EngineCoreRequestType
from vllm.v1.engine.core import EngineCoreProc, EngineShutdownState
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import LogprobsLists, ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from services.rollout.config import RolloutConfig
from services.rollout.vllm.arguments import engine_args
from services.rollout.vllm.scheduler import WholeResponseScheduler

BLOCK, BLOCKS = 16, 65
EACH = 100
"""Token 100 * v + n is the n-th of a response, sampled with the weights of version v."""


class Batch(Future[ModelRunnerOutput]):
    """The output of a batch. Computed when the engine waits for it, the latest that a GPU may do it."""

    def __init__(self, compute: Any) -> None:
        super().__init__()
        self._compute = compute

    def result(self, timeout: float | None = None) -> ModelRunnerOutput:
        """Computes the batch now."""
        computed: ModelRunnerOutput = self._compute()
        return computed


class Workers:
    """Imitates an executor: a token for each request whose prompt has been read to its end."""

    def __init__(self) -> None:
        self.weights = 0
        self._known: dict[str, int] = {}
        """Tokens of a request that are to be read before the next one is sampled."""
        self._sampled: dict[str, int] = {}
        self._listed: dict[str, int] = {}
        """Likeliest tokens that a request asks for beside each sampled one."""
        self._output = ModelRunnerOutput(req_ids=[], req_id_to_index={})

    def execute_model(self, scheduled: Any, non_block: bool) -> Batch:
        """Takes a batch. Tokens of earlier ones count as sampled, though the scheduler has not seen them."""
        places: dict[str, int | None] = {}
        for request in scheduled.scheduled_new_reqs:
            ids = request.prefill_token_ids or request.prompt_token_ids
            self._known[request.req_id] = len(ids)
            self._sampled.setdefault(request.req_id, 0)
            self._listed[request.req_id] = request.sampling_params.logprobs
            places[request.req_id] = self._place(request.req_id, request.num_computed_tokens, scheduled)
        cached = scheduled.scheduled_cached_reqs
        for name, computed in zip(cached.req_ids, cached.num_computed_tokens, strict=True):
            if name in cached.resumed_req_ids:
                self._known[name] = len(cached.all_token_ids[name])
            places[name] = self._place(name, computed, scheduled)
        self._batch = Batch(lambda: self._computed(places))
        return self._batch

    def _place(self, name: str, computed: int, scheduled: Any) -> int | None:
        """Number of the token that this batch samples for the request; None if it only reads."""
        if computed + scheduled.num_scheduled_tokens[name] < self._known[name]:
            return None
        self._known[name] += 1
        self._sampled[name] += 1
        return self._sampled[name] - 1

    def _computed(self, places: dict[str, int | None]) -> ModelRunnerOutput:
        names = list(places)
        tokens = [[] if place is None else [EACH * self.weights + place] for place in places.values()]
        # vLLM gives all requests of a step as many as the one that asks for the most.
        columns = 1 + max((self._listed[name] for name in names), default=0)
        ids = np.asarray([row or [0] for row in tokens]).reshape(-1, 1).repeat(columns, axis=1)
        logprobs = LogprobsLists(ids, -ids.astype(np.float32), np.zeros(len(ids), np.int64))
        return ModelRunnerOutput(names, {name: i for i, name in enumerate(names)}, tokens, logprobs=logprobs)

    def sample_tokens(self, grammar: Any, non_block: bool) -> Batch:
        """The batch taken last."""
        return self._batch

    def collective_rpc(self, method: str, *arguments: Any) -> list[None]:
        """Does nothing, as for `synchronize_device`."""
        return [None]

    def reset_mm_cache(self) -> None:
        """Does nothing."""

    def reset_encoder_cache(self) -> None:
        """Does nothing."""


class QueuedEngine:
    """An engine core whose loop is turned by hand."""

    def __init__(self, folder: Path, *, v2: bool = False, queued: bool = True) -> None:
        """`v2` is true for model runner V2, which vLLM itself chooses on GPUs only."""
        config = RolloutConfig.parse(
            {"model": str(folder), "kv_cache_mib": 1, "dtype": "float32", "max_num_seqs": 8}, "rollout"
        )
        vllm_config = engine_args(config).create_engine_config(UsageContext.LLM_CLASS)
        vllm_config.scheduler_config.async_scheduling = queued  # the CPU's platform turns it off
        spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=2, head_size=32, dtype=torch.float32)
        vllm_config.cache_config.num_gpu_blocks = BLOCKS
        self.workers = Workers()
        core: Any = EngineCoreProc.__new__(EngineCoreProc)
        core.vllm_config, core.model_executor, core.log_stats = vllm_config, self.workers, False
        core.structured_output_manager = StructuredOutputManager(vllm_config)
        cache = KVCacheConfig(BLOCKS, [], [KVCacheGroupSpec(["layer"], spec)])
        # The scheduler alone asks for it here. While the configuration is made, V2 would be refused on a CPU.
        with patch.dict(os.environ, VLLM_USE_V2_MODEL_RUNNER=str(int(v2))):
            core.scheduler = WholeResponseScheduler(vllm_config, cache, core.structured_output_manager, BLOCK)
            core.batch_queue_size = vllm_config.max_concurrent_batches
        assert core.scheduler.use_v2_model_runner is v2
        core.batch_queue = deque(maxlen=core.batch_queue_size) if queued else None
        core.step_fn = core.step_with_batch_queue if queued else core.step
        core.async_scheduling, core.check_for_draft_tokens = queued, False
        core.is_mm_encoder_only = core.is_pooling_model = core.engines_running = False
        core.aborts_queue, core.input_queue, core.output_queue = queue.Queue(), queue.Queue(), queue.Queue()
        core.process_input_queue_block = core.reject_new_requests = False
        core.shutdown_state, core._idle_state_callbacks = EngineShutdownState.RUNNING, []
        core.mm_receiver_cache, core._weight_version = None, "0"
        hashed = get_hash_fn_by_name(vllm_config.cache_config.prefix_caching_hash_algo)
        init_none_hash(hashed)
        self._hasher = get_request_block_hasher(BLOCK, hashed)
        self.core = core
        self.free = self.free_blocks()
        self.most_queued = 0

    def ask(self, name: str, prompt: int, new: int, key: str = "", listed: int = 0) -> None:
        """Adds a request: a prompt of so many tokens, a response of so many, a key of the scheduler's, and so many
        likeliest tokens beside each sampled one."""
        extra = {key: True} if key else None
        params = SamplingParams(max_tokens=new, ignore_eos=True, logprobs=listed, detokenize=False, extra_args=extra)
        request = Request(name, list(range(10, 10 + prompt)), params, None, block_hasher=self._hasher)
        self.core._handle_client_request(EngineCoreRequestType.ADD, (request, 0))

    def turn(self, times: int = 1) -> None:
        """Turns the loop, as long as there is work."""
        for _ in range(times):
            self.core._process_input_queue()
            if self.core.has_work():
                self.core._process_engine_step()
            self.most_queued = max(self.most_queued, len(self.core.batch_queue or ()))

    def pause(self, *, clear_cache: bool) -> int:
        """Pauses as a push does; returns the number of turns that it takes to complete."""
        future = self.core.pause_scheduler("keep", clear_cache)
        turns = 0
        while future is not None and not future.done():
            self.turn()
            turns += 1
            assert turns < 20
        assert self.core.scheduler.pause_state == PauseState.PAUSED_ALL
        return turns

    async def pause_scheduler_async(self, mode: str, clear_cache: bool) -> None:
        """Pauses as a front end asks for it. Ends once the loop has been turned far enough."""
        future = self.core.pause_scheduler(mode, clear_cache)
        if future is not None:
            await asyncio.wrap_future(future)

    def change_weights(self, version: int) -> None:
        """Puts other weights into service."""
        self.workers.weights, self.core._weight_version = version, str(version)

    def resume(self) -> None:
        """Ends the pause."""
        self.core.resume_scheduler()

    def abort(self, *names: str) -> None:
        """Cancels requests as a front end does, in the middle of a step too."""
        self.core.aborts_queue.put_nowait(list(names))
        self.core.abort_requests(list(names))

    def received(self) -> list[tuple[str, list[int], list[float], str, bool]]:
        """Outputs since the last call: name, tokens, log-probs, version on the message, True for the last."""
        came = []
        while not self.core.output_queue.empty():
            _, message = self.core.output_queue.get_nowait()
            assert isinstance(message, EngineCoreOutputs)
            for output in message.outputs:
                logprobs = output.new_logprobs.logprobs[:, 0].tolist() if output.new_logprobs else []
                came.append(
                    (output.request_id, output.new_token_ids, logprobs, str(message.weight_version), output.finished)
                )
        return came

    def free_blocks(self) -> int:
        """Blocks of the KV cache that no request has."""
        return int(self.core.scheduler.kv_cache_manager.block_pool.get_num_free_blocks())
