"""Conversations with an environment: every response kept with its log-probs and versions, and the rest given."""

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from orchestrator.environments.contract import Answer, Environment, Rewarded, Turn
from orchestrator.experience.answers import Answers
from orchestrator.experience.collector import Collector
from orchestrator.experience.conversation import Conversation
from orchestrator.experience.experience import SCHEMA, Collected, Finished
from orchestrator.experience.journal import ExperienceJournal
from orchestrator.experience.requests import SampleRequest
from orchestrator.loop.step_metrics import calls, turns
from quartet.columns import Columns
from quartet.config.base import ConfigError
from quartet.wire.errors import Internal, leaves
from services.rollout.sample import FinishReason, Sample
from tests.models import EOS, make_tokenizer
from tests.unit.fakes import Fakes, make_config, make_prompts, make_requests


class UntilThree(Environment):
    """Answers with the number of the turn until it is 3; a prompt in an odd row ends after its first response."""

    name = identity = "until three"

    def answer(self, turn: Turn) -> Answer:
        return None if turn.row % 2 or turn.number == 3 else [20 + turn.number]


def respond(index: int, prompt: Any, version: int) -> Sample:
    """Samples as many tokens as the conversation has, up to 4, each the number of them, by two versions."""
    length = min(len(prompt), 4)
    ids = np.asarray([30 + len(prompt)] * (length - 1) + [EOS], np.int32)
    logprobs = np.full(length, -0.25 * len(prompt), np.float32)
    spans = ((version, 0, length),) if length < 3 else ((version, 0, 1), (version + 1, 1, length))
    return Sample(index, ids, logprobs, FinishReason.STOP, spans, kept=int(len(prompt) > 1))


class Stage:
    """A collector with services that answer by rule."""

    def __init__(self, folder: Path, environment: Environment, /, **section: Any) -> None:
        self.fakes = Fakes()
        self.fakes.rollout.respond = respond
        bounds = {"kind": "a:B", "max_turns": 4, "max_tokens": 40}
        defaults = {"prompts_per_call": 8, "environment": bounds, "sampling": {"max_new_tokens": 4}}
        self.config = make_config(folder, **defaults | section)
        answers = Answers(environment, self.config, make_tokenizer(), (EOS,))
        self.collector = Collector(self.fakes.services, self.config, (EOS,), answers=answers)

    async def collect(self, count: int, **options: Any) -> Collected:
        given = {"version": 3, "critic_step": 0} | options
        return await self.collector.collect(make_requests(count), **given)


async def test_a_conversation_is_sampled_answered_and_sampled_again(policy_folder: Path) -> None:
    stage = Stage(policy_folder, UntilThree())
    collected = await stage.collect(2)
    columns = collected.columns
    # The prompt, a response to 1 token, an answer, one to 3, an answer, one to 7 tokens; and a single turn.
    assert columns.rows("ids")[0].tolist() == [10, EOS, 21, 33, 33, EOS, 22, 37, 37, 37, EOS]
    assert columns.rows("sampled")[0].tolist() == [False, True, False, *[True] * 3, False, *[True] * 4]
    assert columns.rows("ids")[1].tolist() == [11, EOS]
    assert columns.counts.tolist() == [8, 1]
    assert columns.rows("logprobs")[0].tolist() == [-0.25, *[-0.75] * 3, *[-1.75] * 4]
    assert columns.rows("versions")[0].tolist() == [3, 3, 4, 4, 3, 4, 4, 4]
    assert columns["truncated"].tolist() == [False, False]
    assert columns["kept"].tolist() == [2, 0]
    # The services computed for the whole conversation, once.
    assert stage.fakes.reward.responses() == [[EOS], columns.rows("ids")[0][1:].tolist()]
    assert collected.tokens == 9


class Paying(UntilThree):
    """Gives each response, but the last of an even row, half of its turn's number."""

    def answer(self, turn: Turn) -> Answer:
        return Rewarded(super().answer(turn), turn.number / 2)


async def test_rewards_of_turns_are_at_their_last_tokens_and_in_the_score(policy_folder: Path) -> None:
    free, paid = Stage(policy_folder, UntilThree()), Stage(policy_folder, Paying())
    unpaid, collected = await free.collect(2), await paid.collect(2)
    columns = collected.columns
    # Responses of 1, 3 and 4 tokens, and one of 1.
    assert columns.rows("turn_rewards")[0].tolist() == [0.5, 0, 0, 1.0, 0, 0, 0, 1.5]
    assert columns.rows("turn_rewards")[1].tolist() == [0.5]
    assert (columns["score"] - unpaid.columns["score"]).tolist() == pytest.approx([3.0, 0.5])
    assert turns(collected)["reward/turns"] == pytest.approx(1.75)
    assert "reward/turns" not in turns(unpaid)
    assert unpaid.columns["turn_rewards"].tolist() == [0.0] * 9
    assert columns.select().pack() == unpaid.columns.select().pack()


