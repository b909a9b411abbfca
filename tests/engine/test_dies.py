"""A real engine that dies or stands still during a phase of a push: its replica learns of it at once."""

import asyncio
import contextlib
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from vllm.v1.engine.exceptions import EngineDeadError

from quartet.wire.errors import Unavailable
from services.rollout.sample import Sampling
from tests.engine_process import EngineProcess
from tests.models import make_policy
from tests.preloaded import all_of
from tests.pushing import EngineHost

LONG_S = 60.0
"""Deadline of a phase of a push; a caller would wait as long for an engine that died."""


async def lost(folder: Path, asked: str, ends: bool) -> float:
    """Seconds from the fault to the error of what an engine was `asked`. With `ends` the process is killed; otherwise
    it only stands still."""
    host = EngineHost()
    await host.start({"model": str(folder), "dtype": "float32", "max_length": 64, "kv_cache_mib": 16})
    engine: list[psutil.Process] = []
    try:
        engine += [
            process
            for child in psutil.Process().children(recursive=True)
            if "spawn_main" in " ".join(child.cmdline())
            for process in all_of(child)
        ]
        if asked == "commit":
            await host._engine.pause("keep")
        for process in engine:
            process.suspend()
        request: Coroutine[Any, Any, Any] = (
            host._engine.commit(1) if asked == "commit" else host._engine.score([np.asarray([1, 2, 3], np.int32)])
        )
        began, answer = time.monotonic(), asyncio.create_task(request)
        if ends:
            await asyncio.sleep(1)
            assert not answer.done()
            for process in engine:
                process.kill()
            began = time.monotonic()
        try:
            async with asyncio.timeout(LONG_S):
                await answer
        except (EngineDeadError, Unavailable):
            return time.monotonic() - began
        raise AssertionError("it was to fail")
    finally:
        for process in engine:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        await host.shutdown()


async def without_a_worker(folder: Path, killed: int) -> float:
    """Seconds from the death of one of two workers that compute to the errors of a request and of a question whether
    the engine still lives, and to the end of the other one."""
    host = EngineHost()
    own = {"dtype": "float32", "max_length": 2048, "kv_cache_mib": 64, "tensor_parallel_size": 2}
    await host.start({"model": str(folder)} | own)
    try:
        long, begun = Sampling(max_new_tokens=2000, ignore_eos=True), asyncio.Event()
        prompt = np.asarray([1, 2, 3], np.int32)
        request = asyncio.create_task(host._engine.generate(0, prompt, long, seed=0, report=lambda part: begun.set()))
        await begun.wait()
        host._engine.processes[killed].kill()
        began = time.monotonic()

        async def told() -> None:
            while True:  # until the engine is busy with a step that does not end
                await host._engine.answer()
                await asyncio.sleep(0.1)

        async with asyncio.timeout(LONG_S):
            ended = await asyncio.gather(request, told(), return_exceptions=True)
        assert [type(one) for one in ended] == [Unavailable, Unavailable]
        assert psutil.wait_procs(host._engine.processes, timeout=10)[1] == []
        return time.monotonic() - began
    finally:
        await host.shutdown()


MORE = pytest.mark.exhaustive  # each fault and each phase once


@pytest.mark.parametrize(
    ("asked", "ends"),
    [
        pytest.param("commit", True, id="killed-commit"),
        pytest.param("score", False, id="frozen-score"),
        pytest.param("score", True, id="killed-score", marks=MORE),
        pytest.param("commit", False, id="frozen-commit", marks=MORE),
    ],
)
async def test_what_an_engine_is_asked_fails_soon_after_it_dies_or_stands_still(
    tmp_path: Path, engine: EngineProcess, asked: str, ends: bool
) -> None:
    folder = make_policy(tmp_path / "policy", kind="llama", tied=False)
    seconds = await engine.call(lost, folder, asked, ends)
    print(f"{asked} failed after {seconds:.1f} s")
    assert seconds < LONG_S / 3


@pytest.mark.exhaustive
@pytest.mark.parametrize("killed", [0, 1])
async def test_the_death_of_a_worker_is_told_before_the_other_would_have_ended_by_itself(
    tmp_path: Path, engine: EngineProcess, killed: int
) -> None:
    folder = make_policy(tmp_path / "policy", kind="llama", tied=False, max_position_embeddings=2048)
    seconds = await engine.call(without_a_worker, folder, killed)
    print(f"told after {seconds:.1f} s")
    assert seconds < 5  # for which vLLM waits
