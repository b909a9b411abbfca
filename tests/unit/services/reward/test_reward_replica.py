"""The reward deployment without Serve: what it admits, and what becomes of a scorer that hangs."""

import asyncio
import re
import shutil
import threading
import tracemalloc
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import numpy as np
import pytest
from ray import serve

from protos import reward_pb2 as pb
from quartet.columns import Columns
from quartet.models.loading import load_tokenizer
from quartet.security.port import HTTP_VARIABLE
from quartet.serving import replicas
from quartet.serving.share import Share
from quartet.wire.callers import Purpose
from quartet.wire.codec import unpack_floats
from quartet.wire.errors import ResourceExhausted, Unavailable
from services.reward import doors
from services.reward.config import RewardConfig
from services.reward.replica import Reward
from services.reward.scorers.scorer import EncodedPair, Result
from tests.trajectories import of
from tests.unit.contexts import Context
from tests.unit.waiting import until


class Gated:
    """A scorer of ones in this process, in passes of ten pairs; stands still at the prompt 13 until it is let go."""

    identity = pb.ScorerIdentity(name="function:gated")
    max_length, batch_tokens = 128, 20
    texts = False
    vocab_size: int | None = None
    names: tuple[str, ...] = ()
    passes = 1
    batch_s: float | None = None
    patience_s: float | None = None

    def __init__(self) -> None:
        self.stands, self.goes_on = threading.Event(), threading.Event()
        self.computed: list[int] = []
        """Pairs of each pass."""

    def score(self, pairs: Sequence[EncodedPair]) -> Sequence[Result]:
        """Ones."""
        self.computed.append(len(pairs))
        if any(13 in pair.prompt_ids for pair in pairs):
            self.stands.set()
            self.goes_on.wait()
        return [np.ones(1, np.float32)] * len(pairs)

    def check(self) -> None:
        """Finds nothing wrong."""


def replica(folder: Path, gated: Gated | None = None, batch_s: float = 20.0, **changes: Any) -> Any:
    """A reward replica without Serve, whose scorer is `tests.scorers:length`, or `gated`."""
    scorer = {"kind": "function", "function": "tests.scorers:length"} | changes
    limits = {"max_call_rows": 100, "max_call_tokens": 4000, "max_waiting_rows": 400, "batch_s": batch_s}
    made = object.__new__(Reward.func_or_class)  # type: ignore[attr-defined]
    config = {"tokenizer": str(folder), "scorer": scorer, "limits": limits}
    made.__init__(RewardConfig.parse(config, "reward.args").hosted[""], make=gated and (lambda *_: gated))
    return made


@pytest.fixture
def reward(policy_folder: Path) -> Any:
    return replica(policy_folder)


def pairs(count: int, prompt: int = 5) -> pb.ScoreRequest:
    return pb.ScoreRequest(tokens=of([[prompt]] * count, [[prompt]] * count).pack())


def million() -> pb.ScoreRequest:
    """A million prompts and responses of one token each: 14 MB."""
    count = 1 << 20
    ids, lengths = np.ones(2 * count, np.int32), np.full(count, 2, np.int32)
    return pb.ScoreRequest(tokens=Columns.of(ids, lengths, np.tile([False, True], count)).pack())


async def test_ids_and_texts_are_scored(reward: Any) -> None:
    reply = await reward.Score(pairs(3), Context())
    assert unpack_floats(reply.scores, "scores").tolist() == [2.0] * 3
    texts = pb.ScoreRequest(texts=pb.TextPairs(prompts=["w5", "w6"], responses=["w7 w8", "w9"]))
    reply = await reward.Score(texts, Context())
    assert unpack_floats(reply.scores, "scores").tolist() == [5.0, 2.0]
    await reward.check_health()


