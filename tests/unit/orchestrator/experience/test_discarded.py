"""Groups that the algorithm does not admit: another prompt takes their place, also over restarts, up to a limit."""

import random
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from orchestrator.algorithms.contract import Group
from orchestrator.algorithms.ppo import PPO
from orchestrator.config.run import OrchestratorConfig
from orchestrator.data.prompts import PromptStream
from orchestrator.experience.beside import Beside
from orchestrator.experience.collector import Collector
from orchestrator.experience.experience import Collected, Scored
from orchestrator.experience.journal import ExperienceJournal
from orchestrator.experience.requests import Used
from orchestrator.experience.stream import DiscardedError, Stream
from orchestrator.loop.state import TrainState
from quartet.wire.codec import Floats
from tests.unit.fake_run import FakeExperienceJournal, Stage
from tests.unit.fakes import Fakes, make_config, make_prompts
from tests.unit.waiting import settled

PROMPTS = 20


class Choosy(PPO):
    """Admits no group of the prompts `refused`: a fake's score is the first token, 10 + the prompt's row."""

    refused: tuple[int, ...] = ()
    """Rows of prompts."""
    most: int = 3
    """Groups that may be discarded for each one of a batch."""
    slope: float = 0
    """Added to each score at each step, as weights that change do."""

    def score(self, scores: Mapping[str, Floats], step: int) -> Floats:
        return super().score(scores, step) + np.float32(self.slope * step)

    @property
    def discard_limit(self) -> int:
        return self.most

    def admit(self, group: Group) -> bool:
        scores = group.scores["score"]
        assert len(scores) == len(group.lengths) == len(group.truncated) == self.samples_per_prompt
        assert group.lengths.tolist() == (scores - 9).tolist()
        assert group.truncated.tolist() == (scores % 2 == 1).tolist()
        return int(scores[0]) - 10 not in self.refused


def choosy(config: OrchestratorConfig, *refused: int, most: int = 3, slope: float = 0) -> OrchestratorConfig:
    algorithm = Choosy(**config.algorithm.model_dump(), refused=refused, most=most, slope=slope)
    return config.model_copy(update={"algorithm": algorithm})


def dropped(batch: Collected) -> list[int]:
    return [each.number for each in batch.discarded]


class Bench:
    """A stream over fakes, of which the prompts with these numbers, in the order in which they are dealt, are
    refused."""

    def __init__(self, folder: Path, staleness: int, *refused: int, most: int = 3, **section: Any) -> None:
        self.fakes, self.journal = Fakes(), FakeExperienceJournal()
        given = {"batch_size": 2, "steps": 5, "prompts_per_call": 1, "loop": {"max_staleness": staleness}}
        config = make_config(folder, **given | section)
        prompts = PromptStream(make_prompts(PROMPTS), 0, config.algorithm.samples_per_prompt)
        each = config.algorithm.samples_per_prompt
        rows = [prompts.dealt(number * each).row for number in refused]
        self.config = choosy(config, *rows, most=most, slope=0.5)
        collector = Collector(self.fakes.services, self.config)
        self.opened = partial(Stream, self.config, prompts, collector, self.journal)  # type: ignore[arg-type]
        self.state = TrainState(step=0, first_version=0, first_critic_step=0)

    async def steps(self, beside: Beside, count: int) -> list[list[int]]:
        """Takes and uses so many batches from where the state is; their numbers."""
        state, taken = self.state, []
        stream = self.opened(beside, step=state.step, version=state.policy_version, used=state.used)
        for _ in range(count):
            step = self.state.step + 1
            batch = await stream.take(step, critic_step=step - 1)
            batch = await stream.complete(step, batch, critic_step=step - 1)
            taken.append(self.use(batch))
            stream.served(step)
            await settled()
        return taken

    def use(self, batch: Collected) -> list[int]:
        numbers = batch.trained_numbers
        self.state = self.state.advanced(
            kl_coef=None,
            normalisers=self.state.normalisers,
            asked=len(batch.numbers),
            used=batch.scored,
            discarded=len(batch.discarded),
        )
        return numbers


async def test_the_next_prompts_take_the_places_of_those_that_were_discarded(policy_folder: Path) -> None:
    bench = Bench(policy_folder, 0, 1, 2, 6)
    async with Beside() as beside:
        assert await bench.steps(beside, 3) == [[0, 3], [4, 5], [7, 8]]
    state = bench.state
    assert (state.samples_used, state.samples_discarded, state.samples_asked) == (6, 3, 9)
    assert state.used == Used(9)
    assert [dropped(bench.journal.kept[step]) for step in (1, 2, 3)] == [[1, 2], [], [6]]
    # Samples in place of others are valued at once like these, by the critic that the batch meets.
    assert [call["min_step"] for call in bench.fakes.critic.calls] == [0, 0, 0, 0, 1, 1, 2, 2, 2]


async def test_a_group_is_discarded_as_a_whole_when_its_last_response_is_finished(policy_folder: Path) -> None:
    algorithm = {"minibatch_size": 1, "samples_per_prompt": 2}
    bench = Bench(policy_folder, 0, 0, batch_size=4, algorithm=algorithm)
    async with Beside() as beside:
        assert await bench.steps(beside, 1) == [[2, 3, 4, 5]]
    assert bench.state.samples_discarded == 2
    assert dropped(bench.journal.kept[1]) == [0, 1]


