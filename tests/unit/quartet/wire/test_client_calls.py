"""The request that each call of the clients sends, and the answer that it returns."""

import json
from typing import Any

import grpc
import pytest

from protos import common_pb2, critic_pb2, reward_pb2
from protos.critic_pb2_grpc import CriticServicer, add_CriticServicer_to_server
from quartet.columns import Columns
from quartet.wire.codec import pack_floats, pack_longs, pack_metrics
from quartet.wire.errors import DeadlineExceeded, InvalidArgument, InvalidReply, LeaseLost, Unavailable
from services.critic.client import BATCH, CriticClient, CriticReset
from services.reward.client import RewardClient
from tests import trajectories
from tests.unit.service_calls import BY_NAME, PAIRS, PROMPTS, RESPONSES, ROWS, THREE, ask
from tests.unit.wire import Script, served


async def test_score_texts() -> None:
    call, script = BY_NAME["reward.Score"], Script(BY_NAME["reward.Score"].reply)
    async with call.serve(script) as channel:
        await RewardClient(channel).score_texts(["p", "q"], ["r", "s"], timeout_s=5)
    assert script.requests[0] == reward_pb2.ScoreRequest(texts={"prompts": ["p", "q"], "responses": ["r", "s"]})


async def test_all_that_is_known_of_pairs_goes_to_the_scorer_of_a_name() -> None:
    call, script = BY_NAME["reward.Score"], Script(BY_NAME["reward.Score"].reply)
    known: dict[str, Any] = {"columns": [{"task": "sums"}, {}], "groups": [7, 8], "pair_timeout_s": 2.5}
    talks = [[{"role": "user", "content": "p"}, {"role": "assistant", "content": each}] for each in "rs"]
    async with call.serve(script) as channel:
        plain = RewardClient(channel)
        client = plain.named("taste")
        await client.score(PAIRS, labels=["a", "b"], ended=[True, False], timeout_s=5, **known)
        await client.score_texts(["p", "q"], ["r", "s"], timeout_s=5, **known)
        await client.score_conversations(talks, timeout_s=5, **known)
    sent = {"scorer": "taste", "columns": ['{"task": "sums"}', "{}"], "groups": pack_longs([7, 8])}
    tokens, texts, conversations = script.requests
    assert plain.scorer == ""
    assert {request.pair_timeout_s for request in script.requests} == {2.5}
    for request in script.requests:
        assert {name: getattr(request, name) for name in sent} == sent
    assert (tokens.labels, tokens.ended) == (["a", "b"], [True, False])
    assert texts.texts.responses == ["r", "s"]
    assert [json.loads(each) for each in conversations.conversations.messages] == talks


async def test_the_scorer_of_a_name_is_found_among_all() -> None:
    reply = reward_pb2.RewardInfo(
        scorers=[{"name": name, "identity": {"name": f"model:{name}"}} for name in ("taste", "rules")]
        + [{"name": "starts"}]
    )
    async with BY_NAME["reward.Info"].serve(Script(reply)) as channel:
        client = RewardClient(channel)
        assert [each.name for each in await client.scorers(5)] == ["taste", "rules", "starts"]
        assert (await client.named("rules").info(5)).identity.name == "model:rules"
        with pytest.raises(
            InvalidArgument, match=r"^reward.Info: scorer: required, as there are several: rules, starts, taste$"
        ):
            await client.info(5)
        with pytest.raises(Unavailable, match=r"^reward.Info: scorer starts has not started yet$"):
            await client.named("starts").info(5)
    async with BY_NAME["reward.Info"].serve(Script(reward_pb2.RewardInfo())) as channel:
        with pytest.raises(InvalidReply, match=r"^reward.Info: scorers: empty"):
            await RewardClient(channel).info(5)


async def test_logprobs() -> None:
    request, rows = await ask("reference.Logprobs")
    assert request.temperature == 0.5
    assert request.trajectories == PAIRS.pack()
    assert rows.tolist() == [1, 2, 3]


async def test_values() -> None:
    request, values = await ask("critic.Values")
    assert request.trajectories == PAIRS.pack()
    assert (values.values.tolist(), values.steps) == ([1, 2, 3], [7, 8])


@pytest.mark.parametrize("name", ["reference.Logprobs", "critic.Values"])
async def test_an_answer_of_another_length_is_refused(name: str) -> None:
    call = BY_NAME[name]
    short = type(call.reply)()
    short.CopyFrom(call.reply)
    setattr(short, call.reply.DESCRIPTOR.fields[0].name, pack_floats(ROWS[:1]))
    async with call.serve(Script(short)) as channel:
        with pytest.raises(InvalidReply, match=f"^{name}: .*: 2 values for 3 sampled tokens"):
            await call.ask(channel, 5)


async def test_train() -> None:
    request, metrics = await ask("critic.Train")
    assert (request.step, request.epochs, request.minibatch_size, request.seed) == (3, 2, 4, 5)
    batch = Columns.unpack(request.batch, BATCH)
    assert batch["values"].tolist() == batch["returns"].tolist() == [1, 2, 3]
    assert batch.select().pack() == PAIRS.pack()
    assert "trained" not in batch
    assert metrics == {"loss": 0.5}


