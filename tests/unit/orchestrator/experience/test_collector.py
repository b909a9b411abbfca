"""Collecting experience: each sample judged once, as soon as it is there, and no call left behind."""

import asyncio
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from orchestrator.config.unscored import PAUSE_S
from orchestrator.evaluation.evaluator import kl_of
from orchestrator.experience.collector import Collector
from orchestrator.experience.conversation import Conversation
from orchestrator.experience.experience import Collected
from orchestrator.experience.requests import SampleRequest
from orchestrator.loop.step_metrics import process
from quartet.columns import Columns
from quartet.config.base import ConfigError
from quartet.wire.errors import DeadlineExceeded, Unavailable, leaves
from quartet.wire.outcomes import Outcome, Unscored
from services.rollout.sample import Sampling
from tests.unit.experiences import each
from tests.unit.fakes import Fakes, make_config, make_requests, respond


@pytest.fixture
def fakes() -> Fakes:
    return Fakes()


def make_collector(fakes: Fakes, folder: Path, **section: Any) -> Collector:
    return Collector(fakes.services, make_config(folder, **{"prompts_per_call": 2} | section))


async def test_every_prompt_has_its_experience_in_the_order_of_the_prompts(fakes: Fakes, policy_folder: Path) -> None:
    requests = make_requests(5)
    collected = await make_collector(fakes, policy_folder).collect(requests, version=3, critic_step=0)
    assert list(collected.prompts) == [r.prompt for r in requests]
    for row, experience in enumerate(each(collected)):
        length = row + 1
        assert experience.sample.response_ids.tolist() == [10 + row] * length
        assert (experience.score, bool(collected.columns["truncated"][row])) == (10 + row, row % 2 == 1)
        assert experience.ref_logprobs.tolist() == [-1.5] * length
        assert experience.values.tolist() == [0.5] * length
    # -1 - -1.5 at every token.
    assert kl_of(collected.columns) == [0.5 * (row + 1) for row in range(5)]
    assert collected.tokens == 1 + 2 + 3 + 4 + 5
    assert collected.generate_s > 0
    assert collected.score_s >= 0


async def test_parts_of_scores_are_columns_at_the_tokens_that_earned_them(fakes: Fakes, policy_folder: Path) -> None:
    # Samples of 1, 2 and 3 tokens, two in a call.
    fakes.reward.parts = lambda lengths: [
        (pair, place, 10.0 * length + place) for pair, length in enumerate(lengths) for place in range(2, length + 1)
    ]
    collected = await make_collector(fakes, policy_folder).collect(make_requests(3), version=3, critic_step=0)
    assert [row.tolist() for row in collected.columns.rows("process_rewards")] == [[0], [0, 22], [0, 32, 33]]
    assert process(collected) == {"reward/process": pytest.approx((22 + 32 + 33) / 3)}
    assert collected.columns["score"].tolist() == [10, 11, 12]  # which hold them, as the service says
    for wrong, message in [
        ([(0, 2, 1.0)], "part_places: 2 for sample 0 of the call, whose last sequence has 1 sampled tokens"),
        ([(0, 1, 3e38), (0, 1, 3e38)], "prompt row 0: part_rewards[0] is inf; must be finite"),
    ]:
        fakes.reward.parts = lambda lengths, wrong=wrong: wrong  # type: ignore[misc]
        with pytest.raises(ExceptionGroup) as caught:
            await make_collector(fakes, policy_folder).collect(make_requests(1), version=3, critic_step=0)
        assert [str(leaf) for leaf in leaves(caught.value)] == [f"reward.Score: {message}"]


async def test_every_sample_is_judged_once_by_each_service(fakes: Fakes, policy_folder: Path) -> None:
    await make_collector(fakes, policy_folder).collect(make_requests(5), version=3, critic_step=0)
    expected = [[10 + row] * (row + 1) for row in range(5)]
    for service in (fakes.reward, fakes.reference, fakes.critic):
        assert service.responses() == expected
        for call in service.calls:
            assert [prompt.tolist() for prompt in call["prompts"]] == [[r[0]] for r in call["responses"]]