async def test_pairs_without_a_score_are_nan_with_an_outcome_and_a_reason_each(reward: Any) -> None:
    texts = pb.TextPairs(prompts=["w5", "w14", "w6", "w15"], responses=["w7 w8", "w7", "w9", "w7"])
    reply = await reward.Score(pb.ScoreRequest(texts=texts), Context())
    scores = unpack_floats(reply.scores, "scores")
    assert np.isnan(scores).tolist() == [False, True, False, True]
    assert (scores[0], scores[2]) == (5.0, 2.0)
    assert [*reply.outcomes] == [pb.SCORED, pb.FAILED, pb.SCORED, pb.NOT_APPLICABLE]
    broken, declined = reply.reasons
    assert re.search(r":length raised OSError in line \d+ of scorers\.py; see the reward", broken)
    assert "secret" not in broken
    assert declined.endswith(":length gave None")
    # Where all are scored nothing is said.
    reply = await reward.Score(pairs(3), Context())
    assert (reply.outcomes, [*reply.reasons]) == (b"", [])


async def test_a_pair_of_another_caller_costs_a_call_nothing(reward: Any) -> None:
    wrong = pb.ScoreRequest(texts=pb.TextPairs(prompts=["w14"], responses=["w7"]))
    calls = [reward.Score(request, Context()) for request in (pairs(3), wrong, pairs(2), wrong)]
    replies = await asyncio.gather(*calls)
    assert [[*reply.outcomes] for reply in replies] == [[], [pb.FAILED], [], [pb.FAILED]]
    assert unpack_floats(replies[2].scores, "scores").tolist() == [2.0] * 2


@pytest.mark.parametrize("of", ["tokens", "texts", "labels"])
async def test_a_call_that_is_too_large_is_refused_before_it_costs_anything(reward: Any, of: str) -> None:
    many = [""] * (1 << 20)
    requests = {
        "tokens": million(),
        "texts": pb.ScoreRequest(texts=pb.TextPairs(prompts=many, responses=many)),
        "labels": pb.ScoreRequest(tokens=pairs(1).tokens, labels=many),
    }
    context = Context()
    tracemalloc.start()
    with pytest.raises(
        ResourceExhausted, match="1048576 rows, but a call may hold 100; send it in several"
    ) as caught:
        await reward.Score(requests[of], context)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert context.code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert caught.value.retry_after_s is None
    assert peak <= requests[of].ByteSize() + (1 << 16)


async def test_a_few_long_texts_are_counted_too(reward: Any) -> None:
    texts = pb.TextPairs(prompts=["w5 " * 2000], responses=["w7"])
    with pytest.raises(ResourceExhausted, match="texts: 6002 tokens, but a call may hold 4000"):
        await reward.Score(pb.ScoreRequest(texts=texts), Context())


async def test_a_long_text_is_tokenised_beside_the_event_loop_and_within_the_limits(reward: Any) -> None:
    begun, released = threading.Event(), threading.Event()
    share, made = Share("a", Purpose.FOREIGN), reward._encoder.token_ids

    def slow(text: str, special: bool) -> Any:
        begun.set()
        assert released.wait(20)
        return made(text, special)

    reward._encoder.token_ids = slow
    asked = [asyncio.create_task(reward.token_ids("", "w5 w6", False, share)) for _ in range(3)]
    await until(begun.is_set)
    assert not any(each.done() for each in asked)
    await reward.check_health()
    assert reward._admission.waiting_rows == 3
    released.set()
    assert [[*ids] for ids, _ in await asyncio.gather(*asked)] == [[5, 6]] * 3
    assert reward._admission.waiting_rows == 0
    with pytest.raises(ResourceExhausted, match="prompt: 6000 tokens, but a call may hold 4000"):
        await reward.token_ids("", "w5 " * 2000, True, share)


def test_the_file_of_a_tokenizer_does_not_cut_texts(policy_folder: Path, tmp_path: Path) -> None:
    """Nor does the tokenizer change between two threads that use it: what cuts is dropped before there are any."""
    shutil.copytree(policy_folder, tmp_path, dirs_exist_ok=True)
    tokenizer = load_tokenizer(str(policy_folder))
    tokenizer.backend_tokenizer.enable_truncation(2)
    tokenizer.save_pretrained(tmp_path)
    scorer = {"kind": "function", "function": "tests.scorers:count", "tokenizer": str(tmp_path)}
    hosted = RewardConfig.parse({"scorer": scorer}, "reward.args").hosted[""]
    made = Reward.func_or_class(hosted)  # type: ignore[attr-defined]
    assert load_tokenizer(str(tmp_path)).backend_tokenizer.truncation is not None
    assert made._encoder._tokenizer.backend_tokenizer.truncation is None


