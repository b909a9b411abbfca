"""The vLLM engine behind a rollout replica: sampling, and taking new weights."""

import asyncio
import itertools
import os
from typing import Any

import numpy as np
import torch
from transformers import AutoTokenizer
from vllm import AsyncEngineArgs, SamplingParams
from vllm.config import WeightTransferConfig
from vllm.distributed.weight_transfer.base import WeightTransferInitRequest, WeightTransferUpdateRequest
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError

from services.common.arrays import Ints
from services.common.config import ConfigError
from services.common.errors import Unavailable
from services.common.weight_transfer.manifest import Manifest
from services.rollout.config import RolloutConfig
from services.rollout.interface import LOST
from services.rollout.sample import FinishReason, Sample, Sampling

REMEMBERED = 8
"""Versions whose checksums are kept."""
ENGINES = {"ipc": "quartet-ipc"}
"""What a backend's engine is called in vLLM, which has an `ipc` of its own."""
ANSWER_S = 8
"""An engine that takes longer to answer the simplest question is stuck."""


def weight_backend(config: RolloutConfig) -> str:
    """The configured backend, with `auto` settled by what this machine has."""
    if config.weight_backend != "auto":
        return config.weight_backend
    return "nccl" if torch.cuda.is_available() and torch.version.cuda else "gloo"


def engine_args(config: RolloutConfig) -> AsyncEngineArgs:
    """vLLM's arguments for this configuration.

    Raises:
        ConfigError: no KV cache size on a machine without a GPU.
    """
    if config.kv_cache_mib is None and not torch.cuda.is_available():
        raise ConfigError("rollout.args.kv_cache_mib: required on a machine without a GPU, e.g. 256")
    single, backend = config.tensor_parallel_size == 1, weight_backend(config)
    return AsyncEngineArgs(
        model=config.model,
        dtype=config.dtype,
        max_model_len=config.max_length,
        max_num_seqs=config.max_num_seqs,
        kv_cache_memory_bytes=config.kv_cache_mib << 20 if config.kv_cache_mib else None,
        gpu_memory_utilization=config.gpu_memory_utilization,
        tensor_parallel_size=config.tensor_parallel_size,
        distributed_executor_backend="uni" if single else "mp",
        enforce_eager=config.enforce_eager,
        seed=config.seed,
        # The log-probs of the distribution that was sampled from: after temperature.
        logprobs_mode="processed_logprobs",
        weight_transfer_config=WeightTransferConfig(backend=ENGINES.get(backend, backend)),
        worker_extension_cls="services.common.weight_transfer.engine.WorkerExtension",
        scheduler_cls="services.rollout.scheduler.WholeResponseScheduler",
        disable_log_stats=True,
        generation_config="auto",
    )