async def test_a_sample_that_is_scored_again_is_judged_by_the_reward_alone(
    policy_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second of two samples has no score twice; the pauses are time of scoring."""
    now, sleep, own = [0.0], asyncio.sleep, list[int]()

    async def pass_by(seconds: float) -> None:
        now[0] += seconds
        await sleep(0)

    monkeypatch.setattr("orchestrator.experience.collector.asyncio.sleep", pass_by)
    monkeypatch.setattr("orchestrator.experience.collector.time", SimpleNamespace(monotonic=lambda: now[0]))
    made: list[Collected] = []
    for failures in (0, 2):
        fakes, left = Fakes(), [Unscored(Outcome.FAILED, "it broke")] * failures

        def score(response: Any, left: list[Unscored] = left) -> Any:
            return left.pop() if response[0] == 11 and left else float(response[0])

        async def own_logprobs(columns: Columns) -> Any:
            own.extend(columns["number"].tolist())
            return np.full(columns.size("sampled"), -2.5, np.float32)

        fakes.reward.answer = score
        fakes.reward.parts = lambda lengths: [(pair, length, length) for pair, length in enumerate(lengths)]
        config = make_config(policy_folder, prompts_per_call=2)
        collector = Collector(fakes.services, config, old_logprobs=own_logprobs)
        made.append(await collector.collect(make_requests(2), version=3, critic_step=0))
        assert fakes.reward.responses() == [[10]] + [[11, 11]] * (1 + failures)
        for service in (fakes.reference, fakes.critic):
            assert service.responses() == [[10], [11, 11]]
    assert sorted(own) == [0, 0, 1, 1]
    plain, again = made
    assert (again.generate_s, again.score_s) == (0, PAUSE_S + 2 * PAUSE_S)
    assert again.columns.pack() == plain.columns.pack()


async def test_what_is_asked_for(fakes: Fakes, policy_folder: Path) -> None:
    sampling = {"temperature": 0.5, "max_new_tokens": 9, "min_new_tokens": 2, "stop_token_ids": [7]}
    config = make_config(
        policy_folder, prompts_per_call=2, sampling=sampling, timeouts={"generate_s": 11, "score_s": 12}
    )
    collector = Collector(fakes.services, config, end_ids=(2, 7))
    await collector.collect(make_requests(5), version=3, critic_step=0)
    asked = [[int(prompt[0]) for prompt in call["prompts"]] for call in fakes.rollout.calls]
    assert asked == [[10, 11], [12, 13], [14]]
    for call in fakes.rollout.calls:
        assert call["sampling"] == Sampling(max_new_tokens=9, temperature=0.5, min_new_tokens=2, stop_token_ids=(7,))
        assert (call["versions"], call["timeout_s"]) == ((3, None), 11)
    assert sorted(label for call in fakes.reward.calls for label in call["labels"]) == ["0", "1", "2", "3", "4"]
    for call in fakes.reward.calls:
        assert call["labels"] == [str(response[0] - 10) for response in call["responses"]]
        assert call["groups"] == [response[0] - 10 for response in call["responses"]]
        assert not call["columns"]
        assert call["ended"] == [response[0] % 2 == 0 for response in call["responses"]]
    for call in fakes.reference.calls:
        assert (call["temperature"], call["min_new_tokens"], call["end_ids"]) == (0.5, 2, (2, 7))
    for service in (fakes.reward, fakes.reference, fakes.critic):
        assert {call["timeout_s"] for call in service.calls} == {12}


async def test_a_scorer_gets_the_further_columns_of_the_prompts(fakes: Fakes, policy_folder: Path) -> None:
    first, second = make_requests(2)
    known = replace(second, prompt=replace(second.prompt, columns={"tests": [1]}))
    await make_collector(fakes, policy_folder).collect([first, known], version=3, critic_step=0)
    assert sorted(map(str, (each for call in fakes.reward.calls for each in call["columns"] or [{}]))) == [
        "{'tests': [1]}",
        "{}",
    ]


async def test_calls_for_several_batches_have_the_time_of_all_of_them(fakes: Fakes, policy_folder: Path) -> None:
    """Calls wait for each other in the engines: with three batches under way, up to three times as long."""
    config = make_config(
        policy_folder, loop={"max_staleness": 4, "depth": 2}, timeouts={"generate_s": 11, "score_s": 12, "start_s": 5}
    )
    await Collector(fakes.services, config).collect(make_requests(1), version=3, critic_step=0)
    assert [call["timeout_s"] for call in fakes.rollout.calls] == [33]
    assert config.longest_take_s == 33 + 5 + 2 * 12


async def test_a_bound_is_asked_for_where_one_is_meant(fakes: Fakes, policy_folder: Path) -> None:
    await make_collector(fakes, policy_folder).collect(make_requests(1), version=3, newest=5, critic_step=0)
    assert [call["versions"] for call in fakes.rollout.calls] == [(3, 5)]
    assert [call["min_step"] for call in fakes.critic.calls] == [0]


async def test_the_conversations_of_an_agent_have_the_same_bounds(fakes: Fakes, policy_folder: Path) -> None:
    asked: list[Any] = []

    class Agents:
        async def converse(self, request: SampleRequest, *, version: int, newest: int, **_: Any) -> Conversation:
            asked.append((request.number, version, newest))
            return Conversation.of(request).responded(respond(0, request.prompt.prompt_ids))

    collector = Collector(fakes.services, make_config(policy_folder), agents=Agents())  # type: ignore[arg-type]
    collected = await collector.collect(make_requests(2), version=3, newest=5, critic_step=0)
    assert sorted(asked) == [(0, 3, 5), (1, 3, 5)]
    assert collected.trained_numbers == [0, 1]


async def test_judging_begins_before_generation_ends(fakes: Fakes, policy_folder: Path) -> None:
    async def until_the_first_is_judged(sent: int) -> None:
        async with asyncio.timeout(10):
            while sent == 1 and not all(s.calls for s in (fakes.reward, fakes.reference, fakes.critic)):
                await asyncio.sleep(0)

    fakes.rollout.gate = until_the_first_is_judged
    collected = await make_collector(fakes, policy_folder).collect(make_requests(2), version=1, critic_step=0)
    assert len(collected) == 2


async def test_values_are_left_out_where_they_are_not_needed(fakes: Fakes, policy_folder: Path) -> None:
    collector = make_collector(fakes, policy_folder)
    collected = await collector.collect(make_requests(3), version=1, critic_step=None)
    assert fakes.critic.calls == []
    assert "values" not in collected.columns
    assert collected.columns["score"].tolist() == [10, 11, 12]


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
            await make_collector(fakes, policy_folder).collect(make_requests(4), version=1, critic_step=0)
    assert set(leaves(caught.value)) == {error}
    assert fakes.rollout.cancelled == 2
    for name, service in judges.items():
        assert service.cancelled == (0 if name == failing else len(service.calls))


@pytest.mark.parametrize(
    ("late", "field"),
    [
        ("rollout", "timeouts.generate_s times 3 batches under way"),
        ("reward", "timeouts.score_s"),
        ("reference", "timeouts.score_s"),
        ("critic", "timeouts.score_s"),
    ],
)
async def test_an_exceeded_deadline_names_what_sets_it(
    late: str, field: str, fakes: Fakes, policy_folder: Path
) -> None:
    error = DeadlineExceeded("no answer within 1 s")

    async def fail(sent: int) -> None:
        raise error

    if late == "rollout":
        fakes.rollout.gate = fail
    else:
        getattr(fakes, late).failure = error
    collector = make_collector(fakes, policy_folder, loop={"max_staleness": 2})
    with pytest.raises(ExceptionGroup) as caught:
        await collector.collect(make_requests(1), version=1, critic_step=0)
    assert [str(leaf) for leaf in leaves(caught.value)] == [f"no answer within 1 s (orchestrator.{field})"]


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
            await make_collector(fakes, policy_folder).collect(make_requests(2), version=1, critic_step=0)
    assert [str(leaf) for leaf in leaves(caught.value)] == ["gone"]
    assert fakes.reward.cancelled == 1


async def test_a_failure_amid_a_stream_of_samples_is_told_as_it_is(fakes: Fakes, policy_folder: Path) -> None:
    fakes.reward.failure = Unavailable("gone")
    collector = make_collector(fakes, policy_folder, prompts_per_call=30)
    with pytest.raises(ExceptionGroup) as caught:
        await collector.collect(make_requests(60), version=1, critic_step=0)
    assert {type(leaf) for leaf in leaves(caught.value)} == {Unavailable}


async def test_each_sample_keeps_its_number_and_is_asked_for_with_its_seed(fakes: Fakes, policy_folder: Path) -> None:
    requests = make_requests(5)[3:]
    collected = await make_collector(fakes, policy_folder).collect(requests, version=1, critic_step=0)
    assert collected.trained_numbers == [3, 4]
    unseeded = [replace(each, seed=None) for each in requests]
    await make_collector(fakes, policy_folder).collect(unseeded, version=1, critic_step=0)
    assert [call["seeds"] for call in fakes.rollout.calls] == [[103, 104], None]


async def test_scores_of_another_scorer_are_not_mixed_into_a_run(fakes: Fakes, policy_folder: Path) -> None:
    """The reward service is deployed again between two batches."""
    collector = make_collector(fakes, policy_folder)
    await collector.collect(make_requests(3), version=3, critic_step=0)
    fakes.reward.scorer = "model:stricter"
    with pytest.raises(ExceptionGroup) as caught:
        await collector.collect(make_requests(3), version=3, critic_step=0)
    errors = leaves(caught.value)
    assert {type(error) for error in errors} == {ConfigError}
    assert "model:fake (hash) gave the scores of this run until now, model:stricter (hash) gives them" in str(
        errors[0]
    )
    assert "--accept-changed-services" in str(errors[0])


async def test_nothing_asked_nothing_given(fakes: Fakes, policy_folder: Path) -> None:
    collected = await make_collector(fakes, policy_folder).collect([], version=1, critic_step=0)
    assert (len(collected), collected.tokens) == (0, 0)
    assert np.isfinite(collected.generate_s)
