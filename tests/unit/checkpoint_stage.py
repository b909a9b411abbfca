"""Checkpoints in a folder, with fakes of the learners and the journal."""

import asyncio
from pathlib import Path
from typing import Any

from orchestrator.config.checkpoint import CheckpointConfig
from orchestrator.loop.checkpoint import Checkpoints


class FakeLearner:
    """The policy's part or the critic's; writing waits for `gate`."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.taken: list[tuple[str, int]] = []
        self.folders: list[Path] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.failures: dict[str, Exception] = {}

    async def take_snapshot(self, checkpoint: Path, step: int, *, copies: bool) -> None:
        self.copies = copies
        self.fail("take")
        self.taken.append((self.name, step))
        self.folders.append(checkpoint / self.name)

    async def write_snapshot(self, checkpoint: Path) -> None:
        assert checkpoint / self.name == self.folders[-1]
        await self.gate.wait()
        self.fail("write")
        self.folders[-1].mkdir()
        (self.folders[-1] / "layout.json").write_text("{}")

    def fail(self, when: str) -> None:
        if when in self.failures:
            raise self.failures.pop(when)


class FakeJournal:
    forgotten = -1

    def forget(self, step: int) -> None:
        self.forgotten = step


class Stage:
    """Checkpoints in a folder, with fakes around them."""

    def __init__(self, folder: Path, with_critic: bool = True, **config: Any) -> None:
        self.folder = folder
        self.policy, self.critic, self.journal = FakeLearner("policy"), FakeLearner("critic"), FakeJournal()
        learners: Any = [self.policy, self.critic] if with_critic else [self.policy]
        self.notes: list[str] = []
        self.checkpoints = Checkpoints(
            folder,
            CheckpointConfig(**{"every": 10, "keep": 2} | config),
            learners,
            self.journal,  # type: ignore[arg-type]
            self.notes.append,
        )

    def checkpoint_names(self) -> list[str]:
        return sorted(path.name for path in self.folder.glob("*"))
