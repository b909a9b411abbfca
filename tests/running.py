"""The fixture of the folders whose tests use a quartet: each starts one, which ends with the folder's last test."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.cluster import Quartet, running_quartet


@pytest.fixture(scope="package", name="quartet")
async def shared_quartet(
    tmp_path_factory: pytest.TempPathFactory, policy_folder: Path, reward_folder: Path
) -> AsyncIterator[Quartet]:
    """The four services on a Ray head of their own: one for all tests of the folder whose conftest imports this."""
    async with running_quartet(tmp_path_factory.mktemp("quartet"), policy_folder, reward_folder) as running:
        yield running
