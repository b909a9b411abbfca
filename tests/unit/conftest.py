"""Fixtures that several unit tests share."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from services.common.ranks.group import RankGroup


@pytest.fixture(scope="module")
async def benches(policy_folder: Path, reward_folder: Path) -> AsyncIterator[dict[int, "RankGroup"]]:
    """One rank, and two, each in processes of its own."""
    # Here and not above: most unit tests do without DeepSpeed.
    from tests.unit.layouts import Bench
    from tests.unit.rank_processes import spawned

    async with (
        spawned(Bench, policy_folder, reward_folder, ranks=1) as (one, _),
        spawned(Bench, policy_folder, reward_folder, ranks=2) as (two, _),
    ):
        yield {1: one, 2: two}