async def test_save_and_infos() -> None:
    request, _ = await ask("critic.Save")
    assert request.name == "x"
    for name in ("rollout.Info", "reference.Info", "critic.Info"):
        assert await ask(name) == (common_pb2.InfoRequest(), BY_NAME[name].reply)
    assert await ask("reward.Info") == (common_pb2.InfoRequest(), BY_NAME["reward.Info"].reply.scorers[0])


async def test_calls_that_change_the_critic_carry_the_lease_that_was_claimed() -> None:
    lease, script = common_pb2.Lease(run_id="a", number=7), Script(critic_pb2.ClaimResponse())
    servicer: Any = CriticServicer()
    servicer.Claim = servicer.Adopt = servicer.Values = servicer.Train = script.answer
    servicer.Save = servicer.RestoreCheckpoint = script.answer
    async with served(add_CriticServicer_to_server, servicer) as channel:
        client = CriticClient(channel)
        await client.claim(lease, 30, 5)
        assert script.requests.pop().claim == common_pb2.Claim(ttl_s=30)
        script.reply = critic_pb2.AdoptResponse()
        await client.adopt(3, 5)
        script.reply = critic_pb2.ValuesResponse(values=THREE, steps=pack_longs([3, 3]))
        await client.values(PAIRS, min_step=3, timeout_s=5)
        script.reply = critic_pb2.TrainResponse(metrics=pack_metrics({}))
        await client.train(
            4,
            trajectories.of(PROMPTS, RESPONSES, values=ROWS, returns=ROWS),
            epochs=1,
            minibatch_size=1,
            seed=0,
            timeout_s=5,
        )
        script.reply = critic_pb2.SaveResponse()
        await client.save("x", 5)
        script.reply = critic_pb2.CheckpointResponse()
        await client.restore_checkpoint("x", 5)
    assert [request.lease for request in script.requests] == [lease] * 5


async def test_a_run_that_lost_its_lease_is_told_so_and_not_that_the_critic_began_again() -> None:
    async def refuse(request: Any, context: grpc.aio.ServicerContext) -> None:
        await context.abort(
            grpc.StatusCode.FAILED_PRECONDITION, "lease: run a (lease 1) no longer holds this service"
        )

    servicer: Any = CriticServicer()
    servicer.Values = servicer.Save = refuse
    async with served(add_CriticServicer_to_server, servicer) as channel:
        client = CriticClient(channel)
        for call in (client.values(PAIRS, min_step=3, timeout_s=5), client.save("x", 5)):
            with pytest.raises(
                LeaseLost, match=r"^critic.\w+: lease: run a \(lease 1\) no longer holds this service$"
            ):
                await call


class Behind(CriticServicer):  # type: ignore[misc]
    """A critic that says so many times why it cannot answer, and then answers by step 4."""

    def __init__(self, times: int, said: str) -> None:
        self.times, self.said, self.asked = times, said, 0

    async def Values(self, request: Any, context: grpc.aio.ServicerContext) -> Any:
        self.asked += 1
        if self.asked <= self.times:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, self.said)
        return critic_pb2.ValuesResponse(values=THREE, steps=pack_longs([4, 4]))


async def test_a_critic_that_is_still_training_is_waited_for() -> None:
    critic = Behind(2, "min_step: 4 asked, but this critic has trained 3 so far")
    async with served(add_CriticServicer_to_server, critic) as channel:
        values = await CriticClient(channel).values(PAIRS, min_step=4, timeout_s=20)
    assert (critic.asked, values.steps) == (3, [4, 4])


async def test_a_critic_that_does_not_come_to_the_step_ends_at_the_deadline_which_a_run_survives() -> None:
    critic = Behind(99, "min_step: 4 asked, but this critic has trained 3 so far")
    async with served(add_CriticServicer_to_server, critic) as channel:
        with pytest.raises(DeadlineExceeded, match=r"this critic has trained 3 so far; given up after 0.5 s$"):
            await CriticClient(channel).values(PAIRS, min_step=4, timeout_s=0.5)


async def test_a_critic_of_an_abandoned_timeline_is_not_waited_for() -> None:
    critic = Behind(1, "timeline: this critic holds step 7 of an abandoned timeline (3); the run is at timeline 4")
    async with served(add_CriticServicer_to_server, critic) as channel:
        with pytest.raises(
            CriticReset, match=r"holds step 7 of an abandoned timeline \(3\); the run is at timeline 4$"
        ):
            await CriticClient(channel).values(PAIRS, min_step=4, timeout_s=20)
    assert critic.asked == 1


@pytest.mark.parametrize(("steps", "said"), [([4], r"\[4\] for 2 pairs"), ([5, 4], r"\[5, 4\] .* at least 5")])
async def test_values_of_an_earlier_step_or_of_none_are_refused(steps: list[int], said: str) -> None:
    script = Script(critic_pb2.ValuesResponse(values=THREE, steps=pack_longs(steps)))
    async with BY_NAME["critic.Values"].serve(script) as channel:
        with pytest.raises(InvalidReply, match=f"^critic.Values: steps: {said}"):
            await CriticClient(channel).values(PAIRS, min_step=5, timeout_s=5)
