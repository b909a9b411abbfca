"""The vLLM engine of a rollout replica: it samples, and takes new weights."""

import asyncio
import itertools
import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from transformers import AutoTokenizer
from vllm import SamplingParams
from vllm.distributed.weight_transfer.base import WeightTransferInitRequest, WeightTransferUpdateRequest
from vllm.sampling_params import RequestOutputKind
from vllm.usage.usage_lib import UsageContext
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError

from services.common.models.loading import shape_of_causal
from services.common.weight_transfer.expected import ExpectedWeights
from services.common.weight_transfer.manifest import Manifest
from services.common.weight_transfer.place import Place, machine
from services.common.wire.codec import Floats, Ints
from services.common.wire.errors import InvalidArgument, Unavailable
from services.rollout.config import RolloutConfig
from services.rollout.interface import LOST
from services.rollout.sample import FinishReason, Sample, Sampling
from services.rollout.vllm.arguments import engine_args
from services.rollout.vllm.versions import WeightVersions

REMEMBERED = 8
"""Versions whose checksums are kept."""
PAUSES = {"keep": ("keep", True), "keep-cache": ("keep", False), "wait": ("wait", True), "abort": ("abort", True)}
"""weights.in_flight -> vLLM's mode of a pause, and whether its caches are cleared."""
ANSWER_S = 8
"""Seconds within which an engine answers the simplest request; one that takes longer is stuck."""


