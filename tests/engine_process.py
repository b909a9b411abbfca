"""A vLLM engine in a process of its own, without Ray: what tests of many models need, one after the other."""

import asyncio
import multiprocessing
import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from protos import common_pb2
from services.common.wire.codec import Ints
from services.rollout.sample import Sample, Sampling
from tests.pushing import EngineHost, Phases

_SETTINGS = {"dtype": "float32", "max_length": 128, "kv_cache_mib": 64}
_loop = asyncio.new_event_loop()
_hosts: list[EngineHost] = []


_FORKED = multiprocessing.get_context("forkserver")
_IMPORTED = [
    "vllm.v1.engine.core",
    "vllm.v1.worker.cpu_worker",
    "vllm.model_executor.models.llama",
    "tests.frozen",
]


def _settle() -> None:
    """Makes engines' own processes forks of one that has imported vLLM, as each would spend 12 s of a core on it."""
    os.environ |= {"OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    from vllm.v1.engine import utils

    _FORKED.set_forkserver_preload(_IMPORTED)
    utils.get_mp_context = lambda: _FORKED


def _start(config: dict[str, Any]) -> None:
    while _hosts:
        _loop.run_until_complete(_hosts.pop().shutdown())
    host = EngineHost()
    _loop.run_until_complete(host.start(config))
    _hosts.append(host)


def _call(method: str, *arguments: Any) -> Any:
    return _loop.run_until_complete(getattr(_hosts[0], method)(*arguments))


class EngineProcess(Phases):
    """One engine at a time, and a RolloutClient's weight phases for it."""

    def __init__(self) -> None:
        super().__init__()
        self._pool = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), _settle)

    async def start(self, folder: Path, **config: Any) -> None:
        """Loads the model in `folder`, ending the engine before."""
        self.lease = common_pb2.Lease()
        await self._run(_start, _SETTINGS | {"model": str(folder)} | config)

    async def generate(self, prompts: Sequence[Ints], sampling: Sampling) -> list[Sample]:
        """One sample for each prompt, by its index as the seed."""
        samples: list[Sample] = await self._run(_call, "generate", prompts, sampling)
        return samples

    async def _carry_out(self, phase: bytes) -> bytes:
        return bytes(await self._run(_call, "carry_out", phase))

    def end(self) -> None:
        """Ends the process."""
        processes = list(self._pool._processes.values())
        self._pool.shutdown(wait=False, cancel_futures=True)
        for process in processes:
            process.kill()

    async def _run(self, function: Any, *arguments: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._pool, function, *arguments)