@pytest.mark.parametrize("seed", range(10))
async def test_at_lock_step_no_order_of_answers_changes_what_is_trained_on(policy_folder: Path, seed: int) -> None:
    draw = random.Random(seed)
    refused = draw.sample(range(PROMPTS), 8)
    bench = Bench(policy_folder, 0, *refused, batch_size=3, steps=3, most=9)
    answer = bench.fakes.rollout.generate

    async def generate(*arguments: Any, **options: Any) -> Any:
        async for samples in answer(*arguments, **options):
            for _ in range(draw.randrange(30)):
                await settled()
            yield samples

    bench.fakes.rollout.generate = generate  # type: ignore[method-assign]
    kept = [number for number in range(PROMPTS) if number not in refused]
    async with Beside() as beside:
        assert await bench.steps(beside, 3) == [kept[:3], kept[3:6], kept[6:9]]
    assert bench.state.used == Used(kept[8] + 1)


@pytest.mark.parametrize("staleness", [0, 1, 2])
@pytest.mark.parametrize("journal", [False, True])
async def test_a_restart_neither_repeats_what_was_discarded_nor_trains_on_it(
    policy_folder: Path, staleness: int, journal: bool
) -> None:
    """Killed after step 3, back to the checkpoint of step 1: with the journal steps 2 and 3 come from there."""
    refused = (0, 2, 3, 7, 8)
    before, again = (Bench(policy_folder, staleness, *refused) for _ in range(2))
    async with Beside() as beside:
        first = await before.steps(beside, 1)
        again.state = before.state
    before.state, before.journal.kept = TrainState(step=0, first_version=0, first_critic_step=0), {}
    async with Beside() as beside:
        straight = await before.steps(beside, 5)
    assert straight[:1] == first
    again.journal.kept = {step: before.journal.kept[step] for step in (2, 3)} if journal else {}
    async with Beside() as beside:
        resumed = await again.steps(beside, 4)
    if journal or staleness == 0:
        assert resumed[:2] == straight[1:3]
    numbers = [number for batch in first + resumed for number in batch]
    assert len(set(numbers)) == 10
    assert not set(numbers) & set(refused)
    assert again.state.samples_used == 10
    if staleness == 0:
        assert resumed == straight[1:]
        assert again.state == before.state
    # Each is scored as the step that it was discarded for scores.
    for step, batch in again.journal.kept.items():
        assert all(each.score == 10 + each.row + 0.5 * step for each in batch.scored)
    # Nothing is left out but what was refused: all numbers below the last are used up.
    assert sorted({*numbers, *refused}) == list(range(max(numbers) + 1))


async def test_beyond_the_limit_the_run_ends_with_what_to_do(policy_folder: Path) -> None:
    bench = Bench(policy_folder, 0, *range(1, PROMPTS), most=3)
    expected = r"^step 1: 6 groups of responses were discarded, 3 for each one of a batch .*max_discarded.*--resume$"
    with pytest.raises(DiscardedError, match=expected):
        async with Beside() as beside:
            await bench.steps(beside, 1)
    assert len(bench.fakes.rollout.calls) == 2 + 5  # the sixth is not replaced


async def test_the_limit_is_of_each_step(policy_folder: Path) -> None:
    bench = Bench(policy_folder, 1, 0, 1, 2, 3, 6, 7, 8, 9, 10, most=3)
    async with Beside() as beside:
        assert await bench.steps(beside, 2) == [[4, 5], [11, 12]]
    assert bench.state.samples_discarded == 9


async def test_a_discarded_group_among_those_sampled_ahead_delays_no_batch(policy_folder: Path) -> None:
    bench = Bench(policy_folder, 2, 1, 4)
    async with Beside() as beside:
        assert await bench.steps(beside, 4) == [[0, 2], [3, 5], [6, 7], [8, 9]]


def test_the_journal_keeps_the_numbers_of_what_was_discarded(tmp_path: Path, policy_folder: Path) -> None:
    journal = ExperienceJournal(tmp_path, make_config(policy_folder))
    discarded = Scored(3, 7, 0.1), Scored(4, 7, -2.0)
    journal.write(1, replace(Collected.of([], 0, discarded), generate_s=0.5, score_s=0.25))
    again = journal.read(1, lambda number: make_prompts(1)[0])
    assert again is not None
    assert again.discarded == discarded


async def test_a_whole_run_counts_them_and_goes_on_from_a_checkpoint_bit_for_bit(policy_folder: Path) -> None:
    def stage() -> Stage:
        made = Stage(policy_folder, evaluates=False, steps=4, seed=0, prompts_per_call=1)
        made.prompts = PROMPTS
        rows = [PromptStream(make_prompts(PROMPTS), 0, 1).dealt(number).row for number in (1, 2, 5)]
        made.config = choosy(made.config, *rows)
        return made

    straight, again = stage(), stage()
    await straight.run()
    discarded = [straight.log.lines[step]["samples/discarded"] for step in range(1, 5)]
    assert discarded == [2, 1, 0, 0]
    assert [straight.log.lines[step]["samples/asked"] for step in range(1, 5)] == [4, 3, 2, 2]
    assert straight.log.lines[4]["samples/used_total"] == 8
    checkpoint = TrainState.model_validate_json(straight.checkpoints.states[1].model_dump_json())
    assert (checkpoint.step, checkpoint.samples_discarded) == (1, 2)
    assert len(checkpoint.prompts_seen) == 4
    rows = [PromptStream(make_prompts(PROMPTS), 0, 1).dealt(number).row for number in range(11)]
    # Every prompt that was dealt, discarded or not.
    assert straight.checkpoints.states[4].prompts_seen == {*rows}
    await again.go_on(checkpoint)
    assert again.checkpoints.states == straight.checkpoints.states[2:]
    for (batch, seed), (other, other_seed) in zip(straight.policy.batches[1:], again.policy.batches, strict=True):
        assert seed == other_seed
        for name in ("prompts", "responses", "logprobs", "old_logprobs", "advantages"):
            for row, same in zip(getattr(batch, name), getattr(other, name), strict=True):
                assert np.asarray(row).tobytes() == np.asarray(same).tobytes()
