"""Collecting experience: each sample judged once, as soon as it is there, and no call left behind."""

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from orchestrator.experience import Collector
from services.common.errors import ServiceError, Unavailable
from services.rollout.sample import Sampling
from tests.unit.fakes import Fakes, make_config, make_prompts


@pytest.fixture
def fakes() -> Fakes:
    return Fakes()


def make_collector(fakes: Fakes, folder: Path, **section: Any) -> Collector:
    return Collector(fakes.services, make_config(folder, **{"prompts_per_call": 2} | section))


def leaves(error: BaseException) -> list[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        return [leaf for inner in error.exceptions for leaf in leaves(inner)]
    return [error]


async def test_every_prompt_has_its_experience_in_the_order_of_the_prompts(fakes: Fakes, policy_folder: Path) -> None:
    prompts = make_prompts(5)
    collected = await make_collector(fakes, policy_folder).collect(prompts, step=1, version=3, critic_step=0)
    assert [experience.prompt for experience in collected.experiences] == prompts
    for row, experience in enumerate(collected.experiences):
        length = row + 1
        assert experience.sample.response_ids.tolist() == [10 + row] * length
        assert (experience.score, experience.truncated) == (10 + row, row % 2 == 1)
        assert experience.ref_logprobs.tolist() == [-1.5] * length
        assert experience.values.tolist() == [0.5] * length
        # -1 - -1.5 at every token.
        assert experience.kl == 0.5 * length
    assert collected.tokens == 1 + 2 + 3 + 4 + 5
    assert collected.generate_s > 0
    assert collected.score_s >= 0


async def test_every_sample_is_judged_once_by_each_service(fakes: Fakes, policy_folder: Path) -> None:
    await make_collector(fakes, policy_folder).collect(make_prompts(5), step=1, version=3, critic_step=0)
    expected = [[10 + row] * (row + 1) for row in range(5)]
    for service in (fakes.reward, fakes.reference, fakes.critic):
        assert service.responses() == expected
        for call in service.calls:
            assert [prompt.tolist() for prompt in call["prompts"]] == [[r[0]] for r in call["responses"]]


async def test_what_is_asked_for(fakes: Fakes, policy_folder: Path) -> None:
    collector = make_collector(
        fakes,
        policy_folder,
        sampling={"temperature": 0.5, "max_new_tokens": 9, "min_new_tokens": 2},
        timeouts={"generate_s": 11, "score_s": 12},
    )
    await collector.collect(make_prompts(5), step=1, version=3, critic_step=0)
    asked = [[int(prompt[0]) for prompt in call["prompts"]] for call in fakes.rollout.calls]
    assert asked == [[10, 11], [12, 13], [14]]
    for call in fakes.rollout.calls:
        assert call["sampling"] == Sampling(max_new_tokens=9, temperature=0.5, min_new_tokens=2)
        assert (call["versions"], call["timeout_s"]) == ((3, 3), 11)
    assert sorted(label for call in fakes.reward.calls for label in call["labels"]) == ["0", "1", "2", "3", "4"]
    for call in fakes.reward.calls:
        assert call["labels"] == [str(response[0] - 10) for response in call["responses"]]
    assert {call["temperature"] for call in fakes.reference.calls} == {0.5}
    for service in (fakes.reward, fakes.reference, fakes.critic):
        assert {call["timeout_s"] for call in service.calls} == {12}


async def test_judging_begins_before_generation_ends(fakes: Fakes, policy_folder: Path) -> None:
    async def until_the_first_is_judged(sent: int) -> None:
        async with asyncio.timeout(10):
            while sent == 1 and not all(s.calls for s in (fakes.reward, fakes.reference, fakes.critic)):
                await asyncio.sleep(0)

    fakes.rollout.gate = until_the_first_is_judged
    collected = await make_collector(fakes, policy_folder).collect(make_prompts(2), step=1, version=1, critic_step=0)
    assert len(collected.experiences) == 2


async def test_values_are_left_out_where_nobody_needs_them(fakes: Fakes, policy_folder: Path) -> None:
    collector = make_collector(fakes, policy_folder)
    collected = await collector.collect(make_prompts(3), step=1, version=1, critic_step=None)
    assert fakes.critic.calls == []
    assert [experience.values.tolist() for experience in collected.experiences] == [[], [], []]
    assert [experience.score for experience in collected.experiences] == [10, 11, 12]


@pytest.mark.parametrize("failing", ["reward", "reference", "critic"])
async def test_a_failure_cancels_everything_else(failing: str, fakes: Fakes, policy_folder: Path) -> None:
    error = Unavailable("gone")
    judges = {"reward": fakes.reward, "reference": fakes.reference, "critic": fakes.critic}
    for name, service in judges.items():
        service.failure, service.hangs = (error, False) if name == failing else (None, True)

    async def second_sample_never_comes(sent: int) -> None:
        if sent == 1:
            await asyncio.Event().wait()

    fakes.rollout.gate = second_sample_never_comes
    async with asyncio.timeout(10):
        with pytest.raises(ExceptionGroup) as caught:
            await make_collector(fakes, policy_folder).collect(make_prompts(4), step=1, version=1, critic_step=0)
    assert set(leaves(caught.value)) == {error}
    assert fakes.rollout.cancelled == 2
    for name, service in judges.items():
        assert service.cancelled == (0 if name == failing else len(service.calls))


async def test_a_failed_generation_cancels_the_judging(fakes: Fakes, policy_folder: Path) -> None:
    fakes.reward.hangs = True

    async def fail(sent: int) -> None:
        if sent == 1:
            async with asyncio.timeout(10):
                while not fakes.reward.calls:
                    await asyncio.sleep(0)
            raise Unavailable("gone")

    fakes.rollout.gate = fail
    async with asyncio.timeout(10):
        with pytest.raises(ExceptionGroup) as caught:
            await make_collector(fakes, policy_folder).collect(make_prompts(2), step=1, version=1, critic_step=0)
    assert [str(leaf) for leaf in leaves(caught.value)] == ["gone"]
    assert fakes.reward.cancelled == 1


async def test_a_failure_amid_a_stream_of_samples_is_told_as_it_is(fakes: Fakes, policy_folder: Path) -> None:
    fakes.reward.failure = Unavailable("gone")
    collector = make_collector(fakes, policy_folder, prompts_per_call=30)
    with pytest.raises(ExceptionGroup) as caught:
        await collector.collect(make_prompts(60), step=1, version=1, critic_step=0)
    assert {type(leaf) for leaf in leaves(caught.value)} == {Unavailable}
    assert issubclass(Unavailable, ServiceError)


async def seeds(folder: Path, *, step: int, **section: Any) -> list[list[int] | None]:
    fakes = Fakes()
    await make_collector(fakes, folder, **section).collect(make_prompts(6), step=step, version=1, critic_step=0)
    return [call["seeds"] for call in fakes.rollout.calls]


async def test_seeds_differ_by_row_step_and_run_and_can_be_had_again(policy_folder: Path) -> None:
    found = [await seeds(policy_folder, step=step, seed=seed) for step in (1, 2) for seed in (0, 1)]
    every = [value for run in found for call in run for value in call or []]
    assert len(every) == len(set(every)) == 4 * 6
    assert all(0 <= value < 2**63 and isinstance(value, int) for value in every)
    assert await seeds(policy_folder, step=1, seed=0) == found[0]
    assert await seeds(policy_folder, step=1, sampling={"seeded": False}) == [None, None, None]


async def test_nothing_asked_nothing_given(fakes: Fakes, policy_folder: Path) -> None:
    collected = await make_collector(fakes, policy_folder).collect([], step=1, version=1, critic_step=0)
    assert (collected.experiences, collected.tokens) == ([], 0)
    assert np.isfinite(collected.generate_s)