@pytest.mark.parametrize("reward", [float("nan"), float("inf"), 1e31, -1e31, "0.5", None, [1.0], [[1.0], []]])
async def test_a_reward_that_is_no_number_is_named(policy_folder: Path, reward: Any) -> None:
    class Wrong(UntilThree):
        def answer(self, turn: Turn) -> Answer:
            return Rewarded(super().answer(turn), reward)

    with pytest.raises(ExceptionGroup) as caught:
        await Stage(policy_folder, Wrong()).collect(1)
    assert "turn 1: gave the reward" in str(leaves(caught.value)[0])


async def test_scores_with_names_and_rewards_of_turns_do_not_go_together(policy_folder: Path) -> None:
    named = {"kind": "ppo", "rewards": {"a": {"weight": 1}, "b": {"weight": 2}}}
    stage = Stage(policy_folder, Paying(), algorithm=named)
    stage.fakes.reward.names, stage.fakes.reward.answer = ("a", "b"), lambda response: (1.0, 2.0)
    with pytest.raises(ExceptionGroup) as caught:
        await stage.collect(1)
    assert str(leaves(caught.value)[0]).startswith("algorithm.rewards: names scores, to which the rewards")


async def test_each_turn_goes_on_from_the_exact_tokens_with_a_seed_of_its_own(policy_folder: Path) -> None:
    stage = Stage(policy_folder, UntilThree())
    await stage.collect(3, newest=5)
    first, *others = stage.fakes.rollout.calls
    assert [prompt.tolist() for prompt in first["prompts"]] == [[10], [11], [12]]
    asked = sorted(prompt.tolist() for call in others for prompt in call["prompts"])
    assert [prompt[:3] for prompt in asked] == [[10, EOS, 21]] * 2 + [[12, EOS, 21]] * 2
    assert [len(prompt) for prompt in asked] == [3, 7] * 2
    assert first["seeds"] == [100, 101, 102]
    seeds = [seed for call in (first, *others) for seed in call["seeds"]]
    assert len({*seeds}) == len(seeds) == 7
    assert all(0 <= seed < 1 << 63 for seed in seeds)
    # The bounds of the versions hold for every turn.
    assert {call["versions"] for call in (first, *others)} == {(3, 5)}
    again = Stage(policy_folder, UntilThree())
    await again.collect(3)
    assert sorted(seed for call in again.fakes.rollout.calls for seed in call["seeds"]) == sorted(seeds)


async def test_without_seeds_no_turn_has_one(policy_folder: Path) -> None:
    stage = Stage(policy_folder, UntilThree())
    prompts = make_prompts(1)
    await stage.collector.collect([SampleRequest(0, prompts[0], None, 0)], version=3, critic_step=None)
    assert [call["seeds"] for call in stage.fakes.rollout.calls] == [None] * 3


async def test_one_that_ends_does_not_wait_for_the_others(policy_folder: Path) -> None:
    released = asyncio.Event()

    class Slow(UntilThree):
        async def answer(self, turn: Turn) -> Answer:  # type: ignore[override]
            if turn.row == 0:
                await released.wait()
            return super().answer(turn)

    stage, done = Stage(policy_folder, Slow()), list[Finished]()

    def put(finished: Finished) -> None:
        done.append(finished)
        if sum(len(each.columns) for each in done) == 3:
            released.set()

    async with asyncio.timeout(10):
        await stage.collector.finish(make_requests(4), version=3, critic_step=0, put=put, on_repeat=print)
    numbers = [number for each in done for number in each.columns["number"].tolist()]
    assert sorted(numbers[:3]) == [1, 2, 3]
    assert numbers[3] == 0


async def test_an_environment_that_fails_ends_all_with_its_name_and_no_score(policy_folder: Path) -> None:
    class Broken(UntilThree):
        async def answer(self, turn: Turn) -> Answer:  # type: ignore[override]
            if turn.row == 2:
                raise OSError("gone")
            await asyncio.Event().wait()
            return None

    bounds = {"kind": "a:B", "attempts": 1}
    stage = Stage(policy_folder, Broken(), environment=bounds)
    async with asyncio.timeout(10):
        with pytest.raises(ExceptionGroup) as caught:
            await stage.collect(4)
    [group] = caught.value.exceptions
    [error] = group.exceptions  # type: ignore[attr-defined]
    assert isinstance(error, ConfigError)
    assert str(error).startswith(
        "environment until three: sample 2, prompt row 2, turn 1: failed with OSError('gone')"
    )
    assert not stage.fakes.reward.calls


