"""The quartet of all tests that use one: started with the first of them, ended after the last test."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.cluster import Quartet


@pytest.fixture(scope="session", name="quartet")
async def shared_quartet(
    tmp_path_factory: pytest.TempPathFactory, policy_folder: Path, reward_folder: Path
) -> "AsyncIterator[Quartet]":
    """The four services on a Ray head of their own."""
    # Imported here, as units need none of it.
    from tests.cluster import running_quartet

    async with running_quartet(tmp_path_factory.mktemp("quartet"), policy_folder, reward_folder) as running:
        yield running
