"""A real engine that dies while it carries out a phase of a push: its replica learns of it at once."""

import asyncio
import time
from pathlib import Path

import psutil
from vllm.v1.engine.exceptions import EngineDeadError

from tests.engine_process import EngineProcess
from tests.models import make_policy
from tests.preloaded import fork_of
from tests.pushing import EngineHost

LONG_S = 60.0
"""Deadline of a phase of a push; a caller would wait as long for an engine that died."""


async def _lost(folder: Path) -> float:
    """Seconds from the death of an engine to the error of the commit that it was carrying out."""
    host = EngineHost()
    await host.start({"model": str(folder), "dtype": "float32", "max_length": 64, "kv_cache_mib": 16})
    try:
        [engine] = [
            fork_of(child)
            for child in psutil.Process().children(recursive=True)
            if "spawn_main" in " ".join(child.cmdline())
        ]
        await host._engine.pause("keep")
        engine.suspend()  # so that it dies in the middle
        committing = asyncio.create_task(host._engine.commit(1))
        await asyncio.sleep(1)
        assert not committing.done()
        engine.kill()
        began = time.monotonic()
        try:
            async with asyncio.timeout(LONG_S):
                await committing
        except EngineDeadError:
            return time.monotonic() - began
        raise AssertionError("it was to fail")
    finally:
        await host.shutdown()


def lost(folder: Path) -> float:
    """Carries it out in the process for engines."""
    from tests.engine_process import _loop

    return _loop.run_until_complete(_lost(folder))


async def test_a_commit_whose_engine_dies_fails_at_once(tmp_path: Path, engine: EngineProcess) -> None:
    seconds = await engine._run(lost, make_policy(tmp_path / "policy", kind="llama", tied=False))
    print(f"the commit failed {seconds:.1f} s after the engine's death")
    assert seconds < LONG_S / 3
