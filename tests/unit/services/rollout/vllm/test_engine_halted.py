"""An engine that leaves the simplest question open, as one does whose process stands still within a step."""

import asyncio
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from vllm.v1.engine.exceptions import EngineDeadError

from services.rollout.vllm import engine as engines
from tests.unit.services.rollout.vllm.test_engine_rest import Llm, make

pytestmark = pytest.mark.processes


class Silent(Llm):
    """One that answers nothing, and is dead once its process is."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        super().__init__(releases=False)
        self._process = process

    async def check_health(self) -> None:
        if self._process.poll() is not None:
            raise EngineDeadError

    async def get_weight_version(self) -> str:
        await asyncio.Event().wait()
        return ""


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    """A process below this one, as a replica's engine and that one's workers are."""
    with subprocess.Popen(["sleep", "600"]) as started:
        yield started
        started.kill()


async def test_a_process_that_a_signal_has_stopped_is_ended_whenever_the_engine_is_asked(
    policy_folder: Path, process: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Left stopped, the process would outlive its replica and keep its GPU's memory."""
    monkeypatch.setattr(engines, "LOOK_S", 0.02)
    engine = make(Silent(process), policy_folder)
    process.send_signal(signal.SIGSTOP)
    began = time.monotonic()
    with pytest.raises(EngineDeadError):
        await engine.answer()
    assert process.returncode == -signal.SIGKILL
    assert time.monotonic() - began < engines.ANSWER_S / 2


async def test_a_process_that_only_takes_long_goes_on(
    policy_folder: Path, process: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engines, "LOOK_S", 0.01)
    monkeypatch.setattr(engines, "ANSWER_S", 0.3)
    with pytest.raises(TimeoutError):
        await make(Silent(process), policy_folder).check_health()
    assert process.poll() is None
