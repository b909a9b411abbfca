"""Functions that do what no function should: each costs its own pairs alone, and a pair that is not scored has no
number."""

import re
from typing import Any

import pytest

from quartet.wire.errors import FailedPrecondition
from services.reward.kinds import FunctionScorerConfig
from services.reward.scorers.function import FunctionScorer
from tests.unit.scorer_calls import batcher, called

pytestmark = pytest.mark.processes
FAILED, TIMEOUT, NOT_FINITE = "FAILED", "TIMEOUT", "NOT_FINITE"
GIVES: dict[str, Any] = {
    **{"prints": 1.0, "forks": 1.0, "forks and ends": FAILED, "ends its parent": FAILED, "ends its group": FAILED},
    **{"stops its parent": FAILED},
    **{"ends later": 1.0, "writes later": 1.0, "claims much": FAILED, "turns its socket": FAILED},
    **{"blocks its socket": None, "shuts its socket": FAILED, "limits itself": None, "breaks json": 1.0},
    **{"says much": FAILED, "says nothing": FAILED, "has a long name": FAILED, "raises itself": FAILED},
    **{"goes round": FAILED, "half": 0.5, "true": 1.0, "numpy": 0.25, "array": 0.25, "decimal": 0.25},
    **{"large": NOT_FINITE, "not a number": NOT_FINITE},
}
"""Label -> the score or outcome of its pair; None: a score, or FAILED where nothing of the process was left."""


def scorer(name: str, **options: Any) -> FunctionScorer:
    settings = {"pair_timeout_s": 20.0, "workers": 2, "memory_gib": 1.0} | options
    return FunctionScorer(FunctionScorerConfig(kind="function", function=f"tests.hostile:{name}", **settings))


@pytest.fixture(scope="module", params=["hostile", "hostile_async"])
def shared(request: pytest.FixtureRequest) -> FunctionScorer:
    """A scorer that outlives what its pairs do."""
    return scorer(request.param)


@pytest.mark.parametrize("label", GIVES)
async def test_what_one_pair_does_costs_no_other_its_score(shared: FunctionScorer, label: str) -> None:
    """Neither those of its batch nor those that the process has after it."""
    passes = batcher(shared)
    call = await called(passes, "", label, "")
    assert [call.told[0], call.told[2]] == [1.0, 1.0]
    assert call.told[1] == GIVES[label] or (GIVES[label] is None and call.told[1] in (1.0, FAILED))
    if call.told[1] == FAILED:
        assert len(call.reason(1).encode()) < 2000
    for _ in range(3):
        assert (await called(passes, "")).told == [1.0]
    assert (await called(passes, *[""] * 3)).told == [1.0] * 3


@pytest.mark.parametrize("label", ["spins", "is not cancelled", "blocks later"])
async def test_coroutines_that_do_not_yield_are_killed(label: str) -> None:
    passes = batcher(scorer("hostile_async", pair_timeout_s=2.0))
    call = await called(passes, "", label, "")
    assert [call.told[0], call.told[2]] == [1.0, 1.0]
    assert call.told[1] == (1.0 if label == "blocks later" else TIMEOUT)
    assert (await called(passes, "", "")).told == [1.0, 1.0]


@pytest.mark.parametrize("label", ["cancels all", "stops its loop", "closes its loop", "leaves", "interrupts"])
async def test_coroutines_that_break_their_loop_cost_no_later_pair_its_score(label: str) -> None:
    passes = batcher(scorer("hostile_async", workers=1))
    call = await called(passes, "", label, "")
    assert call.told == [1.0, FAILED, 1.0]
    for _ in range(3):
        assert (await called(passes, "")).told == [1.0]


@pytest.mark.parametrize("label", ["a number in words", "numbers", "complex"])
async def test_what_is_no_number_fails_the_call_and_no_other(label: str) -> None:
    """Such a defect of the function ends a run."""
    passes = batcher(scorer("hostile"))
    with pytest.raises(FailedPrecondition, match=re.escape("tests.hostile:hostile gave ")) as caught:
        await called(passes, "", label, "")
    assert len(str(caught.value)) < 1000
    assert (await called(passes, "", "")).told == [1.0, 1.0]
