"""The vLLM engine of a rollout replica: it samples, and takes new weights."""

import asyncio
import contextlib
import logging
import os
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import asdict
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

import numpy as np
import psutil
import torch
from vllm.distributed.weight_transfer.base import WeightTransferInitRequest, WeightTransferUpdateRequest
from vllm.usage.usage_lib import UsageContext
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError

from quartet.config.base import ConfigError
from quartet.learner.lora import adapted_layer, adapters_for
from quartet.models.distribution import end_ids
from quartet.models.loading import load_tokenizer, shape_of_causal
from quartet.ranks.stopped import has_ended, stopped_again
from quartet.seams.vllm import drain
from quartet.weight_transfer.expected import ExpectedWeights
from quartet.weight_transfer.manifest import Manifest
from quartet.weight_transfer.place import Place, machine
from quartet.wire.codec import Floats, Ints
from quartet.wire.errors import InvalidArgument, ServiceError, Unavailable
from services.rollout.config import RolloutConfig
from services.rollout.interface import NO_VERSION
from services.rollout.sample import Sampling
from services.rollout.vllm.arguments import check_adapters, engine_args
from services.rollout.vllm.requests import Requests

log = logging.getLogger("quartet")

REMEMBERED = 8
"""Versions whose checksums are kept; more where responses may be of more."""
FINISH = "finish"
"""weights.in_flight of pushes to an engine with adapters of several versions, and of no others."""
IN_FLIGHT = ("keep", "keep-cache", "wait", "abort", FINISH)
"""Values of weights.in_flight."""
ANSWER_S = 8
"""Seconds within which an engine answers the simplest request; one that takes longer is stuck."""
LOOK_S = 0.5
"""Seconds between two looks whether an engine still lives that is carrying out a request."""
LOOKS = 4
"""Looks in a row that find a process of the engine stopped by a signal before it is ended."""

Given = ParamSpec("Given")
Result = TypeVar("Result")


def _while_it_lives(
    method: Callable[Concatenate["VLLMEngine", Given], Coroutine[Any, Any, Result]],
) -> Callable[Concatenate["VLLMEngine", Given], Coroutine[Any, Any, Result]]:
    """Makes a method fail as `check_health` does when the engine's process dies meanwhile: vLLM notices the death,
    but leaves what the process was asked for without an answer. One that a signal has stopped, as SIGSTOP does, is
    ended: it would hold up a whole push until the phase's deadline, and outlive a replica that is replaced for its
    silence. When a worker has ended, the others are.

    After a call that failed in one of several workers all further ones fail, those of health checks too, so that the
    replica is replaced: vLLM leaves the answers of the others unread, and takes them for those to later calls.
    """

    @wraps(method)
    async def watched(engine: "VLLMEngine", /, *given: Given.args, **options: Given.kwargs) -> Result:
        if engine.disorder:
            raise Unavailable(f"the engine's workers answer out of turn since one of them failed: {engine.disorder}")
        engine.check_workers()
        asked = asyncio.create_task(method(engine, *given, **options))
        stopped: Mapping[psutil.Process, int] = {}
        try:
            while not (await asyncio.wait({asked}, timeout=LOOK_S))[0]:
                engine.check_workers()
                await engine.llm.check_health()
                stopped = stopped_again(stopped, psutil.Process().children(recursive=True))
                for process in [process for process, looks in stopped.items() if looks >= LOOKS]:
                    log.warning("a signal has stopped the engine's process %d: it is ended", process.pid)
                    _end(process)
            return asked.result()
        except Exception as error:
            engine.check_workers()
            # What a caller asks wrongly reaches no worker.
            if engine.workers > 1 and not isinstance(error, ServiceError | ValueError | EngineDeadError):
                engine.disorder = f"{type(error).__name__}: {error}"
            raise
        finally:
            asked.cancel()

    return watched


def _end(process: psutil.Process) -> None:
    with contextlib.suppress(psutil.Error):
        process.kill()


