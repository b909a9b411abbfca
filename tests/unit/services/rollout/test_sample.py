"""Requests for samples, and the samples that come back, on the wire."""

import re
from typing import Any

import numpy as np
import pytest

from protos import rollout_pb2 as pb
from quartet.wire.errors import InvalidArgument
from services.rollout.sample import COLDEST, HOTTEST, MOST_STOPS, FinishReason, Sample, Sampling, from_wire


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
    for temperature in (0.0, COLDEST, HOTTEST):
        sampling = Sampling(max_new_tokens=1, temperature=temperature)
        assert Sampling.from_wire(sampling.to_wire()) == sampling


def test_as_many_stop_tokens_as_may_be_are_taken() -> None:
    stops = tuple(range(MOST_STOPS))
    assert Sampling.from_wire(pb.SamplingParams(max_new_tokens=4, stop_token_ids=stops)).stop_token_ids == stops


def test_what_is_not_said_is_off() -> None:
    assert Sampling.from_wire(pb.SamplingParams(max_new_tokens=4)) == Sampling(
        max_new_tokens=4, temperature=1.0, top_p=1.0, top_k=0, min_new_tokens=0, stop_token_ids=(), ignore_eos=False
    )


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"max_new_tokens": 0}, "sampling.max_new_tokens: 0; must be at least 1"),
        ({"temperature": -0.5}, "sampling.temperature: -0.5; must be 0 (greedy) or 0.01 to 2"),
        ({"temperature": float("nan")}, "sampling.temperature: nan; must be 0 (greedy) or 0.01 to 2"),
        ({"temperature": float("inf")}, "sampling.temperature: inf; must be 0 (greedy) or 0.01 to 2"),
        ({"temperature": 0.00999}, "sampling.temperature: 0.00999; must be 0 (greedy) or 0.01 to 2"),
        ({"temperature": 2.1}, "sampling.temperature: 2.1; must be 0 (greedy) or 0.01 to 2"),
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
    assert sample.policy_version == 6
    segment = sample.segment
    assert (segment.ids.tolist(), segment.versions.tolist()) == ([7, 2], [5, 6])
    assert message.finish_reason == pb.FINISH_REASON_STOP
    back = from_wire(message, 4)
    assert isinstance(back, Sample)
    assert (back.index, back.finish_reason, back.spans, back.kept) == (4, FinishReason.STOP, sample.spans, 0)
    assert (back.response_ids.tolist(), back.logprobs.tolist()) == ([7, 2], [-0.5, -1.5])


def test_a_segment_without_a_reason_is_part_of_a_response() -> None:
    part = Sample(2, np.asarray([7], np.int32), np.asarray([-0.5], np.float32), None, ((5, 0, 1),))
    back = from_wire(part.to_wire(), 2)
    assert back.finish_reason is None
    assert (back.index, back.response_ids.tolist(), back.spans) == (2, [7], ((5, 0, 1),))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"finish_reason": 9}, "segment.finish_reason: 9; must be one of the enum"),
        (
            {"spans": [{"policy_version": 1 << 31, "start": 0, "end": 1}]},
            "segment.spans: version 2147483648;",
        ),
        ({"spans": [{"policy_version": -1, "start": 0, "end": 1}]}, "segment.spans: version -1; must be 0 to"),
        ({"logprobs": b""}, "segment.logprobs: 0 values for 1 response tokens"),
        ({"ids": b"123"}, "segment.ids: 3 bytes are not a whole number"),
    ],
)
def test_segments_that_cannot_be(fields: dict[str, Any], message: str) -> None:
    fine: dict[str, Any] = {"ids": bytes(4), "logprobs": bytes(4), "finish_reason": pb.FINISH_REASON_STOP}
    with pytest.raises(InvalidArgument, match=re.escape(message)):
        from_wire(pb.Segment(**fine | fields), 0)


def test_every_finish_reason_has_its_number() -> None:
    for reason, number in ((FinishReason.STOP, 1), (FinishReason.LENGTH, 2)):
        sample = Sample(0, np.zeros(1, np.int32), np.zeros(1, np.float32), reason, ((1, 0, 1),))
        assert sample.to_wire().finish_reason == number
        back = from_wire(sample.to_wire(), 0)
        assert isinstance(back, Sample)
        assert back.finish_reason is reason
