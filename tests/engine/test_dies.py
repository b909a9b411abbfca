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
