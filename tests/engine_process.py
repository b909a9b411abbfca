"""A vLLM engine in a process of its own, without Ray: what tests of many models need, one after the other.

It is a fork of a process that has imported vLLM (tests/preloaded), as are the engine's own.
"""

import asyncio
import multiprocessing
import os
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from protos import common_pb2
from quartet.wire.codec import Ints
from services.rollout.sample import Sample, Sampling
from tests.preloaded import program
from tests.pushing import EngineHost, Phases

_SETTINGS = {"dtype": "float32", "max_length": 128, "kv_cache_mib": 64}
_loop = asyncio.new_event_loop()
_hosts: list[EngineHost] = []


def _settle() -> None:
    # Engines' own processes are forks as well then.
    os.environ |= {
        "OMP_NUM_THREADS": "1",
        "VLLM_WORKER_MULTIPROCESSING_METHOD": "spawn",
        "VLLM_LOGGING_LEVEL": "ERROR",
    }


def _called(function: Any, *arguments: Any) -> Any:
    result = function(*arguments)
    return _loop.run_until_complete(result) if asyncio.iscoroutine(result) else result


async def _start(config: dict[str, Any], plain: bool) -> None:
    while _hosts:
        await _hosts.pop().shutdown()
    host = EngineHost()
    with pytest.MonkeyPatch.context() as patch:
        if plain:
            from services.rollout.vllm.arguments import engine_args

            changed = "services.rollout.vllm.engine.engine_args"
            patch.setattr(changed, lambda *given: _with_plain_workers(engine_args(*given)))
        await host.start(config)
    _hosts.append(host)


def _with_plain_workers(arguments: Any) -> Any:
    arguments.worker_extension_cls = "tests.plain_worker.PlainWorker"
    return arguments


async def _in_workers(method: str) -> list[Any]:
    return list(await _hosts[0]._engine.llm.collective_rpc(method))


def _method(name: str, *arguments: Any) -> Any:
    return getattr(_hosts[0], name)(*arguments)


class EngineProcess(Phases):
    """One engine at a time, and a RolloutClient's weight phases for it."""

    def __init__(self) -> None:
        super().__init__()
        self._pool = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), _settle)
        multiprocessing.set_executable(str(program("rollout", Path(os.environ["RAY_TMPDIR"]))))
        try:
            self._pool.submit(os.getpid)
        finally:
            multiprocessing.set_executable(sys.executable)

    async def start(self, folder: Path, *, plain: bool = False, **config: Any) -> None:
        """Loads the model in `folder`, ending the engine before. With `plain` its workers compute with plain weights
        (tests/plain_worker)."""
        self.lease = common_pb2.Lease()
        await self.call(_start, _SETTINGS | {"model": str(folder)} | config, plain)

    async def in_workers(self, method: str) -> list[Any]:
        """Calls a method of each of the engine's workers; their answers."""
        return list(await self.call(_in_workers, method))

    async def generate(self, prompts: Sequence[Ints], sampling: Sampling) -> list[Sample]:
        """One sample for each prompt, by its index as the seed."""
        samples: list[Sample] = await self.call(_method, "generate", prompts, sampling)
        return samples

    async def leave_open(self) -> None:
        """Opens a weight update in the engine of which its replica does not know."""
        await self.call(_method, "leave_open")

    async def _carry_out(self, phase: bytes) -> bytes:
        return bytes(await self.call(_method, "carry_out", phase))

    def end(self) -> None:
        """Ends the process."""
        processes = list(self._pool._processes.values())
        self._pool.shutdown(wait=False, cancel_futures=True)
        for process in processes:
            process.kill()

    async def call(self, function: Any, *arguments: Any) -> Any:
        """The result of a function of a module, or of a coroutine function, which is carried out in the process."""
        return await asyncio.get_running_loop().run_in_executor(self._pool, _called, function, *arguments)