class VLLMEngine:
    """One AsyncLLM. All methods run on the event loop that `start` ran on."""

    def __init__(self, llm: AsyncLLM, config: RolloutConfig) -> None:
        self._llm = llm
        self._config = config
        self._names = itertools.count()
        self.version = 0
        self.checksum = ""
        self.checksums: dict[int, str] = {}
        self.backend: str = config.weight_backend
        self.workers = config.tensor_parallel_size
        self.place = Place()
        self._versions = WeightVersions(llm)
        self._pauses = 0
        """Number of pauses for a push: between two of them all requests come under the same weights. A version's
        number may come again."""
        self._resting = False
        """True while generation is paused for the learners."""
        self._releases = bool(llm.model_config.enable_sleep_mode)
        self.vocab_size = int(llm.model_config.get_vocab_size())
        self.max_length = int(llm.model_config.max_model_len)
        self.tokenizer = AutoTokenizer.from_pretrained(config.model)
        self._expected = ExpectedWeights(shape_of_causal(config.model, config.dtype), config.dtype)
        self.longest_manifest = self._expected.longest_manifest

    @classmethod
    async def start(cls, config: RolloutConfig) -> "VLLMEngine":
        """Loads the model and returns when it can generate."""
        os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
        # Otherwise two replicas on one machine would pin their threads to the same cores.
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        if config.tensor_parallel_size == 1 and not torch.cuda.is_available():
            # On a CPU the worker runs inside the engine's process, which saves a message per step.
            os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        llm = AsyncLLM.from_engine_args(engine_args(config), usage_context=UsageContext.LLM_CLASS)
        engine = cls(llm, config)
        await engine._versions.begin()
        engine.place = Place(machine(), tuple(uuid for uuid in await llm.collective_rpc("gpu") if uuid))
        # An engine that cannot run this model fails at the first token; better now than at the first caller.
        warm_up = Sampling(max_new_tokens=2, ignore_eos=True)
        await engine.generate(0, np.asarray([0], np.int32), warm_up, seed=None)
        return engine

    async def generate(self, index: int, prompt_ids: Ints, sampling: Sampling, seed: int | None) -> Sample:
        """Samples one response. Cancelling aborts the engine's request.

        Raises:
            Unavailable: the engine died, or ended the request itself (a push with in_flight: abort); may be repeated.
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
        begun, final = self._versions.serving, None
        try:
            async for output in self._llm.generate(self._prompt(prompt_ids), params, request_id):
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
            spans=self._versions.spans(final, begun),
        )

    async def score(self, sequences: Sequence[Ints]) -> list[Floats]:
        """Log-probs of all tokens but the first, over the whole vocabulary; [T - 1] for each sequence.

        Raises:
            Unavailable: the engine died, or was paused meanwhile.
        """
        return list(await asyncio.gather(*(self._score(sequence) for sequence in sequences)))

    async def _score(self, sequence: Ints) -> Floats:
        # Generates one token, since an engine does not process a request for none.
        params = SamplingParams(
            max_tokens=1,
            prompt_logprobs=0,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        final, ids = None, sequence.tolist()
        try:
            async for output in self._llm.generate(self._prompt(sequence), params, f"p{next(self._names)}"):
                final = output.prompt_logprobs
        except EngineDeadError as error:
            raise Unavailable(f"the engine of this replica died: {error}") from None
        if final is None:
            raise Unavailable("the engine ended the request before it was finished; ask again")
        pairs = zip(ids[1:], final[1:], strict=True)
        return np.asarray([entry[token].logprob for token, entry in pairs], np.float32)

    def _prompt(self, ids: Ints) -> dict[str, Any]:
        """A prompt for the engine. It shares the KV cache only of prompts that came under the same weights."""
        return {"prompt_token_ids": ids.tolist(), "cache_salt": str(self._pauses)}

    async def stale(self) -> list[str]:
        """Names of weights that the last push did not bring; empty if vLLM's own transfer engine received it."""
        return sorted({name for names in await self._llm.collective_rpc("stale_weights") for name in names})

    async def check_health(self) -> None:
        """Raises if the engine or its process is dead, or does not answer."""
        await self._llm.check_health()
        async with asyncio.timeout(ANSWER_S):
            await self._versions.answer()

    def running(self) -> int:
        """Number of unfinished requests."""
        return self._versions.running()

    def check(self, manifest: Manifest) -> None:
        """Raises InvalidArgument unless the manifest holds exactly the model's weights."""
        self._expected.check(manifest)

    async def join(self, init_info: dict[str, Any]) -> None:
        """Joins a push group; returns when all its members have joined."""
        await self._llm.init_weight_transfer_engine(WeightTransferInitRequest(init_info=init_info))

    async def rest(self) -> None:
        """Stops generation, as `pause` does, and releases the KV cache's memory if the engine can. The next commit or
        abort resumes."""
        if not self._resting:
            await self._llm.pause_generation(mode="keep", clear_cache=True)
            self._resting = True
            if self._releases:
                await self._versions.release_cache()

    async def pause(self, in_flight: str) -> None:
        """Stops generation between two engine steps and opens a weight update. New requests wait.

        Raises:
            InvalidArgument: `in_flight` is none of PAUSES.
        """
        if in_flight not in PAUSES:
            raise InvalidArgument(f"in_flight: {in_flight!r}; must be one of {', '.join(PAUSES)}")
        mode, cleared = PAUSES[in_flight]
        if not self._resting:
            # Requests in progress recompute a KV cache that is cleared, because it belongs to the old weights.
            await self._llm.pause_generation(mode=mode, clear_cache=cleared)
        self._pauses += 1
        await self._llm.start_weight_update()

    async def _resume(self) -> None:
        if self._resting and self._releases:
            await self._versions.restore_cache()
        self._resting = False
        await self._llm.resume_generation()

    async def receive(self, manifest: Manifest) -> str:
        """Receives the weights; returns their checksum."""
        info: dict[str, Any] = {
            "names": list(manifest.names),
            "dtypes": list(manifest.dtypes),
            "shapes": [list(shape) for shape in manifest.shapes],
            "bucket_bytes": manifest.bucket_bytes,
        }
        await self._llm.update_weights(WeightTransferUpdateRequest(update_info=info))
        checksums = set(await self._llm.collective_rpc("weights_checksum"))
        if len(checksums) != 1:
            raise Unavailable(f"the engine's workers received different bytes: {sorted(checksums)}")
        self._received = str(checksums.pop())
        return self._received

    async def commit(self, version: int) -> None:
        """Puts the received weights into service under this version and resumes generation."""
        await self._versions.finish(version)
        self.version, self.checksum = version, self._received
        # In order of arrival, since a run that resumed from a checkpoint pushes lower versions again.
        self.checksums.pop(version, None)
        self.checksums[version] = self._received
        for old in list(self.checksums)[:-REMEMBERED]:
            del self.checksums[old]
        await self._resume()

    async def abort(self) -> bool:
        """Drops the received weights and resumes generation with the old ones.

        Returns False, and stays paused at version -1, when the push had already taken the model apart.
        """
        whole = all(await self._llm.collective_rpc("abort_weight_update"))
        if whole:
            await self._resume()
        else:
            self.version, self.checksum = LOST, ""
        return whole

    def shutdown(self) -> None:
        """Ends the engine's process."""
        self._llm.shutdown()
