"""A training of the Python API and its ends; the run itself is a fake one."""

import asyncio
import subprocess
import sys
import threading
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from orchestrator import api
from quartet.config.base import ConfigError
from tests.configuration import REPO

FAKE = """
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

from orchestrator import api

async def train(deployment, progress, **options):
    try:
        progress.start(3, 0)
        for step in (1, 2, 3):
            progress.step(step, {}, 0.0)
            await progress.pause()
    finally:
        print("ended in order", flush=True)

module = ModuleType("orchestrator.commands.train")
module.train = train
sys.modules[module.__name__] = module
api.Deployment = SimpleNamespace(load=lambda path: None)
api.cluster = SimpleNamespace(join=lambda: None)
"""


class Fake:
    """A run of three steps in the place of the real one."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.fails_at = 0
        self.joining: Any = lambda: None
        """Called where a real run sets the process up for Ray."""
        self.checkpoint: Any = lambda: asyncio.sleep(0)
        """Awaited where a real run takes a checkpoint of a step that is done."""

    async def train(self, deployment: Any, progress: Any, **options: Any) -> Path:
        progress.start(3, 0)
        for step in (1, 2, 3):
            if step == self.fails_at:
                raise ValueError("the run's own error")
            self.steps.append(step)
            progress.step(step, {"score/mean": 0.5}, 0.0)
            await self.checkpoint()
            await progress.pause()
        return Path("runs/x")


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Fake:
    made, module = Fake(), ModuleType("orchestrator.commands.train")
    module.train = made.train  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(api, "Deployment", SimpleNamespace(load=lambda path: None))
    monkeypatch.setattr(api, "cluster", SimpleNamespace(join=lambda: made.joining()))
    return made


def test_steps_come_when_they_are_asked_for(fake: Fake) -> None:
    with api.Training("x.yaml") as training:
        assert next(training).number == 1
        assert fake.steps == [1]
        assert [step.number for step in training] == [2, 3]
    with api.Training("x.yaml") as training:
        assert next(training).number == 1
    assert fake.steps == [1, 2, 3, 1]
    assert list(training) == []


def test_the_error_of_a_run_is_what_its_context_ends_with(fake: Fake) -> None:
    fake.fails_at = 2
    with pytest.raises(ValueError, match=r"^the run's own error$"), api.Training("x.yaml") as training:
        for _ in training:
            pass
    training.close()
    with api.Training("x.yaml") as training:
        next(training)
        with pytest.raises(ValueError, match=r"^the run's own error$"):
            next(training)
        training.close()


def test_one_that_is_closed_before_it_has_begun_takes_no_step(fake: Fake) -> None:
    """Ctrl-C may come while Ray and torch are imported."""
    joining, go_on = threading.Event(), threading.Event()

    def join() -> None:
        joining.set()
        go_on.wait(60)

    fake.joining = join
    training = api.Training("x.yaml")
    asking = threading.Thread(target=lambda: list(training), daemon=True)
    asking.start()
    assert joining.wait(60)
    closing = threading.Thread(target=training.close, daemon=True)
    closing.start()
    while not training._closed:
        pass
    go_on.set()
    closing.join(60)
    asking.join(60)
    assert not closing.is_alive()
    assert not asking.is_alive()
    assert fake.steps == []
    fresh = api.Training("x.yaml")
    fresh.close()
    assert list(fresh) == []
    assert fake.steps == []


def test_one_that_is_closed_in_its_last_checkpoint_ends_as_it_would(fake: Fake) -> None:
    """Ctrl-C may come while it is written, when the step is asked for no more."""
    written, go_on = threading.Event(), threading.Event()

    async def checkpoint() -> None:
        if fake.steps == [1, 2, 3]:
            written.set()
            await asyncio.to_thread(go_on.wait, 60)

    fake.checkpoint = checkpoint
    training = api.Training("x.yaml")
    assert [next(training).number for _ in range(2)] == [1, 2]
    asking = threading.Thread(target=lambda: next(training), daemon=True)
    asking.start()
    assert written.wait(60)
    closing = threading.Thread(target=training.close, daemon=True)
    closing.start()
    while not training._closed:
        pass
    go_on.set()
    closing.join(20)
    assert not closing.is_alive()
    assert list(training) == []


def test_to_begin_again_and_to_go_on_exclude_each_other(fake: Fake) -> None:
    with pytest.raises(ConfigError, match=r"--overwrite starts again and --resume continues; give one of them"):
        api.Training("x.yaml", overwrite=True, resume=True)


@pytest.mark.parametrize("left", ["for step in api.Training('x.yaml'): break", "t = api.Training('x.yaml'); next(t)"])
def test_a_script_ends_with_a_run_that_nobody_closed(left: str) -> None:
    script = [sys.executable, "-c", f"{FAKE}\n{left}\nprint('the end', flush=True)"]
    done = subprocess.run(script, cwd=REPO, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == ["the end", "ended in order"]
