"""The stream of experience: which versions may sample, what a batch takes, when it is valued, and what a restart
finds."""

import asyncio
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from orchestrator.config.loop import LoopConfig
from orchestrator.config.run import OrchestratorConfig
from orchestrator.data.prompts import PromptStream
from orchestrator.experience.beside import Beside
from orchestrator.experience.collector import Collector
from orchestrator.experience.experience import Collected
from orchestrator.experience.requests import Used
from orchestrator.experience.stream import Stream
from quartet.config.base import ConfigError
from quartet.wire.errors import DeadlineExceeded, Unavailable
from tests.unit.fake_run import FakeExperienceJournal
from tests.unit.fakes import Fakes, make_config, make_prompts
from tests.unit.virtual_time import in_virtual_time
from tests.unit.waiting import settled, until

STEPS = 5


class Bench:
    """A stream over fakes: two prompts a step, and a clock that no test waits for."""

    def __init__(self, folder: Path, staleness: int, **section: Any) -> None:
        self.fakes, self.journal, self.used = Fakes(), FakeExperienceJournal(), Used()
        section = {"batch_size": 2, "steps": STEPS, "loop": {"max_staleness": staleness}} | section
        config = make_config(folder, **section)
        prompts = PromptStream(make_prompts(20), 0, config.algorithm.samples_per_prompt)
        self.notes: list[str] = []
        collector = Collector(self.fakes.services, config, note=self.notes.append)
        self.opened = partial(Stream, config, prompts, collector, self.journal)  # type: ignore[arg-type]
        self.row_of = {int(prompts.dealt(number).prompt_ids[0]): number for number in range(20)}
        """Number of the first sample of the prompt with this token."""

    def open(self, beside: Beside, done: int = 0) -> Stream:
        """Opens the stream from step `done` on; policy version and critic step are the steps done."""
        return self.opened(beside, step=done, version=done, used=self.used)

    async def step(self, stream: Stream, step: int) -> list[int]:
        """Takes and uses the samples of a step, as the loop does; their numbers."""
        return self.use(await self.taken(stream, step))

    async def taken(self, stream: Stream, step: int) -> Collected:
        collected = await stream.take(step, critic_step=step - 1)
        return await stream.complete(step, collected, critic_step=step - 1)

    def use(self, collected: Collected) -> list[int]:
        numbers = collected.trained_numbers
        self.used = self.used.plus(numbers)
        return numbers

    def versions(self) -> list[Any]:
        return [call["versions"] for call in self.fakes.rollout.calls]

    def hold(self, *numbers: int) -> asyncio.Event:
        """Lets these samples come only when the event is set. With one prompt a call."""
        event, answer = asyncio.Event(), self.fakes.rollout.generate

        async def generate(prompts: Any, *arguments: Any, **options: Any) -> Any:
            held = self.row_of[int(prompts[0][0])] in numbers
            async for samples in answer(prompts, *arguments, **options):
                if held:
                    await event.wait()
                yield samples

        self.fakes.rollout.generate = generate  # type: ignore[method-assign]
        return event


async def test_lock_step_samples_nothing_ahead(policy_folder: Path) -> None:
    bench = Bench(policy_folder, 0)
    async with Beside() as beside:
        stream = bench.open(beside)
        for step in range(1, STEPS + 1):
            assert await bench.step(stream, step) == [2 * step - 2, 2 * step - 1]
            stream.served(step)
            await settled()
            assert bench.versions() == [(version, None) for version in range(step)]
    # Values are asked for sample by sample, as each is finished.
    assert [call["min_step"] for call in bench.fakes.critic.calls] == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]


@pytest.mark.parametrize("staleness", [1, 2, 3])
async def test_no_version_may_sample_that_is_staler_than_the_bound(policy_folder: Path, staleness: int) -> None:
    bench = Bench(policy_folder, staleness, prompts_per_call=1)
    async with Beside() as beside:
        stream = bench.open(beside)
        for step in range(1, STEPS + 1):
            assert await bench.step(stream, step) == [2 * step - 2, 2 * step - 1]
            await settled()
            # A push frees the slots of a batch; until it has committed, none is free.
            assert len(bench.versions()) == 2 * min(step + staleness, STEPS)
            stream.served(step)
    # Batch m is trained on by version m - 1. At most `staleness` older ones may sample it.
    assert bench.versions() == [(max(m - 1 - staleness, 0), None) for m in range(1, STEPS + 1) for _ in range(2)]


