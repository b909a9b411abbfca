"""Sampling ahead on the deployed services: it overlaps, no token breaks the bound, and every sample is used once."""

import pytest

from orchestrator.monitoring.metrics import read_metrics
from tests.cluster import Quartet
from tests.runs import Run

STEPS, BOUND = 6, 2


@pytest.fixture(scope="module")
def lines(quartet: Quartet) -> list[dict[str, float]]:
    """The metrics of a run of six steps with two batches ahead."""
    run = Run(quartet, "ahead")
    with run.changing() as raw:
        raw["orchestrator"] |= {"steps": STEPS, "loop": {"max_staleness": BOUND}, "evaluation": {"every": 3}}
    run.finish()
    return [line for line in read_metrics(run.folder / "metrics.jsonl") if line["step"] > 0]


def test_no_token_is_older_than_the_bound_and_most_are_older_than_lock_step(lines: list[dict[str, float]]) -> None:
    ages = [line["policy/staleness"] for line in lines]
    assert len(ages) == STEPS
    assert max(ages) <= BOUND
    # The first batch finds nothing ahead of it; from the third on, a batch was admitted two versions before.
    assert ages[0] == 0
    assert min(ages[2:]) >= 1


def test_nothing_is_sampled_in_vain_or_used_twice(lines: list[dict[str, float]]) -> None:
    batch = lines[0]["samples/used"]
    assert [line["samples/used"] for line in lines] == [batch] * STEPS
    assert [line["samples/asked"] - line["samples/repeated"] for line in lines] == [batch] * STEPS


def test_the_policy_still_learns_from_its_own_log_probs(lines: list[dict[str, float]]) -> None:
    # Lock-step's mismatch is rounding. Ahead, the samplers' weights are truly others, and the correction sees it.
    assert lines[0]["mismatch/max_abs"] < 1e-4
    assert max(line["mismatch/max_abs"] for line in lines[2:]) > 1e-3
    assert all(line["policy/ratio_mean"] == pytest.approx(1, abs=0.2) for line in lines)
