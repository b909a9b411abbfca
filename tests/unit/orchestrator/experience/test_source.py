"""Experience that is sampled ahead: which versions may sample it, when it is valued, and what is left at the end."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from orchestrator.config.loop import LoopConfig
from orchestrator.config.run import OrchestratorConfig
from orchestrator.data.prompts import PromptStream
from orchestrator.experience.collector import Collected, Collector
from orchestrator.experience.source import ExperienceSource
from services.common.config.base import ConfigError
from services.common.wire.errors import Unavailable
from tests.unit.fake_run import FakeExperienceJournal
from tests.unit.fakes import Fakes, make_config, make_prompts

STEPS = 5


class Bench:
    """A source over fakes: two prompts a step, and a clock that no test waits for."""

    def __init__(self, folder: Path, ahead: int) -> None:
        self.fakes, self.journal = Fakes(), FakeExperienceJournal()
        config = make_config(folder, batch_size=2, steps=STEPS, loop={"max_staleness": ahead})
        prompts, collector = PromptStream(make_prompts(2), 0), Collector(self.fakes.services, config)
        self.source = ExperienceSource(config, prompts, collector, self.journal)  # type: ignore[arg-type]

    async def take(self, step: int, **state: int) -> Collected:
        """Two samples have been used in each step before."""
        return await self.source.take(step, first=2 * (step - 1), **state)

    def versions(self) -> list[Any]:
        return [call["versions"] for call in self.fakes.rollout.calls]


async def settled() -> None:
    for _ in range(50):
        await asyncio.sleep(0)


async def test_lock_step_samples_nothing_ahead(policy_folder: Path) -> None:
    bench = Bench(policy_folder, ahead=0)
    async with bench.source:
        for step in range(1, STEPS + 1):
            await bench.take(step, version=step + 6, critic_step=step)
            await settled()
            assert bench.versions() == [(version, None) for version in range(7, step + 7)]
    # Values are asked for sample by sample, as each is finished.
    assert [call["min_step"] for call in bench.fakes.critic.calls] == [1, 1, 2, 2, 3, 3, 4, 4, 5, 5]


@pytest.mark.parametrize("ahead", [1, 2, 3])
async def test_no_version_may_sample_that_is_staler_than_the_batches_ahead(policy_folder: Path, ahead: int) -> None:
    bench = Bench(policy_folder, ahead=ahead)
    async with bench.source:
        for step in range(1, STEPS + 1):
            await bench.take(step, version=step + 6, critic_step=step)
            await settled()
            assert len(bench.versions()) == min(step + ahead, STEPS)
    # Batch m is trained on by version m + 6, before later ones exist. At most `ahead` older ones may sample it.
    assert bench.versions() == [(max(m + 6 - ahead, 7), None) for m in range(1, STEPS + 1)]


async def test_values_are_of_the_critic_that_the_batch_meets(policy_folder: Path) -> None:
    bench = Bench(policy_folder, ahead=1)
    async with bench.source:
        taken = [await bench.take(step, version=step, critic_step=step + 40) for step in (1, 2)]
    assert all(batch.valued for batch in taken)
    asked = [(call["min_step"], len(call["responses"])) for call in bench.fakes.critic.calls]
    # The first batch as its samples finish; the second, which the critic trained beside, at once when it is taken.
    assert asked == [(41, 1), (41, 1), (42, 2)]


async def test_what_the_journal_kept_is_neither_sampled_nor_written_again(policy_folder: Path) -> None:
    before, again = Bench(policy_folder, ahead=2), Bench(policy_folder, ahead=2)
    async with before.source:
        for step in range(1, STEPS + 1):
            await before.take(step, version=step, critic_step=step)
    again.journal.kept = {step: before.journal.kept[step] for step in (2, 3)}
    async with again.source:
        for step in range(2, STEPS + 1):
            await again.take(step, version=step, critic_step=step)
    assert again.versions() == [(2, None), (3, None)]
    assert sorted(again.journal.kept) == [2, 3, 4, 5]


async def test_leaving_cancels_what_is_sampled_ahead(policy_folder: Path) -> None:
    bench = Bench(policy_folder, ahead=1)
    async with bench.source:
        await bench.take(1, version=1, critic_step=0)
        bench.fakes.rollout.gate = lambda sent: asyncio.Event().wait()
        await bench.take(2, version=2, critic_step=1)
        await settled()
        assert bench.fakes.rollout.cancelled == 0
    assert bench.fakes.rollout.cancelled == 1


async def test_a_failure_ahead_is_raised_when_its_batch_is_taken(policy_folder: Path) -> None:
    bench = Bench(policy_folder, ahead=1)
    async with bench.source:
        await bench.take(1, version=1, critic_step=0)
        await settled()
        bench.fakes.reward.failure = Unavailable("the reward service is gone")
        await bench.take(2, version=2, critic_step=1)  # was sampled and scored before
        await settled()
        with pytest.raises(ExceptionGroup) as caught:
            await bench.take(3, version=3, critic_step=2)
    assert "the reward service is gone" in repr(caught.value.exceptions)


def test_a_batch_is_not_sampled_further_ahead_than_the_bound_allows() -> None:
    assert LoopConfig(max_staleness=3).ahead == 3
    assert LoopConfig(max_staleness=3, depth=1).ahead == 1
    with pytest.raises(ConfigError, match=r"depth \(2\) must not exceed max_staleness \(1\)"):
        LoopConfig.parse({"max_staleness": 1, "depth": 2}, "loop")


def test_staleness_needs_its_correction(policy_folder: Path) -> None:
    section: dict[str, Any] = {"loop": {"max_staleness": 1}, "ppo": {"minibatch_size": 1, "importance_cap": None}}
    with pytest.raises(ConfigError, match="importance_cap: null turns off the importance weights"):
        make_config(policy_folder, **section)
    section["loop"]["max_staleness"] = 0
    assert isinstance(make_config(policy_folder, **section), OrchestratorConfig)