async def test_a_batch_takes_what_is_finished_first(policy_folder: Path) -> None:
    bench = Bench(policy_folder, 1, prompts_per_call=1)
    held = bench.hold(0, 2)
    async with Beside() as beside:
        stream = bench.open(beside)
        assert await bench.step(stream, 1) == [1, 3]
        assert bench.used == Used(0, frozenset({1, 3}))
        stream.served(1)
        await settled()
        # 4 and 5 are finished, but 0 and 2 may not wait: version 2 would be two ahead of the one that sampled them.
        waiting = asyncio.create_task(bench.step(stream, 2))
        await settled()
        assert not waiting.done()
        held.set()
        assert await waiting == [0, 2]
        assert bench.used == Used(4)
        stream.served(2)
        assert await bench.step(stream, 3) == [4, 5]


async def test_all_responses_to_a_prompt_are_in_one_batch(policy_folder: Path) -> None:
    algorithm = {"minibatch_size": 1, "samples_per_prompt": 2}
    bench = Bench(policy_folder, 1, batch_size=4, prompts_per_call=1, algorithm=algorithm)
    bench.row_of = {token: 2 * place for place, token in enumerate(list(bench.row_of)[::2])}
    first, answer, held = asyncio.Event(), bench.fakes.rollout.generate, iter([True])

    async def generate(*arguments: Any, **options: Any) -> Any:
        hold = next(held, False)  # the first call is for sample 0
        async for samples in answer(*arguments, **options):
            if hold:
                await first.wait()
            yield samples

    bench.fakes.rollout.generate = generate  # type: ignore[method-assign]
    async with Beside() as beside:
        stream = bench.open(beside)
        # Sample 1 is finished, but its group is not.
        assert await bench.step(stream, 1) == [2, 3, 4, 5]
        first.set()
        assert await bench.step(stream, 2) == [0, 1, 6, 7]


async def test_values_are_of_the_critic_that_the_batch_meets(policy_folder: Path) -> None:
    bench = Bench(policy_folder, 1)
    async with Beside() as beside:
        stream = bench.open(beside)
        first = await stream.take(1, critic_step=0)
        assert "values" not in first.columns
        assert "values" in (await stream.complete(1, first, critic_step=0)).columns
        stream.served(1)
        assert "values" in (await bench.taken(stream, 2)).columns
    # A batch at once when it is taken: the critic trains while samples finish.
    asked = [(call["min_step"], len(call["responses"])) for call in bench.fakes.critic.calls]
    assert asked == [(0, 2), (1, 2)]


async def test_a_restart_takes_what_the_journal_kept_and_samples_the_rest_again(policy_folder: Path) -> None:
    before, again = (Bench(policy_folder, 2, prompts_per_call=1) for _ in range(2))
    before.hold(0, 3)
    async with Beside() as beside:
        stream = before.open(beside)
        assert await before.step(stream, 1) == [1, 2]
        again.used = before.used  # a checkpoint: 0 was not used, 1 and 2 were
        stream.served(1)
        assert await before.step(stream, 2) == [4, 5]
        stream.served(2)
        # Killed while 0 and 3 are under way, the oldest that there are.
    again.journal.kept = {2: before.journal.kept[2]}
    async with Beside() as beside:
        stream = again.open(beside, done=1)
        assert await again.step(stream, 2) == [4, 5]
        stream.served(2)
        assert [await again.step(stream, step) for step in (3, 4, 5)] == [[0, 3], [6, 7], [8, 9]]
    assert again.used == Used(10)
    assert sorted(again.journal.kept) == [2, 3, 4, 5]
    # Beside what is kept for version 1 there is room for versions 2 and 3, then for 4.
    assert again.versions() == [(1, None)] * 4 + [(2, None)] * 2


@pytest.mark.parametrize("place", [0, 1])
async def test_what_another_timeline_left_in_the_journal_is_not_taken(policy_folder: Path, place: int) -> None:
    """A batch of which one sample was used already, in the steps that this run goes on from."""
    before, again = (Bench(policy_folder, 1) for _ in range(2))
    async with Beside() as beside:
        used = (await before.step(before.open(beside), 1))[place]
    again.used, again.journal.kept = Used().plus([used]), {2: before.journal.kept[1]}
    async with Beside() as beside:
        taken = (await again.open(beside, done=1).take(2, critic_step=1)).trained_numbers
    assert len(taken) == 2
    assert used not in taken


async def test_the_end_cancels_what_is_sampled_ahead(policy_folder: Path) -> None:
    bench = Bench(policy_folder, 1, prompts_per_call=1)
    rollout = bench.fakes.rollout
    rollout.gate = lambda sent: asyncio.sleep(600 if len(rollout.calls) > 2 else 0)
    async with Beside() as beside:
        await bench.step(bench.open(beside), 1)
        assert (len(rollout.calls), rollout.cancelled) == (4, 0)
    assert rollout.cancelled == 2


