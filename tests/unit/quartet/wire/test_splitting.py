"""Large calls in parts: how they are cut, joined, refused and repeated."""

import asyncio
import itertools
import time
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

import grpc
import numpy as np
import pytest

from protos import critic_pb2, reference_pb2, reward_pb2
from protos.critic_pb2_grpc import CriticServicer, add_CriticServicer_to_server
from protos.reference_pb2_grpc import ReferenceServicer, add_ReferenceServicer_to_server
from protos.reward_pb2_grpc import RewardServicer, add_RewardServicer_to_server
from quartet.columns import Columns
from quartet.wire.backoff import with_pushback
from quartet.wire.codec import pack_floats, pack_longs
from quartet.wire.errors import DeadlineExceeded, InvalidArgument, InvalidReply, ResourceExhausted, TooLarge
from quartet.wire.outcomes import Outcome, Unscored
from quartet.wire.splitting import in_parts, parts
from services.critic.client import CriticClient
from services.reference.client import ReferenceClient
from services.reward.client import Parts, RewardClient
from tests import trajectories
from tests.unit.waiting import settled, until
from tests.unit.wire import served


class Scorer(RewardServicer):  # type: ignore[misc]
    """Scores a pair with its prompt's first token; admits `most` pairs at once, over all calls."""

    def __init__(self, most: int, pushback_s: float | None = 0.02) -> None:
        self.most, self.pushback_s = most, pushback_s
        self.waiting = 0
        self.calls: list[int] = []
        self.refused = 0

    async def Score(self, request: Any, context: Any) -> Any:
        prompts = Columns.unpack(request.tokens, {}).prompts
        if self.waiting + len(prompts) > self.most:
            self.refused += 1
            late = self.pushback_s if len(prompts) <= self.most else None
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, with_pushback("too many", late))
        self.waiting += len(prompts)
        self.calls.append(len(prompts))
        await asyncio.sleep(0.005)
        self.waiting -= len(prompts)
        assert list(request.labels) == [str(prompt[0]) for prompt in prompts]
        scores = pack_floats(np.asarray([prompt[0] for prompt in prompts], np.float32))
        return reward_pb2.ScoreResponse(scores=scores, scorer={"name": "n", "model_hash": "h"})


def pairs(count: int) -> tuple[Columns, list[str]]:
    rows = range(1, count + 1)
    return trajectories.of([[i] for i in rows], [[5]] * count), [str(i) for i in rows]


@pytest.mark.parametrize(
    ("sizes", "cut"),
    [
        ([], [[]]),
        ([9, 9], [[0, 1]]),
        ([1] * 7, [[0, 1, 2], [3, 4, 5], [6]]),
        ([20, 1, 15, 6, 30], [[0], [1, 2], [3], [4]]),
    ],
)
def test_parts_hold_so_many_pairs_and_tokens(sizes: list[int], cut: list[list[int]]) -> None:
    assert [list(rows) for rows in parts(sizes, pairs=3, tokens=20)] == cut


async def test_more_pairs_than_the_service_ever_admits_are_all_scored_in_order() -> None:
    asked, labels = pairs(1500)
    scorer = Scorer(most=300)
    async with served(add_RewardServicer_to_server, scorer) as channel:
        scores = await RewardClient(channel).score(asked, labels=labels, timeout_s=20)
    assert scores.values.tolist() == list(range(1, 1501))
    assert scorer.refused > 0
    assert max(scorer.calls) <= 300


async def test_callers_that_are_refused_together_all_get_through() -> None:
    asked, labels = pairs(40)
    scorer = Scorer(most=60)
    async with served(add_RewardServicer_to_server, scorer) as channel:
        client = RewardClient(channel)
        asks = [client.score(asked, labels=labels, timeout_s=20) for _ in range(12)]
        answers = await asyncio.gather(*asks)
    assert all(scores.values.tolist() == list(range(1, 41)) for scores in answers)
    assert scorer.refused > 0
    assert set(scorer.calls) == {40}


