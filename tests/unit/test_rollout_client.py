"""RolloutClient.generate over real gRPC: each sample exactly once, whatever becomes of the replicas."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Any

import grpc
import numpy as np
import pytest

from protos import rollout_pb2 as pb
from protos.rollout_pb2_grpc import RolloutServicer, add_RolloutServicer_to_server
from services.common.arrays import unpack_longs, unpack_sequences
from services.common.errors import DeadlineExceeded, FailedPrecondition, InvalidArgument, Unavailable
from services.rollout.client import RolloutClient
from services.rollout.sample import FinishReason, Sample, Sampling
from tests.unit.wire import Script, served

PROMPTS = [np.asarray([10 + index] * (index + 1), np.int32) for index in range(4)]
SEEDS = [100, 101, 102, 2**62]
HANG = "hang"


@dataclass
class FakeReplica(RolloutServicer):
    """Plays one list of acts per call: indices to send in one message, a status to end with, or HANG.

    The response to a prompt is twice its first token and the prompt's length."""

    acts: list[list[Any]]
    requests: list[pb.GenerateRequest] = field(default_factory=list)
    cancelled: asyncio.Event = field(default_factory=asyncio.Event)

    async def Generate(self, request: pb.GenerateRequest, context: Any) -> AsyncIterator[pb.GenerateResponse]:
        assert dict(context.invocation_metadata())["application"] == "rollout"
        self.requests.append(request)
        prompts = unpack_sequences(request.prompts, "prompts", vocab_size=100)
        for act in self.acts.pop(0):
            if isinstance(act, grpc.StatusCode):
                await context.abort(act, "said the script")
            if act == HANG:
                try:
                    await asyncio.Event().wait()
                finally:
                    self.cancelled.set()
            yield pb.GenerateResponse(samples=[answer(index, prompts[index]).to_wire() for index in act])

    def serve(self) -> AbstractAsyncContextManager[grpc.aio.Channel]:
        return served(add_RolloutServicer_to_server, self)

    def asked(self) -> list[list[int]]:
        """For each call, the first token of each prompt."""
        found = [unpack_sequences(request.prompts, "x", vocab_size=100) for request in self.requests]
        return [[int(prompt[0]) for prompt in prompts] for prompts in found]

    def seeds(self) -> list[list[int]]:
        return [unpack_longs(request.seeds, "x").tolist() for request in self.requests]


def answer(index: int, prompt: Any) -> Sample:
    ids = np.asarray([2 * prompt[0], len(prompt)], np.int32)
    return Sample(index, ids, np.asarray([-0.5, -0.25], np.float32), FinishReason.LENGTH, ((3, 0, 2),))


async def collect(channel: grpc.aio.Channel, timeout_s: float = 5, **options: Any) -> list[list[Sample]]:
    client = RolloutClient(channel)
    return [
        samples
        async for samples in client.generate(
            PROMPTS, Sampling(max_new_tokens=7, temperature=0.5), timeout_s=timeout_s, **options
        )
    ]


def check(messages: list[list[Sample]]) -> None:
    """Every prompt was answered once, and with its own answer."""
    samples = sorted((sample for message in messages for sample in message), key=lambda sample: sample.index)
    assert [sample.index for sample in samples] == [0, 1, 2, 3]
    assert [sample.response_ids.tolist() for sample in samples] == [[20, 1], [22, 2], [24, 3], [26, 4]]


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


async def test_replicas_with_old_weights_are_waited_for() -> None:
    old = grpc.StatusCode.FAILED_PRECONDITION
    replica = FakeReplica([[old], [old], [[0, 1, 2, 3]]])
    async with replica.serve() as channel:
        check(await collect(channel))
    assert len(replica.requests) == 3


@pytest.mark.parametrize(
    ("code", "kind"),
    [(grpc.StatusCode.FAILED_PRECONDITION, FailedPrecondition), (grpc.StatusCode.UNAVAILABLE, Unavailable)],
)
async def test_waiting_ends_at_the_deadline(code: grpc.StatusCode, kind: type[Exception]) -> None:
    # Tries at 0, 0.1 and 0.3 s; the next would be at 0.7 s.
    replica = FakeReplica([[code]] * 9)
    async with replica.serve() as channel:
        with pytest.raises(kind, match=r"^rollout.Generate: said the script$"):
            await collect(channel, timeout_s=0.6)
    assert 2 <= len(replica.requests) <= 3


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
        with pytest.raises(DeadlineExceeded, match=r"^rollout.Generate: 3 samples missing after 0.5 s$"):
            await collect(channel, timeout_s=0.5)
        async with asyncio.timeout(5):
            await replica.cancelled.wait()


async def test_a_silent_replica_is_given_up_and_its_rest_asked_again() -> None:
    """After 0.3 s of silence, long before the deadline; heartbeats, messages without samples, are no silence."""
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


async def test_a_push_phase_is_sent_once_and_reported_by_replica() -> None:
    reports = [pb.WeightReport(replica="a", ok=True), pb.WeightReport(replica="b", error="no")]
    script = Script(pb.WeightReports(reports=reports))
    servicer: Any = RolloutServicer()
    servicer.UpdateWeights = script.answer
    async with served(add_RolloutServicer_to_server, servicer) as channel:
        client = RolloutClient(channel)
        assert await client.update_weights(9, commit=pb.Commit(epoch=1, policy_version=2)) == reports
        script.failures.append(grpc.StatusCode.UNAVAILABLE)
        with pytest.raises(Unavailable, match=r"^rollout.UpdateWeights\(abort\): said the script$"):
            await client.update_weights(9, abort=pb.Abort(epoch=1))
    assert script.requests == [
        pb.WeightPhase(timeout_s=9, commit=pb.Commit(epoch=1, policy_version=2)),
        pb.WeightPhase(timeout_s=9, abort=pb.Abort(epoch=1)),
    ]
