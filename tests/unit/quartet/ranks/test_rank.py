"""The process of a rank."""

import gc
import subprocess
import sys

import pytest

from quartet.ranks.ranks import Ranks
from tests.unit.rank_processes import spawned

pytestmark = pytest.mark.processes


class Trainer:
    """The trainer that the rank's process runs."""

    def __init__(self, ranks: Ranks) -> None:
        """Makes nothing."""

    def searched(self) -> float:
        """Objects that a search for garbage looks at, for each that it does not."""
        return len(gc.get_objects()) / gc.get_freeze_count()


async def test_what_was_imported_is_not_searched_for_garbage() -> None:
    async with spawned(Trainer, ranks=1) as (group, _):
        assert await group.call(Trainer.searched, 60) < 0.05


def test_the_class_of_a_rank_is_read_without_the_libraries_of_its_model() -> None:
    """Until it is, the rank's process is not known, and nothing notices that it stands still."""
    code = "import sys, quartet.ranks.rank; print(sorted({'torch', 'deepspeed', 'ray'} & sys.modules.keys()))"
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert told.stdout == "[]\n"
