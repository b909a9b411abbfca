"""Runs under random faults. `python -m tests.chaos` has as many as one likes."""

from collections.abc import Iterator

import pytest
import yaml
from rich.console import Console

from orchestrator.deployment import serving
from tests.chaos.campaign import campaign, doubled
from tests.chaos.report import table
from tests.cluster import START_S, Quartet

# Drawn from many; of each kind of process and moment one is in `make test`: test_resume.py, test_starts.py,
# tests/integration/test_faults.py.
pytestmark = [pytest.mark.exhaustive, pytest.mark.timeout(3600)]


@pytest.fixture
def two_of_each(quartet: Quartet) -> Iterator[Quartet]:
    """The quartet with two replicas of each service that may have two."""
    before = yaml.safe_dump(quartet.raw)
    doubled(quartet.raw)
    _deploy(quartet)
    yield quartet
    quartet.raw.clear()
    quartet.raw.update(yaml.safe_load(before))
    _deploy(quartet)


def _deploy(quartet: Quartet) -> None:
    path = quartet.folder / "scaled.yaml"
    path.write_text(yaml.safe_dump(quartet.raw))
    serving.deploy(quartet.cluster, path)
    serving.await_running(
        quartet.cluster, tuple(each["name"] for each in quartet.raw["applications"]), print, START_S
    )


@pytest.mark.parametrize(("seed", "count", "staleness"), [(1, 40, 0), (2, 40, 2)])
async def test_faults_end_no_run_and_each_sample_is_used_once(
    two_of_each: Quartet, seed: int, count: int, staleness: int
) -> None:
    outcomes = [each async for each in campaign(two_of_each, seed, count, 20, staleness, print)]
    Console(width=120).print(table(outcomes, seed, staleness))
    assert [problem for outcome in outcomes for problem in outcome.problems] == []
    assert sum(each.found for outcome in outcomes for each in outcome.struck) >= count - 1
