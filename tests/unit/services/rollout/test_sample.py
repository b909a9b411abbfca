"""Requests for samples, and the samples that come back, on the wire."""

import re
from typing import Any

import numpy as np
import pytest

from protos import rollout_pb2 as pb
from quartet.wire.errors import InvalidArgument
from services.rollout.sample import FinishReason, Sample, Sampling


def test_sampling_round_trips() -> None:
    full = Sampling(
        max_new_tokens=9,
        temperature=0.5,
        top_p=0.25,
        top_k=3,
        min_new_tokens=9,
        stop_token_ids=(5, 6),
        ignore_eos=True,
    )
    assert Sampling.from_wire(full.to_wire()) == full
    greedy = Sampling(max_new_tokens=1, temperature=0.0)
    assert Sampling.from_wire(greedy.to_wire()) == greedy


def test_what_is_not_said_is_off() -> None:
    assert Sampling.from_wire(pb.SamplingParams(max_new_tokens=4)) == Sampling(
        max_new_tokens=4, temperature=1.0, top_p=1.0, top_k=0, min_new_tokens=0, stop_token_ids=(), ignore_eos=False
    )


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"max_new_tokens": 0}, "sampling.max_new_tokens: 0; must be at least 1"),
        ({"temperature": -0.5}, "sampling.temperature: -0.5; must be 0 (greedy) to 2"),
        ({"temperature": float("nan")}, "sampling.temperature: nan; must be 0 (greedy) to 2"),
        ({"temperature": float("inf")}, "sampling.temperature: inf; must be 0 (greedy) to 2"),
        ({"temperature": 2.1}, "sampling.temperature: 2.1; must be 0 (greedy) to 2"),
        ({"top_p": 0}, "sampling.top_p: 0; must be above 0 and at most 1"),
        ({"top_p": 1.5}, "sampling.top_p: 1.5; must be above 0 and at most 1"),
        ({"top_k": -1}, "sampling.top_k: -1; must be 0 (off) or more"),
        ({"min_new_tokens": 5}, "sampling.min_new_tokens: 5; must be between 0 and max_new_tokens"),
        ({"stop_token_ids": [1] * 257}, "sampling.stop_token_ids: 257 of them; may be 256 at most"),
        ({"min_new_tokens": -1}, "sampling.min_new_tokens: -1; must be between 0 and max_new_tokens"),
    ],
)
def test_sampling_that_cannot_be(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgument, match=re.escape(message)):
        Sampling.from_wire(pb.SamplingParams(**{"max_new_tokens": 4} | fields))


def test_samples_round_trip_and_know_their_weights() -> None:
    sample = Sample(
        index=3,
        response_ids=np.asarray([7, 2], np.int32),
        logprobs=np.asarray([-0.5, -1.5], np.float32),
        finish_reason=FinishReason.STOP,
        spans=((5, 0, 1), (4, 1, 1), (6, 1, 2)),
        kept=1,
    )
    message = sample.to_wire()
    assert message.policy_version == sample.policy_version == 6
    assert sample.oldest_version == 4
    assert message.finish_reason == pb.FINISH_REASON_STOP
    back = Sample.from_wire(message)
    assert (back.index, back.finish_reason, back.spans, back.kept) == (3, FinishReason.STOP, sample.spans, 1)
    assert (back.response_ids.tolist(), back.logprobs.tolist()) == ([7, 2], [-0.5, -1.5])


def test_every_finish_reason_has_its_number() -> None:
    for reason, number in ((FinishReason.STOP, 1), (FinishReason.LENGTH, 2)):
        sample = Sample(0, np.zeros(1, np.int32), np.zeros(1, np.float32), reason, ((1, 0, 1),))
        assert sample.to_wire().finish_reason == number
        assert Sample.from_wire(sample.to_wire()).finish_reason is reason
