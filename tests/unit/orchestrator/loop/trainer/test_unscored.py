"""Runs whose reward service does not score every response: sent again, dropped with its group, or the end."""

import asyncio
import math
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from orchestrator.config.unscored import PAUSE_S
from orchestrator.experience.experience import Collected, Scored
from orchestrator.experience.journal import ExperienceJournal
from orchestrator.experience.stream import DiscardedError
from quartet.config.base import ConfigError
from quartet.wire.errors import leaves
from quartet.wire.outcomes import Outcome, Unscored
from tests.unit.fake_run import Stage

PLAIN = {"minibatch_size": 1, "kl": {"coef": 0}}
PAIRS = {"kind": "grpo", "samples_per_prompt": 2, "minibatch_size": 2}


def failed(reason: str = "it broke") -> Unscored:
    return Unscored(Outcome.FAILED, reason)


class Service:
    """Scores a response by its first token, but for those for which `problem` says why not; counts how often each is
    asked about."""

    def __init__(self, problem: Callable[[int, int], Unscored | None]) -> None:
        """`problem` is asked with the prompt's row and the number of times that it was asked about before."""
        self._problem, self.asked = problem, Counter[int]()

    def __call__(self, response: Any) -> Any:
        row = int(response[0]) - 10
        self.asked[row] += 1
        return self._problem(row, self.asked[row] - 1) or float(response[0])