async def test_what_the_service_asks_for_is_waited() -> None:
    asked, labels = pairs(2)
    scorer = Scorer(most=2, pushback_s=0.4)
    scorer.waiting = 2

    async def leave() -> None:
        await until(lambda: scorer.refused)
        scorer.waiting = 0

    async with served(add_RewardServicer_to_server, scorer) as channel, asyncio.TaskGroup() as group:
        group.create_task(leave())
        began = time.monotonic()
        await RewardClient(channel).score(asked, labels=labels, timeout_s=20)
    assert 0.4 <= time.monotonic() - began < 10
    assert scorer.refused == 1


class Frozen(Scorer):
    """Refuses the first call, and never answers another."""

    async def Score(self, request: Any, context: Any) -> Any:
        if self.refused:
            await asyncio.sleep(60)
        return await super().Score(request, context)


@pytest.mark.parametrize(("kind", "refusals"), [(Scorer, range(2, 100)), (Frozen, range(1, 2))])
async def test_a_refusal_is_told_at_the_deadline_also_where_that_passes_during_the_next_try(
    kind: type[Scorer], refusals: range
) -> None:
    asked, labels = pairs(2)
    scorer = kind(most=2)
    scorer.waiting = 2
    async with served(add_RewardServicer_to_server, scorer) as channel:
        said = r"^reward.Score: too many \(retry after 20 ms\); given up at the deadline of 2 s$"
        with pytest.raises(DeadlineExceeded, match=said):
            await RewardClient(channel).score(asked, labels=labels, timeout_s=2)
    assert scorer.refused in refusals


async def test_messages_that_the_server_does_not_read_are_split_and_a_single_one_is_refused_at_once() -> None:
    asked, labels = pairs(64)
    scorer = Scorer(most=1000)
    async with served(add_RewardServicer_to_server, scorer, most_bytes=500) as channel:
        scores = await RewardClient(channel).score(asked, labels=labels, timeout_s=20)
        assert scores.values.tolist() == list(range(1, 65))
        assert max(scorer.calls) <= 32
        began = time.monotonic()
        with pytest.raises(TooLarge, match=r"^reward.Score: .*larger than max"):
            await RewardClient(channel).score(trajectories.of([[1]], [[1] * 200]), timeout_s=20)
        assert time.monotonic() - began < 10


async def test_a_part_that_is_never_admitted_is_asked_in_halves_down_to_single_rows() -> None:
    asked: list[list[int]] = []

    async def ask(rows: range) -> list[int]:
        asked.append([*rows])
        if len(rows) > most:
            raise ResourceExhausted("too many")
        return [*rows]

    most = 1
    assert await in_parts([1] * 5, ask) == [[0], [1], [2], [3], [4]]
    assert [rows for rows in asked if len(rows) > 1] == [[0, 1, 2, 3, 4], [0, 1], [2, 3, 4], [3, 4]]
    most = 0
    with pytest.raises(ResourceExhausted):
        await in_parts([1], ask)


async def test_a_part_that_is_to_come_back_later_is_not_divided() -> None:
    asked: list[range] = []

    async def ask(rows: range) -> None:
        asked.append(rows)
        raise ResourceExhausted("busy", 1)

    with pytest.raises(ResourceExhausted, match="busy"):
        await in_parts([1] * 5, ask)
    assert asked == [range(5)]


async def test_four_parts_are_in_flight_at_a_time() -> None:
    going, gate, ended = 0, asyncio.Event(), list[int]()

    async def ask(rows: range) -> int:
        nonlocal going
        going += 1
        await gate.wait()
        await asyncio.sleep(0)
        ended.append(going)
        going -= 1
        return rows.start

    asking = asyncio.create_task(in_parts([1 << 17] * 9, ask))
    await settled()
    assert going == 4
    gate.set()
    assert await asking == list(range(9))
    assert max(ended) == 4


async def test_the_first_failure_ends_the_other_parts() -> None:
    ended: list[range] = []

    async def ask(rows: range) -> int:
        if rows.start:
            raise InvalidArgument("no")
        try:
            await asyncio.sleep(60)
        finally:
            ended.append(rows)
        return 0

    with pytest.raises(InvalidArgument, match=r"^no$"):
        await in_parts([1] * 1000, ask)
    await asyncio.sleep(0)
    assert ended == [range(512)]


