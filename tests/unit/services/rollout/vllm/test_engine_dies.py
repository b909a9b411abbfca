"""An engine whose process dies while it is asked for something: vLLM would leave the caller waiting."""

import asyncio
import contextlib
import subprocess
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from vllm.v1.engine.exceptions import EngineDeadError

from quartet.models.loading import shape_of_causal
from quartet.weight_transfer.expected import ExpectedWeights
from quartet.weight_transfer.manifest import Manifest
from services.rollout.config import RolloutConfig
from services.rollout.vllm import engine as engines
from services.rollout.vllm.engine import ANSWER_S, LOOK_S, VLLMEngine
from tests.unit.services.rollout.vllm.test_vllm_interface import RecordedEngine


class Deaf(RecordedEngine):
    """vLLM's client of a process that answers nothing, and may have died."""

    model_config = SimpleNamespace(get_vocab_size=lambda: 64, max_model_len=32, enable_sleep_mode=False)
    dead = False
    cancelled = 0

    def __getattr__(self, name: str) -> Any:
        answer = super().__getattr__(name)

        def called(*arguments: Any, **options: Any) -> Any:
            answer(*arguments, **options).close()
            return self._never()

        return called

    async def _never(self) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            self.cancelled += 1

    async def check_health(self) -> None:
        if self.dead:
            raise EngineDeadError


@pytest.fixture
def llm() -> Deaf:
    return Deaf()


@pytest.fixture
def engine(llm: Deaf, policy_folder: Path) -> VLLMEngine:
    raw = {"model": str(policy_folder), "dtype": "float32", "kv_cache_mib": 8, "tensor_parallel_size": 2}
    config = RolloutConfig.parse(raw, "rollout")
    return VLLMEngine(llm, config, ExpectedWeights(shape_of_causal(config.model, config.dtype), config.dtype))  # type: ignore[arg-type]


CALLS: dict[str, tuple[Any, ...]] = {
    "join": ({"backend": "gloo"},),
    "leave": (),
    "rest": (),
    "pause": ("keep",),
    "receive": (Manifest.of({}, bucket_bytes=1),),
    "commit": (1,),
    "abort": (),
    "stale": (),
    "answer": (),
}
"""Everything that a push or a look at its health asks of an engine, and the arguments."""


@pytest.mark.parametrize("method", CALLS)
async def test_a_call_fails_as_soon_as_the_engine_is_dead(llm: Deaf, engine: VLLMEngine, method: str) -> None:
    call = asyncio.create_task(getattr(engine, method)(*CALLS[method]))
    await asyncio.sleep(2.5 * LOOK_S)
    assert not call.done()  # one that only takes long is waited for
    llm.dead = True
    async with asyncio.timeout(30):
        with pytest.raises(EngineDeadError):
            await call
    await asyncio.sleep(0)
    assert llm.cancelled == 1
    assert not engine.disorder  # that it is dead says it all


@pytest.mark.processes
@pytest.mark.parametrize("method", ["answer", "commit"])
async def test_a_process_that_a_signal_has_stopped_is_ended_whenever_the_engine_is_asked(
    engine: VLLMEngine, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Left stopped, the process would outlive its replica and keep its GPU's memory."""
    monkeypatch.setattr(engines, "LOOK_S", 0.02)
    # An engine's core below this process, which is its replica, and workers below the core.
    with subprocess.Popen(["sh", "-c", "sleep 600 & sleep 600"]) as core:
        monkeypatch.setattr(Deaf, "dead", property(lambda _: core.poll() is not None))
        workers: list[psutil.Process] = []
        try:
            async with asyncio.timeout(30):
                while len(workers) < 2:
                    await asyncio.sleep(0.01)
                    workers = psutil.Process(core.pid).children()
                workers[0].suspend()
                began = time.monotonic()
                with pytest.raises(EngineDeadError):
                    await getattr(engine, method)(*CALLS[method])
            assert psutil.wait_procs(workers[:1], timeout=10)[1] == []
        finally:
            core.kill()
            for worker in workers:
                with contextlib.suppress(psutil.NoSuchProcess):
                    worker.kill()
    assert time.monotonic() - began < ANSWER_S / 2


async def test_a_caller_that_gives_up_leaves_nothing_waiting(llm: Deaf, engine: VLLMEngine) -> None:
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await engine.commit(1)
    await asyncio.sleep(0)
    assert llm.cancelled == 1
