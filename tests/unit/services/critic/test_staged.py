"""A training batch that comes in parts: how the client cuts it, and how the service puts it together again."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from protos import common_pb2
from protos import critic_pb2 as pb
from protos.critic_pb2_grpc import CriticServicer, add_CriticServicer_to_server
from quartet.config.limits import LimitsConfig
from quartet.serving.runs.timeline import Moment
from quartet.wire.codec import PackedPairs, pack_floats, pack_metrics, pack_pairs
from quartet.wire.errors import FailedPrecondition, InvalidArgument, ResourceExhausted
from services.critic.client import CriticClient, CriticReset
from services.critic.staged import BatchPart, StagedBatch, digest
from tests.unit.wire import served

STEP = Moment(4, 7)
LIMITS = LimitsConfig(max_call_rows=8, max_call_tokens=60)


def part(first: int, rows: int, tokens: int = 2) -> BatchPart:
    """Rows whose prompt is their place in the batch."""
    prompts = [np.asarray([first + row], np.int32) for row in range(rows)]
    responses = [np.full(tokens, 9, np.int32)] * rows
    numbers = pack_floats(np.arange(rows * tokens, dtype=np.float32) + first * tokens)
    return BatchPart.of(
        PackedPairs.of(pack_pairs(prompts, responses)), numbers, numbers, vocab_size=10_000, max_length=9000
    )


def places(parts: Sequence[BatchPart]) -> list[int]:
    return [int(prompt[0]) for prompt in BatchPart.joined(parts).prompts]


def test_parts_come_in_any_order_and_make_one_batch() -> None:
    staged = StagedBatch(LIMITS)
    for first, rows in ((5, 1), (0, 3), (3, 2)):
        staged.add(STEP, first, part(first, rows))
    whole = BatchPart.joined(staged.whole(STEP, 6))
    assert places([whole]) == list(range(6))
    assert whole.values.tolist() == whole.returns.tolist() == list(range(12))
    assert (whole.rows, whole.tokens) == (6, 18)


def test_a_part_that_comes_again_divided_otherwise_replaces_what_came() -> None:
    staged = StagedBatch(LIMITS)
    staged.add(STEP, 0, part(0, 4))
    for first in (0, 2):
        staged.add(STEP, first, part(first, 2))
        staged.add(STEP, first, part(first, 2))
    assert places(staged.whole(STEP, 4)) == [0, 1, 2, 3]
    staged.add(STEP, 1, part(1, 2))  # of the two others one row each would be left
    with pytest.raises(FailedPrecondition, match="staged: 4 pairs, but 2 of step 7 have come, the last in place 2"):
        staged.whole(STEP, 4)


def test_a_batch_with_a_gap_or_of_another_size_is_not_a_batch() -> None:
    staged = StagedBatch(LIMITS)
    staged.add(STEP, 0, part(0, 2))
    staged.add(STEP, 3, part(3, 2))
    for rows in (2, 4, 5):
        with pytest.raises(FailedPrecondition, match=f"staged: {rows} pairs, but 4 of step 7 have come"):
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
        with pytest.raises(FailedPrecondition, match="staged: 2 pairs, but 0 of step 7 have come"):
            staged.whole(STEP, 2)
        with pytest.raises(
            FailedPrecondition, match=f"step: 7 is refused, as parts of step {moment.number} have come since"
        ):
            staged.add(STEP, 0, part(0, 2))
        assert places(staged.whole(moment, 1)) == [0]


def test_a_batch_is_bounded_as_a_whole() -> None:
    staged = StagedBatch(LIMITS)
    staged.add(STEP, 0, part(0, 6))
    with pytest.raises(ResourceExhausted, match="pairs: 9 rows in all, but a batch may hold 8"):
        staged.add(STEP, 6, part(6, 3))
    with pytest.raises(ResourceExhausted, match="pairs: 69 tokens in all, but a batch may hold 60"):
        staged.add(STEP, 6, part(6, 1, tokens=50))
    staged.add(STEP, 6, part(6, 2))
    assert places(staged.whole(STEP, 8)) == list(range(8))


def test_the_digest_is_the_batchs_and_not_that_of_its_division() -> None:
    whole = digest([part(0, 6)], (1, 2, 3))
    assert digest([part(0, 1), part(1, 3), part(4, 2)], (1, 2, 3)) == whole
    one = part(0, 6)
    others = (
        digest([one], (1, 2, 4)),
        digest([replace(one, values=-one.values)], (1, 2, 3)),
        digest([replace(one, returns=-one.returns)], (1, 2, 3)),
        digest([replace(one, trained=~one.trained)], (1, 2, 3)),
        digest([replace(one, prompts=one.responses, responses=one.prompts)], (1, 2, 3)),
    )
    assert len({whole, *others}) == 6


@pytest.mark.parametrize("field", ["values", "returns"])
def test_numbers_that_do_not_fit_the_responses_are_refused(field: str) -> None:
    pairs = PackedPairs.of(pack_pairs([np.ones(1, np.int32)], [np.ones(2, np.int32)]))
    fine = {"values": pack_floats(np.zeros(2, np.float32)), "returns": pack_floats(np.zeros(2, np.float32))}
    for wrong, told in ((np.zeros(3), "3 values for 2 response tokens"), (np.asarray([0, np.nan]), "not finite")):
        numbers = fine | {field: pack_floats(wrong.astype(np.float32))}
        with pytest.raises(InvalidArgument, match=f"^{field}: .*{told}"):
            BatchPart.of(pairs, **numbers, vocab_size=9, max_length=9)


class Keeping(CriticServicer):  # type: ignore[misc]
    """Keeps the parts as the critic does, and answers with the number of pairs that it would train on."""

    def __init__(self) -> None:
        self.staged = StagedBatch(LimitsConfig())
        self.sent: list[int] = []
        self.batch: BatchPart | None = None

    async def Stage(self, request: Any, context: Any) -> Any:
        given = self._part(request)
        self.sent.append(given.rows)
        self.staged.add(Moment(request.lease.number, request.step), request.row, given)
        return pb.StageResponse()

    async def Train(self, request: Any, context: Any) -> Any:
        moment = Moment(request.lease.number, request.step)
        parts = self.staged.whole(moment, request.staged) if request.staged else [self._part(request)]
        self.batch = BatchPart.joined(parts)
        return pb.TrainResponse(metrics=pack_metrics({"rows": float(self.batch.rows)}))

    def _part(self, request: Any) -> BatchPart:
        packed = PackedPairs.of(request.pairs)
        return BatchPart.of(
            packed, request.values, request.returns, request.trained, vocab_size=10_000, max_length=9000
        )


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(
    ("rows", "tokens", "sent"),
    [(3, 2, []), (512, 2, []), (1100, 2, [76, 512, 512]), (40, 8000, [8, 16, 16]), (600, 1, [88, 256, 256])],
)
async def test_a_batch_arrives_as_it_was_sent(rows: int, tokens: int, sent: list[int], masked: bool) -> None:
    """One that is larger than a call of theirs may be comes in parts; those that are refused in halves."""
    whole = part(0, rows, tokens)
    if masked:
        whole = replace(whole, trained=np.random.default_rng(0).random(rows * tokens) < 0.5)
    critic, limit = Keeping(), 6500 if tokens == 1 else 4 << 20
    starts = np.arange(rows) * tokens
    numbers = [[given[start : start + tokens] for start in starts] for given in (whole.values, whole.returns)]
    async with served(add_CriticServicer_to_server, critic, most_bytes=limit) as channel:
        client = CriticClient(channel)
        client.lease = common_pb2.Lease(run_id="ours", number=4)
        options: dict[str, Any] = {"epochs": 1, "minibatch_size": 4, "seed": 0, "timeout_s": 20}
        if masked:
            options["trained"] = [whole.trained[start : start + tokens] for start in starts]
        metrics = await client.train(7, whole.prompts, whole.responses, *numbers, **options)
    assert metrics == {"rows": rows}
    assert sorted(critic.sent) == sent
    assert critic.batch is not None
    assert digest([critic.batch], ()) == digest([whole], ())


async def test_a_critic_that_has_lost_the_parts_has_lost_its_training_too() -> None:
    class Replaced(Keeping):
        async def Train(self, request: Any, context: Any) -> Any:
            await context.abort(FailedPrecondition.code, "staged: 1100 pairs, but 0 of step 7 have come")

    whole = part(0, 1100)
    rows = [np.zeros(2, np.float32)] * 1100
    async with served(add_CriticServicer_to_server, Replaced()) as channel:
        with pytest.raises(CriticReset, match=r"critic.Train: staged: 1100 pairs, but 0 of step 7 have come"):
            await CriticClient(channel).train(
                7, whole.prompts, whole.responses, rows, rows, epochs=1, minibatch_size=4, seed=0, timeout_s=20
            )