async def test_the_deadline_is_that_of_all_parts_together() -> None:
    class Slow(RewardServicer):  # type: ignore[misc]
        async def Score(self, request: Any, context: Any) -> Any:
            await asyncio.sleep(60)

    asked, _ = pairs(3000)
    async with served(add_RewardServicer_to_server, Slow()) as channel:
        began = time.monotonic()
        with pytest.raises(DeadlineExceeded, match=r"^reward.Score: no answer within 0.5 s$"):
            await RewardClient(channel).score(asked, timeout_s=0.5)
    assert time.monotonic() - began < 10


async def test_rows_of_the_reference_and_the_critic_are_joined_too() -> None:
    def answer(data: bytes) -> bytes:
        columns = Columns.unpack(data, {})
        return pack_floats(np.repeat([prompt[0] for prompt in columns.prompts], columns.counts))

    class Reference(ReferenceServicer):  # type: ignore[misc]
        async def Logprobs(self, request: Any, context: Any) -> Any:
            return reference_pb2.LogprobsResponse(ref_logprobs=answer(request.trajectories))

    class Critic(CriticServicer):  # type: ignore[misc]
        async def Values(self, request: Any, context: Any) -> Any:
            steps = pack_longs(prompt[0] for prompt in Columns.unpack(request.trajectories, {}).prompts)
            return critic_pb2.ValuesResponse(values=answer(request.trajectories), steps=steps)

    rows = range(1, 1101)
    asked = trajectories.of([[i] for i in rows], [[7] * (1 + i % 3) for i in rows])
    expected = [float(i) for i in rows for _ in range(1 + i % 3)]
    async with served(add_ReferenceServicer_to_server, Reference()) as channel:
        logprobs = await ReferenceClient(channel).logprobs(asked, temperature=1.0, timeout_s=20)
    assert logprobs.tolist() == expected
    async with served(add_CriticServicer_to_server, Critic()) as channel:
        values = await CriticClient(channel).values(asked, timeout_s=20)
    assert values.values.tolist() == expected
    assert values.steps == list(rows)


def scoring(answer: Callable[[Any], Any]) -> AbstractAsyncContextManager[grpc.aio.Channel]:
    """A channel to a reward service that gives these answers to requests."""

    async def score(request: Any, context: Any) -> Any:
        return answer(request)

    servicer: Any = RewardServicer()
    servicer.Score = score
    return served(add_RewardServicer_to_server, servicer)


def floats(*numbers: Any) -> bytes:
    return pack_floats(np.asarray(numbers, np.float32).reshape(-1))


@pytest.mark.parametrize("count", [1, 3])
async def test_scores_of_another_number_are_refused(count: int) -> None:
    asked, _ = pairs(2)
    async with scoring(lambda _: reward_pb2.ScoreResponse(scores=floats(*[0] * count))) as channel:
        with pytest.raises(InvalidReply, match=f"^reward.Score: scores: {count} values for 2 pairs"):
            await RewardClient(channel).score(asked, timeout_s=5)


async def test_parts_scored_by_different_models_are_refused() -> None:
    calls = itertools.count()

    def changing(request: Any) -> Any:
        scores = floats(*[0] * len(request.texts.prompts))
        return reward_pb2.ScoreResponse(scores=scores, scorer={"name": f"model {next(calls)}"})

    async with scoring(changing) as channel:
        with pytest.raises(InvalidReply, match=r"^reward.Score: parts of one call were scored by 2 scorers"):
            await RewardClient(channel).score_texts(["a"] * 600, ["b"] * 600, timeout_s=5)


async def test_named_scores_come_as_columns_also_in_parts() -> None:
    def two(request: Any) -> Any:
        rows = [[len(text), -1] for text in request.texts.responses]
        return reward_pb2.ScoreResponse(scores=floats(*rows), scorer={"name": "two", "names": ["length", "other"]})

    texts = ["b" * (n % 7) for n in range(1100)]
    async with scoring(two) as channel:
        scores = await RewardClient(channel).score_texts(["a"] * 1100, texts, timeout_s=5)
    assert [*scores.columns] == ["length", "other"]
    assert scores.columns["length"].tolist() == [float(len(text)) for text in texts]
    assert scores.columns["other"].tolist() == [-1.0] * 1100
    with pytest.raises(ValueError, match="two gives length, other; take one of `columns`"):
        _ = scores.values


