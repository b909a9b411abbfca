"""The engine of transformers: commits that fail, or come to no end in time."""

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from examples.plain_engine import PlainEngine
from quartet.models.loading import load_causal
from quartet.weight_transfer.manifest import Manifest
from quartet.weight_transfer.sender import make_sender
from services.rollout.config import RolloutConfig
from services.rollout.interface import NO_VERSION


class Pushes:
    """An engine, and pushes to it, each of weights that are all one number."""

    def __init__(self, folder: Path) -> None:
        self.engine = PlainEngine(RolloutConfig(model=str(folder)))
        self._weights = dict(load_causal(str(folder), "float32").named_parameters())
        self._manifest = Manifest.of(self._weights, bucket_bytes=1 << 16)
        self._sender = make_sender("ipc", self._manifest, host="127.0.0.1", stall_s=5)
        self._loaded = 0

    def load(self, number: float) -> None:
        """Writes weights into the learner's memory."""
        self._loaded += 1
        weights = ((name, torch.full_like(weight, number)) for name, weight in self._weights.items())
        self._sender.load(weights, self._loaded)

    async def receive(self, number: float) -> None:
        """Carries out a push up to its commit."""
        self.load(number)
        group = {"backend": "ipc", "senders": [["", self._sender.rendezvous()]], "membership": 1, "stall_s": 5.0}
        await self.engine.join(group | {"rank": 1, "world_size": 2})
        await self.engine.pause("keep")
        await self.engine.receive(self._manifest)

    @property
    def number(self) -> float:
        """The number that all of the model's weights are; ValueError if they differ."""
        [number] = {value for weight in self.engine._model.parameters() for value in weight.unique().tolist()}
        return float(number)

    def close(self) -> None:
        """Ends the engine, then the sender."""
        self.engine.shutdown()
        self._sender.close()


@pytest.fixture
def pushes(policy_folder: Path) -> Iterator[Pushes]:
    made = Pushes(policy_folder)
    yield made
    made.close()


async def test_after_a_commit_that_failed_the_old_version_is_not_served(pushes: Pushes) -> None:
    engine = pushes.engine
    await pushes.receive(1.0)
    await engine.commit(1)
    assert (pushes.number, engine.version, await engine.abort()) == (1.0, 1, True)
    await pushes.receive(2.0)
    pushes.load(3.0)
    with pytest.raises(RuntimeError, match="wrote other weights while these were loaded"):
        await engine.commit(2)
    assert not await engine.abort()
    assert (engine.version, engine.checksum, engine._turn.locked()) == (NO_VERSION, "", True)
    await pushes.receive(4.0)
    await engine.commit(4)
    assert (pushes.number, engine.version, engine._turn.locked()) == (4.0, 4, False)


async def test_a_commit_without_time_is_not_left_behind(pushes: Pushes, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, begun, go_on, load = pushes.engine, asyncio.Event(), threading.Event(), pushes.engine._load
    loop = asyncio.get_running_loop()

    def slow() -> None:
        loop.call_soon_threadsafe(begun.set)
        assert go_on.wait(60)
        load()

    await pushes.receive(1.0)
    monkeypatch.setattr(engine, "_load", slow)
    commit = asyncio.create_task(engine.commit(1))
    await begun.wait()
    commit.cancel()  # as a deadline does
    with pytest.raises(asyncio.CancelledError):
        await commit
    abort = asyncio.create_task(engine.abort())
    assert not (await asyncio.wait([abort], timeout=0.2))[0]  # while the memory that it would close is read
    go_on.set()
    assert not await abort
    assert engine.version == NO_VERSION
