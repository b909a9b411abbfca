"""Fixtures that start a critic in this process and call it."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.unit.critic_calls import OURS, adopt, claim, start


@pytest.fixture
async def critic(reward_folder: Path, root: Path) -> AsyncIterator[Any]:
    """Held by our run, which begins with it as it is."""
    made = await start(reward_folder, root)
    await claim(made, OURS)
    await adopt(made)
    yield made
    made._critic.stop()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "runs"
