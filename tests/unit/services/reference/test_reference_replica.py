"""The reference deployment without Serve and without a model: what it admits, and where its answers go."""

from functools import partial
from typing import Any

import numpy as np
import pytest

from protos import common_pb2
from protos import reference_pb2 as pb
from quartet.columns import Columns
from quartet.config.limits import LimitsConfig
from quartet.models.distribution import Distribution
from quartet.serving.admission import Admission
from quartet.serving.batcher import Batcher
from quartet.wire.codec import Floats, unpack_floats
from quartet.wire.errors import InvalidArgument, ResourceExhausted
from services.reference.model import Question, answers
from services.reference.replica import MOST_ENDS, Reference
from tests.trajectories import of
from tests.unit.contexts import Context


@pytest.fixture
def reference() -> Any:
    made = object.__new__(Reference.func_or_class)  # type: ignore[attr-defined]
    made.passes = []

    class Echo:
        vocab_size, max_length = 64, 32

        def logprobs(self, trajectories: Columns, distribution: Distribution) -> Floats:
            """The sampled tokens themselves."""
            made.passes.append(len(trajectories))
            return trajectories.ids[trajectories.sampled].astype(np.float32)

        def check(self) -> None:
            """Finds nothing wrong."""

    made._question, made._distribution = Question, Distribution
    made._tokens = 60
    made._admission = Admission(LimitsConfig(max_call_rows=16))
    made._batcher = Batcher(partial(answers, Echo()), batch_tokens=8, batch_s=10)
    made._model = common_pb2.ModelInfo(vocab_size=64, max_length=32)
    return made


async def test_answers_of_many_passes_come_back_in_the_order_asked(reference: Any) -> None:
    draw = np.random.default_rng(0)
    responses = [draw.integers(0, 64, int(length)).astype(np.int32) for length in draw.integers(1, 9, 16)]
    request = pb.LogprobsRequest(trajectories=of([[1]] * 16, responses).pack())
    reply = await reference.Logprobs(request, Context())
    assert unpack_floats(reply.ref_logprobs, "x").tolist() == np.concatenate(responses).tolist()
    assert len(reference.passes) > 5


async def test_too_many_pairs_and_too_many_end_tokens_are_refused(reference: Any) -> None:
    ones = [np.ones(1, np.int32)]
    with pytest.raises(ResourceExhausted, match="trajectories: 17 rows, but a call may hold 16"):
        await reference.Logprobs(pb.LogprobsRequest(trajectories=of(ones * 17, ones * 17).pack()), Context())
    request = pb.LogprobsRequest(trajectories=of(ones, ones).pack(), end_ids=[1] * (MOST_ENDS + 1))
    with pytest.raises(InvalidArgument, match=f"end_ids: {MOST_ENDS + 1} of them; may be {MOST_ENDS} at most"):
        await reference.Logprobs(request, Context())
    assert reference.passes == []


async def test_one_token_is_left_before_the_minimum(reference: Any) -> None:
    """Otherwise all have probability 0, and no log-prob is a number."""
    ones = [np.ones(1, np.int32)]
    every = pb.LogprobsRequest(trajectories=of(ones, ones).pack(), end_ids=range(60), min_new_tokens=1)
    with pytest.raises(InvalidArgument, match=r"^end_ids: all 60 tokens; before min_new_tokens one must be left$"):
        await reference.Logprobs(every, Context())
    for ends, least in ((range(60), 0), (range(1, 61), 1)):
        asked = pb.LogprobsRequest(trajectories=of(ones, ones).pack(), end_ids=ends, min_new_tokens=least)
        await reference.Logprobs(asked, Context())


async def test_what_was_given_between_sampled_tokens_has_no_log_prob(reference: Any) -> None:
    """A prompt, sampled 5 and 6, given 7, sampled 8, given 9: of one call with a prompt and its response."""
    ids, sampled = [1, 5, 6, 7, 8, 9, 1, 4], [False, True, True, False, True, False, False, True]
    columns = Columns.of(np.asarray(ids, np.int32), np.asarray([6, 2], np.int32), np.asarray(sampled))
    reply = await reference.Logprobs(pb.LogprobsRequest(trajectories=columns.pack()), Context())
    assert unpack_floats(reply.ref_logprobs, "x").tolist() == [5, 6, 8, 4]


async def test_several_sequences_are_one_trajectory(reference: Any) -> None:
    """Given 1, sampled 5, and a further sequence: given 2, sampled 6 and 7."""
    sampled, begins = (np.asarray(row, bool) for row in ([0, 1, 0, 1, 1], [0, 0, 1, 0, 0]))
    columns = Columns.of(np.asarray([1, 5, 2, 6, 7], np.int32), np.asarray([5], np.int32), sampled, begins)
    request = pb.LogprobsRequest(trajectories=columns.pack())
    reply = await reference.Logprobs(request, Context())
    assert unpack_floats(reply.ref_logprobs, "x").tolist() == [5, 6, 7]
