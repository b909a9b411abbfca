"""A training batch that comes in parts: how the client cuts it, and how the service puts it together again."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from protos import common_pb2
from protos import critic_pb2 as pb
from protos.critic_pb2_grpc import CriticServicer, add_CriticServicer_to_server
from quartet.columns import Columns
from quartet.config.limits import LimitsConfig
from quartet.serving.runs.timeline import Moment
from quartet.wire.codec import pack_metrics
from quartet.wire.errors import FailedPrecondition, ResourceExhausted
from services.critic.client import BATCH, CriticClient, CriticReset
from services.critic.staged import StagedBatch, digest
from tests import trajectories
from tests.unit.wire import served

STEP = Moment(4, 7)
LIMITS = LimitsConfig(max_call_rows=8, max_call_tokens=60)


def part(first: int, rows: int, tokens: int = 2) -> Columns:
    """Rows whose prompt is their place in the batch."""
    numbers = np.arange(rows * tokens, dtype=np.float32) + first * tokens
    prompts, responses = [[first + row] for row in range(rows)], [[9] * tokens] * rows
    every = np.ones(rows * tokens, np.bool_)
    return trajectories.of(prompts, responses, values=numbers, returns=numbers, trained=every)


def places(parts: Sequence[Columns]) -> list[int]:
    return [int(prompt[0]) for prompt in Columns.concatenate(parts).prompts]


def test_parts_come_in_any_order_and_make_one_batch() -> None:
    staged = StagedBatch(LIMITS)
    for first, rows in ((5, 1), (0, 3), (3, 2)):
        staged.add(STEP, first, part(first, rows))
    whole = Columns.concatenate(staged.whole(STEP, 6))
    assert places([whole]) == list(range(6))
    assert whole["values"].tolist() == whole["returns"].tolist() == list(range(12))
    assert (len(whole), whole.tokens) == (6, 18)


def test_a_part_that_comes_again_divided_otherwise_replaces_what_came() -> None:
    staged = StagedBatch(LIMITS)
    staged.add(STEP, 0, part(0, 4))
    for first in (0, 2):
        staged.add(STEP, first, part(first, 2))
        staged.add(STEP, first, part(first, 2))
    assert places(staged.whole(STEP, 4)) == [0, 1, 2, 3]
    staged.add(STEP, 1, part(1, 2))  # of the two others one row each would be left
    with pytest.raises(
        FailedPrecondition, match="staged: 4 trajectories, but 2 of step 7 have come, the last in place 2"
    ):
        staged.whole(STEP, 4)


def test_a_batch_with_a_gap_or_of_another_size_is_not_a_batch() -> None:
    staged = StagedBatch(LIMITS)
    staged.add(STEP, 0, part(0, 2))
    staged.add(STEP, 3, part(3, 2))
    for rows in (2, 4, 5):
        with pytest.raises(FailedPrecondition, match=f"staged: {rows} trajectories, but 4 of step 7 have come"):
            staged.whole(STEP, rows)
    staged.add(STEP, 2, part(2, 1))
    assert places(staged.whole(STEP, 5)) == [0, 1, 2, 3, 4]


def test_only_the_newest_steps_parts_are_held() -> None:
    staged = StagedBatch(LIMITS)
    staged.add(STEP, 0, part(0, 2))
    later, restored = Moment(4, 8), Moment(5, 3)
    for moment in (later, restored):
        staged.add(moment, 0, part(0, 1))
        assert places(staged.whole(moment, 1)) == [0]
        with pytest.raises(FailedPrecondition, match="staged: 2 trajectories, but 0 of step 7 have come"):
            staged.whole(STEP, 2)
        with pytest.raises(
            FailedPrecondition, match=f"step: 7 is refused, as parts of step {moment.number} have come since"
        ):
            staged.add(STEP, 0, part(0, 2))
        assert places(staged.whole(moment, 1)) == [0]


def test_a_batch_is_bounded_as_a_whole() -> None:
    staged = StagedBatch(LIMITS)
    staged.add(STEP, 0, part(0, 6))
    with pytest.raises(ResourceExhausted, match="batch: 9 rows in all, but a batch may hold 8"):
        staged.add(STEP, 6, part(6, 3))
    with pytest.raises(ResourceExhausted, match="batch: 69 tokens in all, but a batch may hold 60"):
        staged.add(STEP, 6, part(6, 1, tokens=50))
    staged.add(STEP, 6, part(6, 2))
    assert places(staged.whole(STEP, 8)) == list(range(8))


def test_the_digest_is_the_batchs_and_not_that_of_its_division() -> None:
    whole = digest([part(0, 6)], (1, 2, 3))
    assert digest([part(0, 1), part(1, 3), part(4, 2)], (1, 2, 3)) == whole
    one = part(0, 6)
    others = (
        digest([one], (1, 2, 4)),
        digest([one.with_sampled(values=-one["values"])], (1, 2, 3)),
        digest([one.with_sampled(returns=-one["returns"])], (1, 2, 3)),
        digest([one.with_sampled(trained=~one["trained"])], (1, 2, 3)),
        digest([replace(one, ids=one.ids[::-1].copy())], (1, 2, 3)),
    )
    assert len({whole, *others}) == 6


def test_the_digest_knows_where_further_sequences_begin() -> None:
    ids, lengths = np.arange(8, dtype=np.int32), np.array([4, 4], np.int32)
    sampled = np.tile([False, True], 4)
    begins = np.arange(8) == 2  # two sequences of the first trajectory, one of the second
    one, two = Columns.of(ids, lengths, sampled), Columns.of(ids, lengths, sampled, begins)
    assert digest([one], ()) != digest([two], ())
    assert digest([two.take([0]), two.take([1])], ()) == digest([two], ())


class Keeping(CriticServicer):  # type: ignore[misc]
    """Keeps the parts as the critic does, and answers with the number of trajectories that it would train on."""

    def __init__(self) -> None:
        self.staged = StagedBatch(LimitsConfig())
        self.sent: list[int] = []
        self.batch: Columns | None = None

    async def Stage(self, request: Any, context: Any) -> Any:
        given = self._part(request)
        self.sent.append(len(given))
        self.staged.add(Moment(request.lease.number, request.step), request.row, given)
        return pb.StageResponse()

    async def Train(self, request: Any, context: Any) -> Any:
        moment = Moment(request.lease.number, request.step)
        parts = self.staged.whole(moment, request.staged) if request.staged else [self._part(request)]
        self.batch = Columns.concatenate(parts)
        return pb.TrainResponse(metrics=pack_metrics({"rows": float(len(self.batch))}))

    def _part(self, request: Any) -> Columns:
        return Columns.received(request.batch, BATCH, vocab_size=10_000, max_length=9000)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(
    ("rows", "tokens", "sent"),
    [(3, 2, []), (512, 2, []), (1100, 2, [76, 512, 512]), (40, 8000, [8, 16, 16]), (600, 1, [88, 256, 256])],
)
async def test_a_batch_arrives_as_it_was_sent(rows: int, tokens: int, sent: list[int], masked: bool) -> None:
    """One that is larger than a call of theirs may be comes in parts; those that are refused in halves."""
    whole = part(0, rows, tokens)
    if masked:
        whole = whole.with_sampled(trained=np.random.default_rng(0).random(rows * tokens) < 0.5)
    else:
        whole = whole.without("trained")
    critic, limit = Keeping(), 6500 if tokens == 1 else 4 << 20
    async with served(add_CriticServicer_to_server, critic, most_bytes=limit) as channel:
        client = CriticClient(channel)
        client.lease = common_pb2.Lease(run_id="ours", number=4)
        options: dict[str, Any] = {"epochs": 1, "minibatch_size": 4, "seed": 0, "timeout_s": 20}
        metrics = await client.train(7, whole, **options)
    assert metrics == {"rows": rows}
    assert sorted(critic.sent) == sent
    assert critic.batch is not None
    assert digest([critic.batch], ()) == digest([whole], ())


async def test_a_critic_that_has_lost_the_parts_has_lost_its_training_too() -> None:
    class Replaced(Keeping):
        async def Train(self, request: Any, context: Any) -> Any:
            await context.abort(FailedPrecondition.code, "staged: 1100 pairs, but 0 of step 7 have come")

    whole = part(0, 1100)
    async with served(add_CriticServicer_to_server, Replaced()) as channel:
        with pytest.raises(CriticReset, match=r"critic.Train: staged: 1100 pairs, but 0 of step 7 have come"):
            await CriticClient(channel).train(7, whole, epochs=1, minibatch_size=4, seed=0, timeout_s=20)