async def test_measures_come_although_the_other_replicas_stay_silent(
    policy_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same where Serve's controller stays silent, which a replica asks for the others before it serves."""

    async def silent(response: Any) -> Any:
        await asyncio.Event().wait()

    context = SimpleNamespace(replica_tag="one", deployment="Reward", app_name="reward")
    monkeypatch.setattr(doors, "METRICS_S", 0.1)
    monkeypatch.setattr(replicas, "answers_of_each", silent)
    monkeypatch.setattr(serve, "get_replica_context", lambda: context)
    unconnected = SimpleNamespace(options=lambda: SimpleNamespace(broadcast=lambda method: None))
    monkeypatch.setenv(HTTP_VARIABLE, "open")
    monkeypatch.setattr(serve, "get_deployment_handle", lambda *named: {("Reward", "reward"): unconnected}[named])
    reward = replica(policy_folder)
    monkeypatch.setattr(serve, "get_deployment_handle", None)
    await reward.Score(pairs(3), Context())
    text = (await asyncio.wait_for(reward.metrics(), 20)).decode()
    assert re.search(r'quartet_reward_rows_total\{outcome="scored",replica="one".*\} 3\.0', text), text


async def test_a_run_is_not_refused_and_waits_for_the_pass_that_computes_alone(policy_folder: Path) -> None:
    """Beside a foreign caller of whom no more may wait."""
    gated, judge = Gated(), Context("judge", Purpose.FOREIGN)
    reward = replica(policy_folder, gated, batch_s=600.0)
    foreign = [asyncio.create_task(reward.Score(pairs(count, prompt), judge)) for count, prompt in ((1, 13), (99, 5))]
    await until(gated.stands.is_set)
    foreign.append(asyncio.create_task(reward.Score(pairs(100), judge)))
    await until(lambda: len(reward._batcher._open) == 3)
    with pytest.raises(ResourceExhausted, match="of this caller wait already"):
        await reward.Score(pairs(1), judge)
    run = asyncio.create_task(reward.Score(pairs(5), Context("run")))
    await until(lambda: len(reward._batcher._open) == 4)
    gated.goes_on.set()
    await run
    assert gated.computed[1] == 5
    await asyncio.gather(*foreign)
    assert (sum(gated.computed), reward._admission.waiting_rows) == (205, 0)


async def test_a_hung_scorer_answers_its_callers_and_is_unhealthy(policy_folder: Path) -> None:
    gated = Gated()
    reward = replica(policy_folder, gated, batch_s=1.0)
    hung = asyncio.create_task(reward.Score(pairs(1, prompt=13), Context("a")))
    await until(gated.stands.is_set)
    waiting = asyncio.create_task(reward.Score(pairs(2), Context("b", Purpose.FOREIGN)))
    await asyncio.wait_for(reward.check_health(), 1)
    for call in (hung, waiting):
        with pytest.raises(Unavailable, match="will be replaced"):
            await asyncio.wait_for(call, 5)
    with pytest.raises(
        RuntimeError, match=r"a batch of 1 rows and 2 tokens for a has run for [1-9] s, longer than batch_s"
    ):
        await reward.check_health()
    gated.goes_on.set()


async def test_a_pair_on_which_the_function_hangs_costs_no_other_its_score(policy_folder: Path) -> None:
    """Nor a later call its time: the replica stays well."""
    reward = replica(policy_folder, pair_timeout_s=4.0)
    texts = pb.TextPairs(prompts=["w5", "w13", "w6"], responses=["w7 w8", "w7", "w9"])
    hung = asyncio.create_task(reward.Score(pb.ScoreRequest(texts=texts), Context("a")))
    other = await reward.Score(pairs(2), Context("b", Purpose.FOREIGN))
    assert unpack_floats(other.scores, "scores").tolist() == [2.0] * 2
    assert not hung.done()
    reply = await hung
    scores = unpack_floats(reply.scores, "scores")
    assert (scores[0], np.isnan(scores[1]), scores[2]) == (5.0, True, 2.0)
    assert [*reply.outcomes] == [pb.SCORED, pb.TIMEOUT, pb.SCORED]
    assert [*reply.reasons] == ["tests.scorers:length took longer for a pair than pair_timeout_s, 4 s"]
    await reward.check_health()
