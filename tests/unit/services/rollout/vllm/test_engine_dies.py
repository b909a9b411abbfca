"""An engine whose process dies while it is asked for something: vLLM would leave the caller waiting."""

import asyncio
import contextlib
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from vllm.v1.engine.exceptions import EngineDeadError

from quartet.models.loading import shape_of_causal
from quartet.weight_transfer.expected import ExpectedWeights
from quartet.weight_transfer.manifest import Manifest
from quartet.wire.errors import Unavailable
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


@pytest.fixture
def workers(engine: VLLMEngine, llm: Deaf) -> Iterator[list[psutil.Process]]:
    """Two processes that compute for the engine, below its core, which is below this process."""
    with subprocess.Popen(["sh", "-c", "sleep 600 & sleep 600 & wait"]) as core:
        try:
            found: list[psutil.Process] = []
            while len(found) < 2:
                found = psutil.Process(core.pid).children()
            engine.processes = found
            yield found
        finally:
            for worker in found:
                with contextlib.suppress(psutil.NoSuchProcess):
                    worker.kill()
            core.kill()


@pytest.mark.processes
@pytest.mark.parametrize("method", ["answer", "commit"])
@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL])
async def test_the_workers_end_together_when_a_signal_stops_or_ends_one_while_the_engine_is_asked(
    engine: VLLMEngine,
    workers: list[psutil.Process],
    method: str,
    number: signal.Signals,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Left stopped, the process would outlive its replica and keep its GPU's memory; vLLM's engine tells nothing of
    one that was killed until the others have ended."""
    monkeypatch.setattr(engines, "LOOK_S", 0.02)
    began = time.monotonic()
    async with asyncio.timeout(30):
        call = asyncio.create_task(getattr(engine, method)(*CALLS[method]))
        await asyncio.sleep(0.1)
        workers[1].send_signal(number)
        with pytest.raises(Unavailable, match=f"worker process {workers[1].pid} has ended"):
            await call
    assert psutil.wait_procs(workers, timeout=10)[1] == []
    assert not engine.disorder
    assert time.monotonic() - began < ANSWER_S / 2


@pytest.mark.processes
async def test_an_engine_whose_worker_died_while_nothing_was_asked_is_ill_at_once(
    engine: VLLMEngine, llm: Deaf, workers: list[psutil.Process], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The core answers for as long as it waits for the other workers to end."""
    monkeypatch.setattr(Deaf, "_never", lambda _: asyncio.sleep(0))
    await engine.check_health()
    workers[0].kill()
    psutil.wait_procs(workers[:1], timeout=10)
    with pytest.raises(Unavailable, match=f"worker process {workers[0].pid} has ended"):
        await engine.check_health()
    assert psutil.wait_procs(workers, timeout=10)[1] == []


async def test_a_caller_that_gives_up_leaves_nothing_waiting(llm: Deaf, engine: VLLMEngine) -> None:
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await engine.commit(1)
    await asyncio.sleep(0)
    assert llm.cancelled == 1
