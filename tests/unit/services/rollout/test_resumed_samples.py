"""Samples that a replica did not finish go on from their tokens at another one, over real gRPC."""

from typing import Any

import grpc
import numpy as np
import pytest

from protos import common_pb2
from protos import rollout_pb2 as pb
from quartet.wire.errors import InvalidReply
from services.rollout.client import Remaining, RolloutClient
from services.rollout.sample import FinishReason, Sample, Sampling, cut, following
from tests.unit.playing_replica import PROMPTS, SEEDS, FakeReplica, collect

GONE = grpc.StatusCode.UNAVAILABLE


def part(index: int, *tokens: int, version: int = 3) -> Sample:
    logprobs = -np.asarray(tokens, np.float32)
    return Sample(index, np.asarray(tokens, np.int32), logprobs, None, ((version, 0, len(tokens)),))


async def sampled(replica: FakeReplica, **options: Any) -> dict[int, Sample]:
    async with replica.serve() as channel:
        messages = await collect(channel, **options)
    return {sample.index: sample for message in messages for sample in message}


async def test_what_a_lost_replica_had_sampled_is_not_sampled_again() -> None:
    """The second call holds prompts 0, 1 and 3, the third 1 and 3; version 2 sampled the first parts, 3 the rest."""
    first = [[part(1, 5, 6, version=2), part(2, 7)], [2, part(1, 8, version=2)], GONE]
    replica = FakeReplica([first, [[0, part(2, 9, version=2)], [part(2, 4)], GONE], [[0], [1]]])
    samples = await sampled(replica, seeds=SEEDS)
    assert replica.asked() == [[10, 11, 12, 13], [10, 11, 13], [11, 13]]
    assert replica.seeds() == [SEEDS, [100, 101, 2**62], [101, 2**62]]
    assert replica.begun() == [[], [[], [5, 6, 8], []], [[5, 6, 8], [9, 4]]]
    assert {index: sample.kept for index, sample in samples.items()} == {0: 0, 1: 3, 2: 0, 3: 2}
    # The script's answers are twice the first token and the prompt's length.
    assert samples[1].response_ids.tolist() == [5, 6, 8, 22, 2]
    assert samples[1].logprobs.tolist() == [-5, -6, -8, -0.5, -0.25]
    assert samples[1].spans == ((2, 0, 3), (3, 3, 5))
    assert samples[3].response_ids.tolist() == [9, 4, 26, 4]
    assert samples[3].spans == ((2, 0, 1), (3, 1, 4))
    assert samples[1].policy_version == 3
    assert [samples[index].response_ids.tolist() for index in (0, 2)] == [[20, 1], [24, 3]]


async def test_tokens_of_versions_that_may_not_serve_are_sampled_again() -> None:
    """The case of a push that comes into an evaluation."""
    parts = [part(0, 5), part(1, 6), part(1, 7, version=4), part(3, 8, version=2)]
    replica = FakeReplica([[parts, GONE], [[0, 1, 2, 3]]])
    samples = await sampled(replica, min_version=3, max_version=3)
    assert replica.begun() == [[], [[5], [], [], []]]
    assert [samples[index].kept for index in range(4)] == [1, 0, 0, 0]


def test_tokens_of_another_timeline_are_sampled_again() -> None:
    remaining = Remaining(2)
    assert remaining.begun([0, 1], (3, None), lease=1) == {}
    answer = pb.GenerateResponse(segments=[part(0, 5).to_wire(), part(0, 6).to_wire()])
    assert remaining.receive(answer, [0, 1], {}, "rollout.Generate") == []
    assert remaining.begun([0, 1], (3, None), lease=1)[0].response_ids.tolist() == [5, 6]
    # Any weights will do for a call that names no version.
    assert remaining.begun([0, 1], (0, None), lease=2)[0].response_ids.tolist() == [5, 6]
    assert remaining.begun([0, 1], (3, None), lease=3) == {}


async def test_a_part_that_cannot_be_read_is_an_error_of_the_reply() -> None:
    short = Sample(0, np.asarray([5, 6], np.int32), np.zeros(1, np.float32), None, ((3, 0, 2),))
    unasked, few = "a segment of prompt 4, but 4 were sent", "segment.logprobs: 1 values for 2"
    for wrong, message in ((part(4, 5), unasked), (short, few)):
        with pytest.raises(InvalidReply, match=f"^rollout.Generate: {message}"):
            await sampled(FakeReplica([[[wrong]]]))


async def test_the_calls_of_a_run_carry_its_lease_with_the_tokens() -> None:
    replica = FakeReplica([[[part(0, 5)], GONE], [[0, 1, 2, 3]]])
    async with replica.serve() as channel:
        client = RolloutClient(channel)
        client.lease = common_pb2.Lease(run_id="a", number=2)
        stream = client.generate(PROMPTS, Sampling(max_new_tokens=7), min_version=3, timeout_s=5)
        samples = [sample async for some in stream for sample in some]
    assert (replica.begun()[1], len(samples)) == ([[5], [], [], []], 4)
    assert {request.lease.number for request in replica.requests} == {2}


def test_spans_of_the_tokens_from_one_on_and_of_tokens_after_others() -> None:
    assert cut(((7, 0, 3), (8, 3, 6)), 0) == ((7, 0, 3), (8, 3, 6))
    assert cut(((7, 0, 3), (8, 3, 6)), 2) == ((7, 0, 1), (8, 1, 4))
    assert cut(((7, 0, 3), (8, 3, 6)), 3) == ((8, 0, 3),)
    rest = Sample(0, np.zeros(4, np.int32), np.zeros(4, np.float32), FinishReason.STOP, ((7, 0, 2), (8, 2, 4)))
    assert following(part(0, 1, 2, 3, version=7), rest).spans == ((7, 0, 5), (8, 5, 7))
    assert following(part(0, 1, version=6), rest).spans == ((6, 0, 1), (7, 1, 3), (8, 3, 5))
