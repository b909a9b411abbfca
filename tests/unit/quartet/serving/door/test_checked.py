"""Requests of many elements, and a request on its way through Serve's proxy, in Serve's own wrapping."""

import pickle
import random
from contextlib import suppress
from typing import Any
from unittest.mock import MagicMock

import pytest
from google.protobuf.message import DecodeError
from ray.serve._private.proxy_request_response import gRPCProxyRequest

from protos import common_pb2, reward_pb2, rollout_pb2
from protos.critic_pb2 import StageRequest, TrainRequest
from quartet.serving.door.checked import Checked, elements, parsed
from quartet.wire.errors import ResourceExhausted
from tests.fuzz.generator import KINDS, METHODS, body

MOST = 1000
STAGE: Any = StageRequest.DESCRIPTOR


def _request() -> TrainRequest:
    return TrainRequest(step=3, batch=bytes(1400), last_step=0, lease=common_pb2.Lease(run_id="a", number=3))


def _wrapped(checked: Checked) -> gRPCProxyRequest:
    context = MagicMock()
    context.invocation_metadata.return_value = (("application", "critic"),)
    return gRPCProxyRequest(checked, context, "/quartet.v1.Critic/Train", stream=False)


def test_the_replica_gets_the_message_that_the_bytes_are() -> None:
    request = _request()
    raw = request.SerializeToString()
    sent = _wrapped(Checked(TrainRequest, raw)).serialized_replica_arg()
    arrived = pickle.loads(sent).user_request_proto
    assert type(arrived) is TrainRequest
    assert arrived == request
    assert len(sent) < len(raw) + 400


def test_the_proxy_does_not_keep_the_bytes_beside_what_it_sends() -> None:
    checked = Checked(TrainRequest, _request().SerializeToString())
    asked = _wrapped(checked)
    asked.serialized_replica_arg()
    assert not any(isinstance(value, bytes) for value in vars(checked).values())
    with pytest.raises(RuntimeError, match="pickled only once"):
        asked.serialized_replica_arg()


@pytest.mark.parametrize(
    ("kind", "raw"),
    [
        pytest.param(StageRequest, b"\x78\x00" * (MOST + 1), id="unknown fields"),
        pytest.param(StageRequest, b"\x7a\x00" * (MOST + 1), id="unknown messages"),
        pytest.param(StageRequest, b"\x7d\x00\x00\x00\x00" * (MOST + 1), id="unknown numbers"),
        pytest.param(StageRequest, b"\x22\x00" * (MOST + 1), id="empty leases"),
        pytest.param(rollout_pb2.WeightPhase, b"\x42\x02\x0a\x00" * MOST, id="messages in messages"),
        pytest.param(reward_pb2.ScoreRequest, b"\x1a\x00" * (MOST + 1), id="labels"),
        pytest.param(
            reward_pb2.ScoreRequest,
            reward_pb2.ScoreRequest(texts=reward_pb2.TextPairs(prompts=[""] * (MOST + 1))).SerializeToString(),
            id="texts",
        ),
        pytest.param(
            reward_pb2.ScoreRequest, reward_pb2.ScoreRequest(ended=[True] * 3 * MOST).SerializeToString(), id="ended"
        ),
        pytest.param(rollout_pb2.WeightPhase, b"\x3a\x00" * (MOST + 1), id="members"),
        pytest.param(
            rollout_pb2.WeightPhase,
            rollout_pb2.WeightPhase(
                prepare=rollout_pb2.Prepare(ranks={str(place): place for place in range(MOST)})
            ).SerializeToString(),
            id="a map",
        ),
        pytest.param(
            rollout_pb2.GenerateRequest,
            rollout_pb2.GenerateRequest(
                sampling=rollout_pb2.SamplingParams(stop_token_ids=[5] * 3 * MOST)
            ).SerializeToString(),
            id="stop tokens",
        ),
    ],
)
def test_more_elements_than_allowed_are_refused_before_they_are_parsed(kind: Any, raw: bytes) -> None:
    with pytest.raises(ResourceExhausted, match=rf"Some/Method: a request of more than {MOST} fields and elements"):
        parsed(kind, raw, "Some/Method", MOST)


def test_packed_numbers_count_as_one_element_however_many_they_are() -> None:
    sequences = common_pb2.Sequences(token_ids=bytes(1 << 20), lengths=bytes(1 << 10))
    request = rollout_pb2.GenerateRequest(prompts=sequences, begun=sequences, seeds=bytes(1 << 20))
    raw, kind = request.SerializeToString(), rollout_pb2.GenerateRequest
    descriptor: Any = kind.DESCRIPTOR
    assert elements(raw, descriptor, MOST) == 7
    assert parsed(kind, raw, "Rollout/Generate", 7) == request
    with pytest.raises(ResourceExhausted):
        parsed(kind, raw, "Rollout/Generate", 6)


@pytest.mark.parametrize(
    "raw",
    [
        pytest.param(b"\x80" * 3000, id="a tag without an end"),
        pytest.param(b"\x80", id="a tag that is cut off"),
        pytest.param(b"\x0a", id="no length"),
        pytest.param(b"\x0a\xff\xff\xff\xff\x0f", id="a length beyond the end"),
        pytest.param(b"\x22\x02\x0a\x09" + bytes(20), id="an inner length beyond its message"),
        pytest.param(b"\x0d\x00", id="a number that is cut off"),
        pytest.param(b"\x0b\x0c", id="a group"),
    ],
)
def test_bytes_that_are_not_a_message_are_refused_by_the_count_too(raw: bytes) -> None:
    with pytest.raises(ValueError, match=r"a field|a number"):
        elements(raw, STAGE, MOST)


def test_whatever_can_be_parsed_can_be_counted() -> None:
    rng = random.Random(3)
    for _ in range(2000):
        kind = rng.choice(METHODS).input_type
        elements(body(rng, "structured", kind), kind, MOST)
        with suppress(ValueError):
            elements(body(rng, rng.choice(KINDS), kind), kind, MOST)


def test_a_message_that_only_looks_like_one_is_left_to_protobuf() -> None:
    with pytest.raises(DecodeError):
        parsed(reward_pb2.ScoreRequest, b"\x1a\x02\xff\xfe", "Reward/Score", MOST)
