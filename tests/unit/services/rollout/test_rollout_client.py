"""RolloutClient.generate over real gRPC: each sample exactly once, whatever becomes of the replicas."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from protos import common_pb2
from protos import rollout_pb2 as pb
from quartet.wire.errors import (
    DeadlineExceeded,
    FailedPrecondition,
    InvalidArgument,
    InvalidReply,
    LeaseLost,
    OffTimeline,
    Unavailable,
)
from services.rollout.client import RolloutClient
from services.rollout.sample import Sampling
from tests.unit.playing_replica import HANG, PROMPTS, SEEDS, FakeReplica, answer, check, collect


async def test_samples_come_as_they_finish() -> None:
    replica = FakeReplica([[[2], [0, 3], [1]]])
    async with replica.serve() as channel:
        messages = await collect(channel, seeds=SEEDS, min_version=6)
    check(messages)
    assert [[sample.index for sample in message] for message in messages] == [[2], [0, 3], [1]]
    assert replica.asked() == [[10, 11, 12, 13]]
    assert replica.seeds() == [SEEDS]
    assert replica.requests[0].min_version == 6
    assert Sampling.from_wire(replica.requests[0].sampling) == Sampling(max_new_tokens=7, temperature=0.5)
    sample = messages[0][0]
    assert (sample.finish_reason, sample.policy_version, sample.logprobs.tolist()) == ("length", 3, [-0.5, -0.25])


async def test_a_call_that_is_too_large_is_asked_in_halves_which_is_not_a_repetition() -> None:
    large = grpc.StatusCode.RESOURCE_EXHAUSTED
    replica = FakeReplica([[large], [[1, 0]], [large], [[0]], [[0]]])
    repeats: list[int] = []
    async with replica.serve() as channel:
        check(await collect(channel, seeds=SEEDS, on_repeat=repeats.append))
    assert replica.asked() == [[10, 11, 12, 13], [10, 11], [12, 13], [12], [13]]
    assert replica.seeds() == [SEEDS, [100, 101], [102, 2**62], [102], [2**62]]
    assert sum(repeats) == 0


async def test_a_sample_of_a_prompt_that_was_not_sent_is_refused() -> None:
    class Confused(FakeReplica):
        async def Generate(self, request: pb.GenerateRequest, context: Any) -> AsyncIterator[pb.GenerateResponse]:
            yield pb.GenerateResponse(segments=[answer(4, PROMPTS[0]).to_wire()])

    async with Confused([]).serve() as channel:
        with pytest.raises(InvalidReply, match=r"^rollout.Generate: a segment of prompt 4, but 4 were sent"):
            await collect(channel)


async def test_a_busy_service_is_asked_again() -> None:
    replica = FakeReplica([[[2, 3]], [[0, 1]]], pushback=2)
    async with replica.serve() as channel:
        check(await collect(channel))
    assert replica.asked() == [[10, 11, 12, 13]] * 3 + [[10, 11]]


async def test_only_what_a_dead_replica_left_unfinished_is_asked_again_with_its_own_seeds() -> None:
    # The second call holds prompts 0, 1 and 3; its sample 1 is the caller's 1. The third holds 0 and 3.
    gone = grpc.StatusCode.UNAVAILABLE
    replica = FakeReplica([[[2], gone], [[1], gone], [[1], [0]]])
    async with replica.serve() as channel:
        messages = await collect(channel, seeds=SEEDS, min_version=6)
    check(messages)
    assert [message[0].index for message in messages] == [2, 1, 3, 0]
    assert replica.asked() == [[10, 11, 12, 13], [10, 11, 13], [10, 13]]
    assert replica.seeds() == [SEEDS, [100, 101, 2**62], [100, 2**62]]
    assert [request.min_version for request in replica.requests] == [6, 6, 6]


async def test_a_replica_of_an_abandoned_timeline_is_asked_again_like_one_that_is_behind() -> None:
    abandoned = OffTimeline("timeline: a holds version 7 of an abandoned timeline (3); the run is at timeline 4")
    behind = FailedPrecondition("min_version: 5 asked, but b serves 4")
    replica, repeats = FakeReplica([[abandoned], [behind], [[0, 1, 2, 3]]]), list[int]()
    async with replica.serve() as channel:
        check(await collect(channel, min_version=5, on_repeat=repeats.append))
    assert (len(replica.requests), repeats) == (3, [4, 4])


async def test_a_run_that_lost_its_lease_is_told_at_once_and_only_calls_for_a_version_carry_it() -> None:
    lost = LeaseLost("lease: run a (lease 1) no longer holds this service: run b (lease 2) does")
    replica = FakeReplica([[lost], [[0, 1, 2, 3]]])
    lease = common_pb2.Lease(run_id="a", number=1)
    async with replica.serve() as channel:
        client = RolloutClient(channel)
        client.lease = lease
        with pytest.raises(LeaseLost, match=r"^rollout.Generate: lease: run a \(lease 1\) no longer .* run b"):
            await _all(client.generate(PROMPTS, Sampling(max_new_tokens=7), max_version=0, timeout_s=60))
        await _all(client.generate(PROMPTS, Sampling(max_new_tokens=7), timeout_s=60))
    assert [request.lease for request in replica.requests] == [lease, common_pb2.Lease()]


async def _all(stream: Any) -> list[Any]:
    return [samples async for samples in stream]


async def test_a_stream_that_ends_early_is_asked_again() -> None:
    replica = FakeReplica([[[0, 1, 3]], [[0]]])
    async with replica.serve() as channel:
        check(await collect(channel))
    assert replica.asked() == [[10, 11, 12, 13], [12]]
    assert replica.seeds() == [[], []]


async def test_a_failure_after_the_last_sample_costs_nothing() -> None:
    replica = FakeReplica([[[0, 1, 2, 3], grpc.StatusCode.INTERNAL]])
    async with replica.serve() as channel:
        check(await collect(channel))


@pytest.mark.parametrize(
    ("code", "kind"),
    [(grpc.StatusCode.FAILED_PRECONDITION, FailedPrecondition), (grpc.StatusCode.UNAVAILABLE, Unavailable)],
)
async def test_waiting_ends_at_the_deadline(code: grpc.StatusCode, kind: type[Exception]) -> None:
    # Tries at 0, 0.05 to 0.1, 0.15 to 0.3 s and so on: some five, or two where the machine stands still meanwhile.
    replica = FakeReplica([[code]] * 9)
    async with replica.serve() as channel:
        with pytest.raises(kind, match=r"^rollout.Generate: said the script$"):
            await collect(channel, timeout_s=1.5)
    assert 2 <= len(replica.requests) <= 6


async def test_a_refusal_is_told_at_the_deadline_also_where_that_passes_during_the_next_try() -> None:
    replica = FakeReplica([[grpc.StatusCode.FAILED_PRECONDITION], [HANG]])
    async with replica.serve() as channel:
        with pytest.raises(FailedPrecondition, match=r"^rollout.Generate: said the script$"):
            await collect(channel, timeout_s=2)
    assert len(replica.requests) == 2


async def test_a_refusal_is_not_the_reason_any_more_once_samples_have_come() -> None:
    replica = FakeReplica([[grpc.StatusCode.FAILED_PRECONDITION], [[1], HANG]])
    async with replica.serve() as channel:
        with pytest.raises(DeadlineExceeded, match=r"^rollout.Generate: 3 samples missing after 4 s$"):
            await collect(channel, timeout_s=4)


@pytest.mark.parametrize("code", [grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.INTERNAL])
async def test_other_failures_are_raised_at_once(code: grpc.StatusCode) -> None:
    replica = FakeReplica([[[0], code]])
    async with replica.serve() as channel:
        with pytest.raises(Exception, match=r"^rollout.Generate: said the script$"):
            await collect(channel)
    assert len(replica.requests) == 1


async def test_the_deadline_tells_how_much_is_missing() -> None:
    replica = FakeReplica([[[1], HANG]])
    async with replica.serve() as channel:
        with pytest.raises(DeadlineExceeded, match=r"^rollout.Generate: 3 samples missing after 2 s$"):
            await collect(channel, timeout_s=2)
        async with asyncio.timeout(5):
            await replica.cancelled.wait()


async def test_a_silent_replica_is_given_up_and_its_rest_asked_again() -> None:
    """Silence ends after 0.3 s, long before the deadline; heartbeats, messages without samples, break it."""
    replica = FakeReplica([[[1], HANG], [[], [], [0, 1, 2]]])
    repeats: list[int] = []
    async with replica.serve() as channel:
        async with asyncio.timeout(5):
            messages = await collect(channel, stall_s=0.3, timeout_s=60, on_repeat=repeats.append)
        async with asyncio.timeout(5):
            await replica.cancelled.wait()
    check(messages)
    assert [len(message) for message in messages] == [1, 3]
    assert replica.asked() == [[10, 11, 12, 13], [10, 12, 13]]
    assert repeats == [3]


async def test_leaving_the_samples_ends_the_call_on_the_replica() -> None:
    replica = FakeReplica([[[1], HANG]])
    async with replica.serve() as channel:
        samples: Any = RolloutClient(channel).generate(PROMPTS, Sampling(max_new_tokens=7), timeout_s=60)
        await anext(samples)
        await samples.aclose()
        async with asyncio.timeout(5):
            await replica.cancelled.wait()


async def test_there_must_be_one_seed_per_prompt() -> None:
    replica = FakeReplica([])
    async with replica.serve() as channel:
        with pytest.raises(InvalidArgument, match="seeds: 3 for 4 prompts; give one each, or None"):
            await collect(channel, seeds=SEEDS[:3])