@pytest.mark.parametrize(
    ("names", "count", "message"),
    [
        (["a", "b"], 2, "scores: 2 values for 4 scores of 2 pairs by 2 names; there must be one each"),
        (["a"], 4, "scores: 4 values for 2 pairs; there must be one each"),
        (["a", "a"], 4, "scorer.names: a, a has one twice"),
    ],
)
async def test_named_scores_that_cannot_be_are_refused(names: list[str], count: int, message: str) -> None:
    wrong = reward_pb2.ScoreResponse(scores=floats(*[0] * count), scorer={"names": names})
    async with scoring(lambda _: wrong) as channel:
        with pytest.raises(InvalidReply, match=f"^reward.Score: {message}$"):
            await RewardClient(channel).score_texts(["a"] * 2, ["b"] * 2, timeout_s=5)


async def test_parts_whose_names_differ_are_refused() -> None:
    def changing(request: Any) -> Any:
        count = len(request.texts.prompts)
        names = ["a"] if count == 512 else ["b"]
        return reward_pb2.ScoreResponse(scores=floats(*[0] * count), scorer={"names": names})

    async with scoring(changing) as channel:
        with pytest.raises(InvalidReply, match=r"^reward.Score: parts of one call were scored by 2 scorers"):
            await RewardClient(channel).score_texts(["a"] * 600, ["b"] * 600, timeout_s=5)


async def test_pairs_without_a_score_keep_their_places_over_parts() -> None:
    def some(request: Any) -> Any:
        texts = request.texts.responses
        scores = floats(*(np.nan if text == "bad" else 1 for text in texts))
        outcomes = bytes(3 * (text == "bad") for text in texts)
        reasons = ["broke"] * sum(outcome > 0 for outcome in outcomes)
        return reward_pb2.ScoreResponse(scores=scores, outcomes=outcomes, reasons=reasons)

    texts = ["good"] * 1100
    for place in (0, 511, 512, 1099):
        texts[place] = "bad"
    async with scoring(some) as channel:
        scores = await RewardClient(channel).score_texts(["a"] * 1100, texts, timeout_s=5)
    assert scores.unscored == dict.fromkeys((0, 511, 512, 1099), Unscored(Outcome.FAILED, "broke"))
    assert np.flatnonzero(np.isnan(scores.values)).tolist() == [0, 511, 512, 1099]


@pytest.mark.parametrize(
    ("scores", "outcomes", "reasons", "message"),
    [
        ([np.nan, 1], b"\3", ["broke"], "outcomes: 1 for 2 pairs; there must be one each, or none"),
        ([np.nan, 1], b"\0\7", ["broke"], r"outcomes\[1\]: 7 is no outcome"),
        ([np.nan, 1], b"\3\0", [], "reasons: 0 for 1 pairs without a score; one each"),
        ([0, 1], b"\3\0", ["broke"], "scores: a number for a pair that is not scored; must be NaN"),
        ([np.nan, np.inf], b"\3\0", ["broke"], "scores: score of pair 1 of the call is inf; must be finite"),
        ([np.nan, 1], b"", [], "scores: score of pair 0 of the call is nan; must be finite"),
    ],
)
async def test_outcomes_that_cannot_be_are_refused(
    scores: list[float], outcomes: bytes, reasons: list[str], message: str
) -> None:
    wrong = reward_pb2.ScoreResponse(scores=floats(*scores), outcomes=outcomes, reasons=reasons)
    async with scoring(lambda _: wrong) as channel:
        with pytest.raises(InvalidReply, match=f"^reward.Score: {message}$"):
            await RewardClient(channel).score_texts(["a"] * 2, ["b"] * 2, timeout_s=5)