async def test_the_journal_gives_back_every_segment_and_knows_the_environment(
    policy_folder: Path, tmp_path: Path
) -> None:
    stage = Stage(policy_folder, UntilThree())
    collected = await stage.collect(3)
    prompts = make_prompts(3)

    def journal(identity: str, config: Any = stage.config) -> ExperienceJournal:
        return ExperienceJournal(tmp_path, config, services={"environment": identity})

    journal("until three").write(1, collected)
    read = journal("until three").read(1, lambda number: prompts[number])
    assert read is not None
    assert read.columns.pack() == collected.columns.pack()
    assert Columns.unpack(read.columns.pack(), SCHEMA).segments(0)[1].tolist() == [21]
    assert journal("until four").read(1, lambda number: prompts[number]) is None
    bounds = {"kind": "a:B", "max_turns": 5, "max_tokens": 40}
    longer = make_config(policy_folder, prompts_per_call=8, sampling={"max_new_tokens": 4}, environment=bounds)
    assert journal("until three", longer).read(1, lambda number: prompts[number]) is None


def test_the_wait_for_a_batch_is_long_enough_for_every_turn(policy_folder: Path) -> None:
    times = {"generate_s": 10, "score_s": 1, "start_s": 5}
    bounds = {"kind": "a:B", "max_turns": 3, "answer_s": 7, "attempts": 2}
    config = make_config(policy_folder, timeouts=times, environment=bounds)
    assert config.longest_take_s >= 3 * 10 + 2 * (2 * 7 + 1) + 5 + 2 * 1
    alone = make_config(policy_folder, timeouts=times)
    assert alone.longest_take_s == 10 + 5 + 2 * 1
    # Two batches under way are 400 conversations, of which a plain function answers 64 at a time: seven rounds.
    large = make_config(policy_folder, timeouts=times, environment=bounds, batch_size=200, loop={"max_staleness": 1})
    assert large.longest_take_s >= 3 * 20 + 2 * (2 * 7 * 7 + 1) + 5 + 2 * 1


def test_a_run_has_room_for_two_responses_and_an_answer(policy_folder: Path) -> None:
    sampling = {"max_new_tokens": 10}
    with pytest.raises(ConfigError, match=r"environment.max_tokens \(20\) must be more than twice"):
        make_config(policy_folder, sampling=sampling, environment={"kind": "a:B", "max_tokens": 20})
    config = make_config(policy_folder, sampling=sampling, environment={"kind": "a:B", "max_tokens": 21})
    needed, sum_of = config.longest_sequence
    assert (config.longest_response, needed) == (21, config.data.max_prompt_length + 21)
    assert sum_of == f"orchestrator.data.max_prompt_length + orchestrator.environment.max_tokens is {needed}"


def test_the_penalty_of_long_responses_is_not_for_conversations(policy_folder: Path) -> None:
    algorithm = {"minibatch_size": 1, "overlong_buffer": 4}
    assert make_config(policy_folder, algorithm=algorithm).algorithm.overlong_buffer == 4
    with pytest.raises(ConfigError, match=r"algorithm.overlong_buffer: is for single responses"):
        make_config(policy_folder, algorithm=algorithm, environment={"kind": "a:B"})


def test_a_prompt_alone_is_not_copied() -> None:
    [request] = make_requests(1)
    assert Conversation.of(request).ids is request.prompt.prompt_ids


async def test_a_sample_that_is_lost_on_its_way_is_told(policy_folder: Path) -> None:
    def put(finished: Finished) -> None:
        if 1 in finished.columns["number"]:
            raise asyncio.CancelledError

    bounds: dict[str, Any] = {"version": 3, "critic_step": 0, "put": put, "on_repeat": print}
    with pytest.raises(Internal, match="1 of 3 samples were lost on their way"):
        await Stage(policy_folder, UntilThree()).collector.finish(make_requests(3), **bounds)


async def test_turns_and_calls_are_measured_by_conversation(policy_folder: Path) -> None:
    collected = await Stage(policy_folder, UntilThree()).collect(4)
    assert turns(collected) == {"turns/mean": 2.0}
    assert calls(collected) == {"calls/mean": 0.0}
    some = {"calls": np.asarray([3, 0, 1, 1], np.int32), "wrong_calls": np.asarray([2, 0, 0, 0], np.int32)}
    measured = calls(replace(collected, columns=collected.columns.with_rows(**some)))
    assert measured == {"calls/mean": 1.25, "calls/wrong": 0.4}
