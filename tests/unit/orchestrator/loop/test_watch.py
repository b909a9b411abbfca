"""Checks of a run while it goes on: a service that becomes another one ends it, with a word on what changed."""

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from orchestrator.clients import Infos
from orchestrator.loop.identities import identities
from orchestrator.loop.watch import check_unchanged, repeating, tell_endings
from protos import common_pb2, critic_pb2, reference_pb2, reward_pb2, rollout_pb2
from quartet.config.base import ConfigError
from quartet.security.credentials import Life
from quartet.wire.errors import Unavailable, leaves
from tests.unit.waiting import settled, until


def model(name: str) -> common_pb2.ModelInfo:
    return common_pb2.ModelInfo(name=name, model_hash=f"{name}-{'0' * 40}", tokenizer_hash="words" + "0" * 40)


def scored_by(name: str) -> reward_pb2.ScorerInfo:
    scorer = reward_pb2.ScorerIdentity(name=f"model:{name}", model_hash=name + "0" * 40)
    return reward_pb2.ScorerInfo(model=model("policy"), identity=scorer)


BEGAN = Infos(
    rollout_pb2.RolloutInfo(model=model("policy")),
    scored_by("judge"),
    reference_pb2.ReferenceInfo(model=model("policy")),
    critic_pb2.CriticInfo(model=model("critic")),
)


class Services:
    """Answers with `present`; fails with `failure` if there is one."""

    def __init__(self) -> None:
        self.present = BEGAN
        self.failure: Exception | None = None

    async def infos(self, timeout_s: float) -> Infos:
        if self.failure:
            raise self.failure
        return self.present


@pytest.fixture
def services() -> Any:
    return Services()


async def check(services: Any) -> None:
    await check_unchanged(services, identities(BEGAN))


async def test_services_that_stay_what_they_are_or_are_away_are_not_news(services: Any) -> None:
    # Training moves the rollout's version and the critic's step.
    services.present = replace(BEGAN, rollout=rollout_pb2.RolloutInfo(model=model("policy"), policy_version=7))
    await check(services)
    services.failure = ExceptionGroup("", [Unavailable("reward.Info: being replaced")])
    await check(services)


async def test_a_reward_service_with_another_model_is_named_with_what_to_do(services: Any) -> None:
    services.present = replace(BEGAN, reward=scored_by("stricter"))
    with pytest.raises(ConfigError) as caught:
        await check(services)
    first, last = str(caught.value).splitlines()
    assert first == "reward.scorer: model:judge (judge0000000) when the run began, model:stricter (stricter0000) now"
    assert "--resume --accept-changed-services" in last


async def test_what_goes_wrong_in_a_check_ends_the_block(services: Any) -> None:
    reached: list[str] = []

    async def block() -> None:
        async with repeating(lambda: check(services), 0.02):
            reached.append("begun")
            services.present = replace(BEGAN, reward=scored_by("stricter"))
            await asyncio.sleep(30)
            reached.append("gone on")

    with pytest.raises(ExceptionGroup) as caught:
        await asyncio.wait_for(block(), 10)
    [error] = leaves(caught.value)
    assert (type(error), reached) == (ConfigError, ["begun"])


async def test_a_check_that_fails_at_the_beginning_lets_nothing_begin(services: Any) -> None:
    services.present = replace(BEGAN, reward=scored_by("stricter"))
    with pytest.raises(ConfigError):
        async with repeating(lambda: check(services), 30):
            raise AssertionError("begun")


async def test_checks_end_with_the_block() -> None:
    events: list[str] = []

    async def third_hangs() -> None:
        events.append("check")
        if len(events) == 3:
            try:
                await asyncio.Event().wait()
            finally:
                events.append("ended")

    async with asyncio.timeout(10), repeating(third_hangs, 0.001):
        await until(lambda: len(events) == 3)
    assert events == ["check", "check", "check", "ended"]
    await settled()
    assert len(events) == 4


async def test_the_user_is_told_when_a_tenth_of_a_certificate_is_left_and_at_each_half_of_that() -> None:
    notes: list[str] = []
    told: dict[Path, float] = {}
    for left_h, count in ((50, 0), (9.9, 1), (9, 1), (5, 1), (4.9, 2), (2, 3), (-1, 4), (-2, 4), (99, 4), (8, 5)):
        one = Life(Path("client.pem"), left_h * 3600, 100 * 3600)
        await tell_endings(["a:1", "b:1"], notes.append, told, {"a:1": one, "b:1": None}.get)
        assert len(notes) == count
    assert notes[0].startswith("client.pem ends in 9.9 h")
    assert notes[3].startswith("client.pem has ended")
