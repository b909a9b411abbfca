"""Unfinished responses are sent to the services that keep what they compute of them."""

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from orchestrator.experience.collector import Collector
from orchestrator.experience.scoring.beginnings import ENOUGH_TOKENS
from quartet.wire.errors import Unavailable
from services.rollout.sample import Part
from tests.unit.fakes import Fakes, make_config, make_requests


@pytest.fixture
def fakes() -> Fakes:
    return Fakes()


def make_collector(fakes: Fakes, folder: Path, **section: Any) -> Collector:
    return Collector(fakes.services, make_config(folder, **section), end_ids=(2,))


def part(index: int, length: int) -> Part:
    return Part(index, np.full(length, 7, np.int32), np.zeros(length, np.float32), ((1, 0, length),))


async def collect(fakes: Fakes, collector: Collector, *messages: dict[int, int]) -> None:
    """Collects two samples, before which messages come with that many tokens of each unfinished response."""

    async def gate(sent: int) -> None:
        if sent == 0:
            for lengths in messages:
                if fakes.rollout.on_parts is None:
                    return
                fakes.rollout.on_parts({index: part(index, length) for index, length in lengths.items()})
                await asyncio.sleep(0.01)

    fakes.rollout.gate = gate
    await collector.collect(make_requests(2), version=3, critic_step=0)


async def test_what_has_come_is_sent_once_there_is_enough_of_it(fakes: Fakes, policy_folder: Path) -> None:
    half = ENOUGH_TOKENS // 2
    collector = make_collector(fakes, policy_folder, sampling={"max_new_tokens": 999, "min_new_tokens": 4})
    await collect(fakes, collector, {0: half}, {0: half + 1, 1: half}, {0: half + 9, 1: half}, {1: 3 * half})
    for service in (fakes.reward, fakes.reference):
        assert [[len(response) for response in call["responses"]] for call in service.begun] == [
            [half + 1, half],
            [3 * half],
        ]
        assert [prompt.tolist() for prompt in service.begun[0]["prompts"]] == [[10], [11]]
    assert fakes.reference.begun[0]["temperature"] == 1.0
    assert fakes.reference.begun[0]["min_new_tokens"] == 4
    assert fakes.reference.begun[0]["end_ids"] == (2,)


async def test_a_service_that_keeps_nothing_is_not_asked_again(fakes: Fakes, policy_folder: Path) -> None:
    collector = make_collector(fakes, policy_folder)
    fakes.reward.begins = lambda: asyncio.sleep(0, False)
    await collect(fakes, collector, {0: 300}, {0: 600})
    assert (len(fakes.reward.begun), len(fakes.reference.begun)) == (1, 2)
    fakes.reference.begins = lambda: asyncio.sleep(0, False)
    for _ in range(2):
        await collect(fakes, collector, {0: 300})
    assert (len(fakes.reward.begun), len(fakes.reference.begun)) == (1, 3)
    assert [call["parts"] for call in fakes.rollout.calls] == [True, True, False]


async def test_one_call_at_a_time_is_under_way_and_ends_with_the_samples(fakes: Fakes, policy_folder: Path) -> None:
    left: list[str] = []

    async def hang() -> bool:
        try:
            await asyncio.Event().wait()
        finally:
            left.append("ended")
        return True

    fakes.reward.begins = hang
    scored = fakes.reward.answer

    def score(response: Any) -> float:
        assert left == ["ended"]  # before the whole responses are asked about
        return float(scored(response))

    fakes.reward.answer = score
    async with asyncio.timeout(10):
        await collect(fakes, make_collector(fakes, policy_folder), {0: 300}, {0: 600}, {0: 900})
    assert (len(fakes.reward.begun), len(fakes.reference.begun)) == (1, 3)
    assert left == ["ended"]


async def test_a_failure_costs_nothing_but_time(fakes: Fakes, policy_folder: Path) -> None:
    async def fail() -> bool:
        raise Unavailable("the replica died")

    fakes.reward.begins = fakes.reference.begins = fail
    await collect(fakes, make_collector(fakes, policy_folder), {0: 300}, {0: 600})
    assert len(fakes.reward.begun) == 2  # asked again: another replica may do
    assert len(fakes.reward.responses()) == 2


async def test_without_a_reference_only_the_reward_service_is_asked(policy_folder: Path) -> None:
    fakes = Fakes(with_reference=False)
    collector = make_collector(
        fakes, policy_folder, services={"reference": None}, ppo={"minibatch_size": 1, "kl": {"coef": 0}}
    )
    await collect(fakes, collector, {0: 300})
    assert (len(fakes.reward.begun), len(fakes.reference.begun)) == (1, 0)