class VLLMEngine:
    """One AsyncLLM. All methods run on the event loop that `start` ran on."""

    def __init__(self, llm: AsyncLLM, config: RolloutConfig) -> None:
        self._llm = llm
        self._config = config
        self._names = itertools.count()
        self._joined = False
        self.version = 0
        self.checksum = ""
        self.checksums: dict[int, str] = {}
        self.backend = weight_backend(config)
        self.workers = config.tensor_parallel_size
        self.vocab_size = int(llm.model_config.get_vocab_size())
        self.max_length = int(llm.model_config.max_model_len)
        self.tokenizer = AutoTokenizer.from_pretrained(config.model)

    @classmethod
    async def start(cls, config: RolloutConfig) -> "VLLMEngine":
        """Loads the model and returns when it can generate."""
        os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
        # Two replicas on one machine must not pin their threads to the same cores.
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        if config.tensor_parallel_size == 1 and not torch.cuda.is_available():
            # The worker inside the engine's process: on a CPU one hop less for every step.
            os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        llm = AsyncLLM.from_engine_args(engine_args(config))
        await llm.update_weight_version("0")
        engine = cls(llm, config)
        # An engine that cannot run this model shows it at the first token: better now than to the first caller.
        warm_up = Sampling(max_new_tokens=2, ignore_eos=True)
        await engine.generate(0, np.asarray([0], np.int32), warm_up, seed=None)
        return engine

    async def generate(self, index: int, prompt_ids: Ints, sampling: Sampling, seed: int | None) -> Sample:
        """Samples one response. Cancelling aborts the engine's request.

        Raises:
            Unavailable: the engine died, or ended the request itself (a push with in_flight: abort); ask again.
        """
        params = SamplingParams(
            max_tokens=sampling.max_new_tokens,
            min_tokens=sampling.min_new_tokens,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            stop_token_ids=list(sampling.stop_token_ids),
            ignore_eos=sampling.ignore_eos,
            seed=seed,
            logprobs=0,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        request_id = f"r{next(self._names)}"
        final = None
        try:
            async for output in self._llm.generate({"prompt_token_ids": prompt_ids.tolist()}, params, request_id):
                final = output.outputs[0]
        except EngineDeadError as error:
            raise Unavailable(f"the engine of this replica died: {error}") from None
        if final is None or final.finish_reason not in ("stop", "length"):
            raise Unavailable("the engine ended the request before it was finished; ask again")
        ids = list(final.token_ids)
        return Sample(
            index=index,
            response_ids=np.asarray(ids, np.int32),
            logprobs=np.asarray(
                [entry[token].logprob for token, entry in zip(ids, final.logprobs, strict=True)], np.float32
            ),
            finish_reason=FinishReason(final.finish_reason),
            spans=tuple((int(s.version), s.start, s.end) for s in final.weight_versions or ()),
        )

    async def check_health(self) -> None:
        """Raises when the engine is dead, including its own process, or does not answer."""
        await self._llm.check_health()
        async with asyncio.timeout(ANSWER_S):
            await self._llm.get_weight_version()

    def running(self) -> int:
        """Requests that are not finished."""
        return int(self._llm.get_num_unfinished_requests())

    async def join(self, init_info: dict[str, Any]) -> None:
        """Joins a push group; returns when all its members have."""
        if self._joined and self.backend == "nccl":
            await self._llm.shutdown_weight_transfer_engine()
        await self._llm.init_weight_transfer_engine(WeightTransferInitRequest(init_info=init_info))
        self._joined = True

    async def pause(self, in_flight: str) -> None:
        """Stops generation between two engine steps and opens a weight update. New requests wait."""
        # clear_cache: requests that are kept recompute their KV cache, which the new weights make stale.
        await self._llm.pause_generation(mode=in_flight, clear_cache=True)
        await self._llm.start_weight_update()

    async def receive(self, manifest: Manifest) -> str:
        """Receives the weights; returns their checksum, empty where the backend keeps none."""
        shapes = [list(shape) for shape in manifest.shapes]
        info: dict[str, Any] = {"names": list(manifest.names), "shapes": shapes}
        if self.backend in ("gloo", "ipc"):
            info |= {"dtypes": list(manifest.dtypes), "bucket_bytes": manifest.bucket_bytes}
        else:
            info |= {"dtype_names": list(manifest.dtypes)}
        await self._llm.update_weights(WeightTransferUpdateRequest(update_info=info))
        checksums = set(await self._llm.collective_rpc("weights_checksum"))
        if len(checksums) != 1:
            raise Unavailable(f"the engine's workers received different bytes: {sorted(checksums)}")
        self._received = str(checksums.pop())
        return self._received

    async def commit(self, version: int) -> None:
        """Swaps the received weights in under this version and resumes generation."""
        await self._llm.finish_weight_update(str(version))
        self.version, self.checksum = version, self._received
        # In the order of their coming: a run that went back to a checkpoint pushes lower versions again.
        self.checksums.pop(version, None)
        self.checksums[version] = self._received
        for old in list(self.checksums)[:-REMEMBERED]:
            del self.checksums[old]
        await self._llm.resume_generation()

    async def abort(self) -> bool:
        """Drops what was received and resumes generation with the weights as they were.

        Returns False, and stays paused at version -1, when the push had already taken the model apart.
        """
        whole = all(await self._llm.collective_rpc("abort_weight_update"))
        self._joined = False
        if whole:
            await self._llm.resume_generation()
        else:
            self.version, self.checksum = LOST, ""
        return whole

    def shutdown(self) -> None:
        """Ends the engine's process."""
        self._llm.shutdown()
