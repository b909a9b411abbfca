"""The reference deployment without Serve and without a model: what it admits, and where its answers go."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from protos import common_pb2
from protos import reference_pb2 as pb
from quartet.config.limits import LimitsConfig
from quartet.serving.admission import Admission
from quartet.serving.batcher import Batcher
from quartet.wire.codec import Floats, pack_pairs, unpack_floats
from quartet.wire.errors import InvalidArgument, ResourceExhausted
from services.reference.replica import MOST_ENDS, Reference
from tests.unit.contexts import Context


@pytest.fixture
def reference() -> Any:
    made = object.__new__(Reference.func_or_class)  # type: ignore[attr-defined]
    made.passes = []

    def logprobs(questions: Sequence[Any]) -> list[Floats]:
        """The response's own tokens."""
        made.passes.append(len(questions))
        return [response.astype(np.float32) for _, response in questions]

    made._question, made._distribution = (lambda p, r, asked: (p, r)), dict
    made._tokens = 60
    made._admission = Admission(LimitsConfig(max_call_rows=16))
    made._batcher = Batcher(logprobs, batch_tokens=8, batch_s=10)
    made._model = common_pb2.ModelInfo(vocab_size=64, max_length=32)
    return made


async def test_answers_of_many_passes_come_back_in_the_order_asked(reference: Any) -> None:
    draw = np.random.default_rng(0)
    responses = [draw.integers(0, 64, int(length)).astype(np.int32) for length in draw.integers(1, 9, 16)]
    request = pb.LogprobsRequest(pairs=pack_pairs([np.ones(1, np.int32)] * 16, responses))
    reply = await reference.Logprobs(request, Context())
    assert unpack_floats(reply.ref_logprobs, "x").tolist() == np.concatenate(responses).tolist()
    assert len(reference.passes) > 5


async def test_too_many_pairs_and_too_many_end_tokens_are_refused(reference: Any) -> None:
    ones = [np.ones(1, np.int32)]
    with pytest.raises(ResourceExhausted, match="pairs: 17 rows, but a call may hold 16"):
        await reference.Logprobs(pb.LogprobsRequest(pairs=pack_pairs(ones * 17, ones * 17)), Context())
    request = pb.LogprobsRequest(pairs=pack_pairs(ones, ones), end_ids=[1] * (MOST_ENDS + 1))
    with pytest.raises(InvalidArgument, match=f"end_ids: {MOST_ENDS + 1} of them; may be {MOST_ENDS} at most"):
        await reference.Logprobs(request, Context())
    assert reference.passes == []


async def test_one_token_is_left_before_the_minimum(reference: Any) -> None:
    """Otherwise all have probability 0, and no log-prob is a number."""
    ones = [np.ones(1, np.int32)]
    every = pb.LogprobsRequest(pairs=pack_pairs(ones, ones), end_ids=range(60), min_new_tokens=1)
    with pytest.raises(InvalidArgument, match=r"^end_ids: all 60 tokens; before min_new_tokens one must be left$"):
        await reference.Logprobs(every, Context())
    for ends, least in ((range(60), 0), (range(1, 61), 1)):
        asked = pb.LogprobsRequest(pairs=pack_pairs(ones, ones), end_ids=ends, min_new_tokens=least)
        await reference.Logprobs(asked, Context())