class VLLMEngine:
    """One AsyncLLM. All methods run on the event loop that `start` ran on."""

    def __init__(self, llm: AsyncLLM, config: RolloutConfig, expected: ExpectedWeights) -> None:
        """`expected` is what pushes bring."""
        self.llm = llm
        self._config = config
        self.version = 0
        self.checksum = ""
        self.checksums: dict[int, str] = {}
        self.backend: str = config.weight_backend
        self.workers = config.tensor_parallel_size
        self.disorder = ""
        """Failure of a call of several workers, since which their answers are out of turn; empty if none failed."""
        self.place = Place()
        self.processes: Sequence[psutil.Process] = ()
        """The processes that compute."""
        self._ended = 0
        """Number of the first of them that has ended; 0 if none has."""
        self.requests = Requests(llm, config.adapter_versions if config.adapters else 0)
        self.generate = self.requests.generate
        self._resting = False
        """True while generation is paused for the learners."""
        self._unknown = False
        """True if workers may have loaded weights whose commit was given up, or failed in another one."""
        self._releases = bool(llm.model_config.enable_sleep_mode)
        self.vocab_size = int(llm.model_config.get_vocab_size())
        self.max_length = int(llm.model_config.max_model_len)
        self.tokenizer = load_tokenizer(config.model)
        self.end_ids = end_ids(config.model, self.tokenizer)
        self._expected = expected
        self.longest_manifest = expected.longest_manifest

    @classmethod
    async def start(cls, config: RolloutConfig) -> "VLLMEngine":
        """Loads the model and returns when it can generate."""
        os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
        # Otherwise two replicas on one machine would pin their threads to the same cores.
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        if config.one_process and not torch.cuda.is_available():
            # On a CPU the worker runs inside the engine's process, which saves a message per step.
            os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        added = adapters_for(config.model, config.dtype, config.adapters) if config.adapters else None
        expected = ExpectedWeights(shape_of_causal(config.model, config.dtype), config.dtype, added)
        arguments = engine_args(config, {adapted_layer(name) for name in added or ()})
        check_adapters(arguments)
        llm = AsyncLLM.from_engine_args(arguments, usage_context=UsageContext.LLM_CLASS)
        engine = cls(llm, config, expected)
        await llm.update_weight_version("0")
        workers = await llm.collective_rpc("prepare_worker")
        engine.processes = [psutil.Process(number) for number, _ in workers]
        engine.place = Place(machine(), tuple(gpu for _, gpu in workers if gpu))
        if (adapters := config.adapters) is not None:
            await llm.collective_rpc("take_adapters", args=(adapters.rank, expected.shapes, config.adapter_versions))
            if stale := await engine.stale():
                raise ConfigError(
                    f"rollout.args.adapters: vLLM's model has no place for those of {len(stale)} layers, such as "
                    f"{stale[0]}; push merged weights, without it"
                )
        # An engine that cannot run this model fails at the first token; better now than at the first caller.
        warm_up = Sampling(max_new_tokens=2, ignore_eos=True)
        await engine.generate(0, np.asarray([0], np.int32), warm_up, seed=None)
        return engine

    @_while_it_lives
    async def score(self, sequences: Sequence[Ints]) -> list[Floats]:
        """Log-probs of all tokens but the first, over the whole vocabulary; [T - 1] for each sequence.

        Raises:
            Unavailable: the engine died, or was paused meanwhile.
        """
        return list(await asyncio.gather(*(self.requests.score(sequence) for sequence in sequences)))

    @_while_it_lives
    async def stale(self) -> list[str]:
        """Names of weights that the last push did not bring."""
        return sorted({name for names in await self.llm.collective_rpc("stale_weights") for name in names})

    @_while_it_lives
    async def answer(self) -> None:
        """Returns when the engine's process has answered the simplest request. Raises if it is dead."""
        await self.llm.check_health()
        await self.llm.get_weight_version()

    def check_workers(self) -> None:
        """Raises Unavailable if a process that computes has ended, and ends the others. vLLM gives these up to nine
        seconds, in which its engine answers as if nothing had happened, or not at all."""
        if not self._ended and (ended := [process.pid for process in self.processes if has_ended(process)]):
            self._ended = ended[0]  # of which the others are only the consequence
            for process in self.processes:
                _end(process)
        if self._ended:
            raise Unavailable(f"the engine's worker process {self._ended} has ended")

    async def check_health(self) -> None:
        """Raises if the engine or its process is dead, or does not answer."""
        async with asyncio.timeout(ANSWER_S):
            await self.answer()

    def running(self) -> int:
        """Number of unfinished requests."""
        return int(self.llm.get_num_unfinished_requests())

    def check(self, manifest: Manifest) -> None:
        """Raises InvalidArgument unless the manifest holds exactly the model's weights."""
        self._expected.check(manifest)

    @_while_it_lives
    async def join(self, init_info: dict[str, Any]) -> None:
        """Joins a push group; returns when all its members have joined."""
        await self.llm.init_weight_transfer_engine(WeightTransferInitRequest(init_info=init_info))
        await self._done()

    async def _done(self) -> list[str]:
        """Checksums of what the workers received last. Unavailable if one of them failed in what it did last."""
        outcomes = await self.llm.collective_rpc("push_outcome")
        if failures := [failure for failure, _ in outcomes if failure]:
            raise Unavailable(failures[0])
        return [checksum for _, checksum in outcomes]

    @_while_it_lives
    async def leave(self) -> None:
        """Leaves the push group and the learner's memory."""
        await self.llm.shutdown_weight_transfer_engine()

    @_while_it_lives
    async def rest(self) -> None:
        """Stops generation, as `pause` does, and releases the KV cache's memory if the engine can. The next commit or
        abort resumes."""
        if not self._resting:
            await self.llm.pause_generation(mode="keep", clear_cache=True)
            self._resting = True
            if self._releases:
                await self.llm.release_kv_cache_memory()

    @_while_it_lives
    async def pause(self, in_flight: str) -> None:
        """Stops generation between two engine steps and opens a weight update, in place of one that was left open.
        New requests wait; with `abort` all others end, after they have reported what they sampled.

        Raises:
            InvalidArgument: `in_flight` is none of these, or not for as many versions of adapters as are kept here.
        """
        if in_flight not in IN_FLIGHT:
            raise InvalidArgument(f"in_flight: {in_flight!r}; must be one of {', '.join(IN_FLIGHT)}")
        if (in_flight == FINISH) != (self._config.adapter_versions > 1):
            raise InvalidArgument(
                f"in_flight: {in_flight}, but the replica has adapter_versions: {self._config.adapter_versions}; "
                f"{FINISH} needs more than 1, all others 1"
            )
        if not self._resting:
            # Requests in progress recompute a KV cache that is cleared, because it belongs to the old weights.
            if in_flight == "wait":
                await drain(self.llm)
            else:  # vLLM's own mode "abort" would throw away the tokens that are sampled
                await self.llm.pause_generation(mode="keep", clear_cache=in_flight not in ("keep-cache", FINISH))
        self.requests.pauses += 1
        # vLLM refuses a second update, and carries out what it was asked for even if the caller has given up on it.
        await self.llm.collective_rpc("close_weight_update")
        await self.llm.start_weight_update()
        if in_flight == "abort":
            await self.requests.end()
        if in_flight == FINISH:
            await self.llm.collective_rpc("put_adapters_at", args=(await self.requests.make_place(),))

    async def _resume(self) -> None:
        if self._resting and self._releases:
            await self.llm.wake_up(tags=["kv_cache"])
        self._resting = False
        await self.llm.resume_generation()

    @_while_it_lives
    async def receive(self, manifest: Manifest) -> str:
        """Receives the weights; returns their checksum. Of several workers each keeps its own pieces alone, once all
        know which these are."""
        fields, pieces = asdict(manifest), False
        if self.workers > 1:
            pieces = all(await self.llm.collective_rpc("knows_pieces", args=(fields,)))
            # All give back what they have of other pushes before any takes memory for this one.
            await self.llm.collective_rpc("make_room", args=(fields, pieces))
        await self.llm.update_weights(WeightTransferUpdateRequest(update_info=fields | {"pieces": pieces}))
        checksums = set(await self._done())
        if len(checksums) != 1:
            raise Unavailable(f"the engine's workers received different bytes: {sorted(checksums)}")
        self._received = str(checksums.pop())
        return self._received

    @_while_it_lives
    async def commit(self, version: int) -> None:
        """Puts the received weights into service under this version and resumes generation."""
        try:
            await self.llm.finish_weight_update(str(version))
            await self._done()
        except BaseException:
            # Given up, the workers go on; of several one may have failed alone. Of several versions of adapters no
            # request is computed with the last before `serve`.
            self._unknown = self._config.adapter_versions == 1
            raise
        self._unknown = False
        self.version, self.checksum = version, self._received
        # In order of arrival, since a run that resumed from a checkpoint pushes lower versions again.
        self.checksums.pop(version, None)
        self.checksums[version] = self._received
        for old in list(self.checksums)[: -max(REMEMBERED, self._config.adapter_versions)]:
            del self.checksums[old]
        await self.requests.serve(version)
        await self._resume()

    @_while_it_lives
    async def abort(self) -> bool:
        """Drops the received weights and resumes generation with the old ones.

        Returns False, and stays paused at version -1, when the push had already taken the model apart, or may have
        loaded them.
        """
        whole = all(await self.llm.collective_rpc("abort_weight_update")) and not self._unknown
        if whole:
            await self._resume()
        else:
            self.version, self.checksum = NO_VERSION, ""
        return whole

    def shutdown(self) -> None:
        """Ends the engine's process."""
        self.llm.shutdown()
