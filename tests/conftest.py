"""Fixtures that unit and integration tests share: the tiny models of tests/models.py, each built once."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.models import make_policy, make_reward

if TYPE_CHECKING:  # unit tests do without Ray and gRPC
    from tests.cluster import Quartet


@pytest.fixture(scope="session")
def policy_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama with untied embeddings."""
    return make_policy(tmp_path_factory.mktemp("models") / "policy", kind="llama", tied=False)


@pytest.fixture(scope="session")
def reward_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A reward model of one label."""
    return make_reward(tmp_path_factory.mktemp("models") / "reward")


@pytest.fixture(scope="session")
async def quartet(
    tmp_path_factory: pytest.TempPathFactory, policy_folder: Path, reward_folder: Path
) -> AsyncIterator["Quartet"]:
    """The four services on a Ray head of their own: one for all integration and end-to-end tests."""
    from tests.cluster import running_quartet

    async with running_quartet(tmp_path_factory.mktemp("quartet"), policy_folder, reward_folder) as running:
        yield running