async def test_a_score_that_is_not_finite_is_named_by_its_place_in_the_whole_call() -> None:
    def wrong(request: Any) -> Any:
        scores = floats(*([1, np.nan if text == "bad" else 2] for text in request.texts.responses))
        return reward_pb2.ScoreResponse(scores=scores, scorer={"names": ["a", "b"]})

    texts = ["good"] * 1100
    texts[700] = "bad"
    async with scoring(wrong) as channel:
        with pytest.raises(InvalidReply, match=r"^reward.Score: scores: b of pair 700 of the call is nan"):
            await RewardClient(channel).score_texts(["a"] * 1100, texts, timeout_s=5)


def in_places(*places: tuple[int, int, float]) -> dict[str, Any]:
    """The fields of an answer that hold parts of scores: pair, place and reward of each."""
    pairs, at, rewards = zip(*places, strict=True) if places else ((), (), ())
    return {
        "part_pairs": pack_longs(pairs),
        "part_places": pack_longs(at),
        "part_rewards": floats(*rewards),
    }


async def test_parts_of_scores_keep_their_pairs_over_parts_of_a_call() -> None:
    gives = True

    def answer(request: Any) -> Any:
        texts = request.texts.responses
        given = [(pair, place, place / 2) for pair, text in enumerate(texts) if text for place in (1, int(text))]
        scorer = {"process": gives and len(texts) != 77}
        return reward_pb2.ScoreResponse(scores=floats(*[1] * len(texts)), scorer=scorer, **in_places(*given))

    texts = [""] * 1100
    for place in (1, 511, 512, 1099):
        texts[place] = str(2 * place)
    async with scoring(answer) as channel:
        client = RewardClient(channel)
        found = (await client.score_texts(["a"] * 1100, texts, timeout_s=5)).parts
        assert isinstance(found, Parts)
        assert found.pairs.tolist() == [1, 1, 511, 511, 512, 512, 1099, 1099]
        assert found.places.tolist() == [1, 2, 1, 1022, 1, 1024, 1, 2198]
        assert found.rewards.tolist() == [0.5, 1, 0.5, 511, 0.5, 512, 0.5, 1099]
        nothing = (await client.score_texts(["a"] * 600, [""] * 600, timeout_s=5)).parts
        assert isinstance(nothing, Parts)  # of a scorer that could have given some
        assert not len(nothing.pairs)
        with pytest.raises(InvalidReply, match=r"^reward.Score: parts of one call were scored by 2 scorers"):
            await client.score_texts(["a"] * 589, texts[:589], timeout_s=5)
        gives = False
        assert (await client.score_texts(["a"] * 1100, texts, timeout_s=5)).parts is None


LEAST = -(2**63)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (in_places((0, 1, 1.0)) | {"part_places": b""}, "part_places: 0, part_rewards: 1, but 1 pairs"),
        (in_places((0, 1, 1.0)) | {"part_rewards": b"1234567"}, "part_rewards: 7 bytes are not .*"),
        (in_places((2, 1, 1.0)), "part_pairs: must be ascending, from 0 to 1"),
        (in_places((-1, 1, 1.0)), "part_pairs: must be ascending, from 0 to 1"),
        (in_places((1, 1, 1.0), (0, 1, 1.0)), "part_pairs: must be ascending, from 0 to 1"),
        # Differences that are positive in 64 bits.
        (
            in_places(*((pair, 1, 1.0) for pair in (1, LEAST, -1, 1))),
            "part_pairs: must be ascending, from 0 to 1",
        ),
        (in_places((0, 0, 1.0)), "part_places and part_rewards: must be from 1 on, and finite"),
        (in_places((0, 1, np.inf)), "part_places and part_rewards: must be from 1 on, and finite"),
    ],
)
async def test_parts_of_scores_that_cannot_be_are_refused(fields: dict[str, Any], message: str) -> None:
    wrong = reward_pb2.ScoreResponse(scores=floats(1, 1), scorer={"process": True}, **fields)
    async with scoring(lambda _: wrong) as channel:
        with pytest.raises(InvalidReply, match=f"^reward.Score: {message}$"):
            await RewardClient(channel).score_texts(["a"] * 2, ["b"] * 2, timeout_s=5)