async def test_a_failure_ahead_ends_the_loop_at_once(policy_folder: Path) -> None:
    bench = Bench(policy_folder, 1)

    async def loop() -> None:
        async with Beside() as beside:
            stream = bench.open(beside)
            await bench.step(stream, 1)
            bench.fakes.reward.failure = Unavailable("the reward service is gone")
            stream.served(1)
            await stream.take(2, critic_step=1)
            await asyncio.Event().wait()  # the learners train

    with pytest.raises(ExceptionGroup) as caught:
        await loop()
    assert "the reward service is gone" in repr(caught.value.exceptions)
    assert sorted(bench.journal.kept) == [1]


async def test_a_wait_that_is_too_long_says_for_what(policy_folder: Path) -> None:
    bench = Bench(policy_folder, 1, prompts_per_call=1, timeouts={"take_s": 1})
    bench.hold(2, 3)
    bench.fakes.reference.hangs = True
    expected = (
        r"^step 1: no batch after 1 s \(timeouts.take_s\). "
        r"rollout: 2 samples for up to \d+ s, the first is number 2; "
        r"reference: 2 samples for up to \d+ s, the first is number 0; the replicas serve version 0, "
        r"version 0 trains next$"
    )
    with pytest.raises(DeadlineExceeded, match=expected):
        async with Beside() as beside:
            await bench.open(beside).take(1, critic_step=0)


async def test_a_user_hears_of_a_long_wait(policy_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing else would be seen of a replica that is being replaced."""
    bench = Bench(policy_folder, 0, prompts_per_call=1)
    held = bench.hold(1)
    said = re.compile(
        r"step 1 has waited \d+ s for samples\. rollout: 1 sample for up to \d+ s, the first is number 1"
    )
    async with Beside() as beside:
        stream = bench.open(beside)
        monkeypatch.setattr("orchestrator.experience.stream.LATE_S", 0.01)
        taken = asyncio.create_task(stream.take(1, critic_step=0))
        await until(lambda: sum(bool(said.fullmatch(note)) for note in bench.notes) == 2)
        held.set()
        await taken
        told = len(bench.notes)
        monkeypatch.setattr("orchestrator.experience.stream.LATE_S", 3600)
        stream.served(1)
        await stream.take(2, critic_step=1)
    assert len(bench.notes) == told


@in_virtual_time
async def test_a_user_hears_of_a_wait_that_is_three_times_as_long_as_the_last_one(policy_folder: Path) -> None:
    bench, told = Bench(policy_folder, 0, prompts_per_call=1), []
    async with Beside() as beside:
        stream = bench.open(beside)
        # After 30 s and 60 s; not before 240 s; after 600 s.
        for step, seconds in enumerate((80, 200, 700), start=1):
            asyncio.get_running_loop().call_later(seconds, bench.hold(2 * step - 1).set)
            await bench.step(stream, step)
            told.append(len(bench.notes))
            stream.served(step)
    assert told == [2, 2, 3]
    for note, (step, seconds) in zip(bench.notes, ((1, 30), (1, 60), (3, 600)), strict=True):
        assert note.startswith(f"step {step} has waited {seconds} s for samples. ")


async def test_several_failures_beside_the_loop_are_all_told() -> None:
    errors = Unavailable("gone"), OSError("broken")

    async def fail(error: Exception) -> None:
        raise error

    async def loop() -> None:
        async with Beside() as beside:
            for error in errors:
                beside.start(fail(error), "fails")
            await asyncio.Event().wait()

    with pytest.raises(ExceptionGroup) as caught:
        await loop()
    assert caught.value.exceptions == errors


def test_a_batch_is_not_sampled_further_ahead_than_the_bound_allows() -> None:
    assert LoopConfig(max_staleness=3).ahead == 3
    assert LoopConfig(max_staleness=3, depth=1).ahead == 1


def test_staleness_needs_its_correction(policy_folder: Path) -> None:
    section: dict[str, Any] = {
        "loop": {"max_staleness": 1},
        "algorithm": {"minibatch_size": 1, "importance_cap": None},
    }
    with pytest.raises(ConfigError, match="importance_cap: null turns off the importance weights"):
        make_config(policy_folder, **section)
    section["loop"]["max_staleness"] = 0
    assert isinstance(make_config(policy_folder, **section), OrchestratorConfig)