@pytest.fixture(autouse=True)
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The pauses of a run, which take no time."""
    slept: list[float] = []
    sleep = asyncio.sleep

    async def at_once(seconds: float) -> None:
        slept.extend([seconds] * (seconds > 0))
        await sleep(0)

    monkeypatch.setattr("orchestrator.experience.collector.asyncio.sleep", at_once)
    return slept


def stage(folder: Path, service: Service, **section: Any) -> Stage:
    made = Stage(folder, evaluates=False, **{"algorithm": PLAIN} | section)
    made.fakes.reward.answer = service
    return made


async def test_what_may_pass_is_asked_for_again_and_changes_nothing_else(
    policy_folder: Path, pauses: list[float]
) -> None:
    """Row 0 fails twice in each step, as do by its outcome a call that was late and one that was refused."""
    outcomes = (Outcome.FAILED, Outcome.TIMEOUT, Outcome.REFUSED)
    service = Service(lambda row, before: Unscored(outcomes[before % 3], "") if not row and before % 3 < 2 else None)
    made, plain = stage(policy_folder, service), stage(policy_folder, Service(lambda row, before: None))
    await made.run()
    await plain.run()
    assert made.checkpoints.states == plain.checkpoints.states
    assert service.asked == {0: 9, 1: 3}
    assert pauses == [PAUSE_S, 2 * PAUSE_S] * 3
    assert [line.get("samples/unscored") for line in made.log.lines.values()] == [0] * 3
    for one, other in zip(made.experience.kept.values(), plain.experience.kept.values(), strict=True):
        assert one.columns.pack() == other.columns.pack()


async def test_one_that_is_asked_for_again_delays_no_other(policy_folder: Path) -> None:
    """The batch of two prompts takes those that have come, at a staleness that allows it."""
    held = asyncio.Event()
    service = Service(lambda row, before: failed() if row == 0 and not held.is_set() else None)
    loop = {"max_staleness": 2}
    made = stage(policy_folder, service, steps=2, loop=loop, unscored={"retries": 1_000_000})
    made.prompts = 4

    async def taken() -> None:
        while 1 not in made.log.lines:
            await asyncio.sleep(0)
        held.set()

    async with asyncio.TaskGroup() as group:
        group.create_task(taken())
        group.create_task(made.run())
    first = [prompt.row for prompt in made.experience.kept[1].prompts]
    assert 0 not in first
    assert service.asked[0] > 1


@pytest.mark.parametrize("outcome", [Outcome.NOT_APPLICABLE, Outcome.NOT_FINITE, Outcome.FAILED])
async def test_the_run_ends_with_the_sample_the_outcome_and_the_reason(policy_folder: Path, outcome: Outcome) -> None:
    service = Service(lambda row, before: Unscored(outcome, "the judge is gone") if row == 1 else None)
    made = stage(policy_folder, service)
    with pytest.raises(ExceptionGroup) as caught:
        await made.run()
    [error] = [leaf for leaf in leaves(caught.value) if isinstance(leaf, ConfigError)]
    attempts = 3 if outcome is Outcome.FAILED else 1
    named = outcome.name.lower().replace("_", " ")
    assert f"prompt row 1 has no score: {named}: the judge is gone (attempt {attempts}, " in str(error)
    assert "--resume" in str(error)
    assert service.asked[1] == attempts
    assert not made.policy.batches


def dropping(folder: Path, problem: Callable[[int, int], Unscored | None], **section: Any) -> Stage:
    """Two responses to each of 20 prompts, without a critic, of which those without a score are dropped."""
    given: dict[str, Any] = {"algorithm": PAIRS, "services": {"critic": None}, "batch_size": 4, "steps": 3}
    made = stage(folder, Service(problem), **given | {"unscored": {"retries": 0, "then": "drop"}} | section)
    made.prompts = 20
    return made


async def test_a_group_with_a_response_that_has_no_score_is_dropped_whole(policy_folder: Path) -> None:
    """The second response to each prompt of an even row has no score: by the first the prompt was seen."""
    made = dropping(policy_folder, lambda row, before: failed() if row % 2 == 0 and before % 2 else None)
    await made.run()
    used, seen, last = [], set[int](), made.checkpoints.states[-1]
    for step, line in made.log.lines.items():
        batch = made.experience.kept[step]
        assert all(prompt.row % 2 for prompt in batch.prompts)
        assert np.isfinite(batch.columns["score"]).all()
        assert [each.row % 2 for each in batch.discarded] == [0] * len(batch.discarded)
        unscored = [each for each in batch.discarded if math.isnan(each.score)]
        assert 2 * len(unscored) == len(batch.discarded)
        assert (line["samples/unscored"], line["samples/discarded"]) == (len(unscored), len(batch.discarded))
        assert line["samples/asked"] == 4 + len(batch.discarded)
        assert all(math.isfinite(value) for value in line.values())
        used += batch.numbers
        seen |= {prompt.row for prompt in batch.prompts} | {
            each.row for each in batch.discarded if each not in unscored
        }
        assert line["prompts/seen"] == len(seen)
    assert sorted(used) == list(range(len(used)))
    assert last.used.below == len(used)
    assert last.prompts_seen == seen
    assert {row % 2 for row in seen} == {0, 1}


async def test_what_is_dropped_is_the_same_after_a_restart(policy_folder: Path) -> None:
    def problem(row: int, before: int) -> Unscored | None:
        return failed() if row % 3 == 0 else None

    straight, again = (dropping(policy_folder, problem) for _ in range(2))
    await straight.run()
    state = straight.checkpoints.states[1]
    again.experience.kept = {2: straight.experience.kept[2]}
    await again.go_on(type(state).model_validate_json(state.model_dump_json()))
    assert again.checkpoints.states == straight.checkpoints.states[2:]
    assert again.experience.kept[3].columns.pack() == straight.experience.kept[3].columns.pack()


async def test_a_scorer_that_hardly_scores_ends_the_run_in_spite_of_dropping(policy_folder: Path) -> None:
    made = dropping(
        policy_folder, lambda row, before: failed(), unscored={"retries": 0, "then": "drop", "max_dropped": 2}
    )
    with pytest.raises(
        DiscardedError, match=r"^step 1: 4 groups .* 8 responses have no score, 2 for each .*max_dropped.*--resume$"
    ):
        await made.run()


async def test_what_is_dropped_and_what_the_algorithm_refuses_have_a_limit_each(policy_folder: Path) -> None:
    """One of three prompts in turn gets no scores, one equal scores, and one is trained on. For a batch of two, two
    are dropped and two refused: each fewer than the four that its limit allows, but four together."""
    turns, asked = dict[int, int](), Counter[int]()

    def answer(response: Any) -> Any:
        row = int(response[0])
        turn = turns.setdefault(row, len(turns)) % 3
        asked[row] += 1
        return (failed(), 1.0, float(asked[row] % 2))[turn]

    limits = {"algorithm": PAIRS | {"zero_variance": "resample", "max_discarded": 2}}
    unscored = {"retries": 0, "then": "drop", "max_dropped": 2}
    made = dropping(policy_folder, lambda row, before: None, steps=2, unscored=unscored, **limits)
    made.fakes.reward.answer = answer
    await made.run()
    assert [line["samples/discarded"] for line in made.log.lines.values()] == [8, 8]
    assert [line["samples/unscored"] for line in made.log.lines.values()] == [4, 4]


def test_the_journal_keeps_a_sample_without_a_score_as_one_without(policy_folder: Path, tmp_path: Path) -> None:
    made = dropping(policy_folder, lambda row, before: None)
    journal = ExperienceJournal(tmp_path, made.config)
    journal.write(1, Collected.of([], 0, [Scored(3, 7, math.nan), Scored(4, 7, 1.5)]))
    again = journal.read(1, lambda number: pytest.fail("it holds no samples"))
    assert again is not None
    (_, _, nothing), (_, _, score) = again.discarded
    assert math.isnan(nothing)
    assert score == 1.5
