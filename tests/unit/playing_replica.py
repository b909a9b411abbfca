"""A rollout replica that plays a script, and what a client gets from it."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Any

import grpc
import numpy as np

from protos import rollout_pb2 as pb
from protos.rollout_pb2_grpc import RolloutServicer, add_RolloutServicer_to_server
from quartet.wire.backoff import with_pushback
from quartet.wire.codec import unpack_longs, unpack_sequences
from quartet.wire.errors import (
    ServiceError,
)
from services.rollout.client import RolloutClient
from services.rollout.sample import FinishReason, Sample, Sampling
from tests.unit.wire import served

PROMPTS = [np.asarray([10 + index] * (index + 1), np.int32) for index in range(4)]


SEEDS = [100, 101, 102, 2**62]


HANG = "hang"


@dataclass
class FakeReplica(RolloutServicer):
    """Plays one list of acts per call: indices or parts to send in one message, a status or error to end with, HANG.

    The response to a prompt is twice its first token and the prompt's length."""

    acts: list[list[Any]]
    pushback: int = 0
    """Calls that are told to come back, before the acts begin."""
    requests: list[pb.GenerateRequest] = field(default_factory=list)
    cancelled: asyncio.Event = field(default_factory=asyncio.Event)

    async def Generate(self, request: pb.GenerateRequest, context: Any) -> AsyncIterator[pb.GenerateResponse]:
        assert dict(context.invocation_metadata())["application"] == "rollout"
        self.requests.append(request)
        prompts = unpack_sequences(request.prompts, "prompts", vocab_size=100)
        if self.pushback:
            self.pushback -= 1
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, with_pushback("busy", 0.05))
        for act in self.acts.pop(0):
            if isinstance(act, ServiceError):
                await context.abort(act.code, str(act))
            if isinstance(act, grpc.StatusCode):
                await context.abort(act, "said the script")
            if act == HANG:
                try:
                    await asyncio.Event().wait()
                finally:
                    self.cancelled.set()
            segments = [each if isinstance(each, Sample) else answer(each, prompts[each]) for each in act]
            yield pb.GenerateResponse(segments=[segment.to_wire() for segment in segments])

    def serve(self) -> AbstractAsyncContextManager[grpc.aio.Channel]:
        return served(add_RolloutServicer_to_server, self)

    def asked(self) -> list[list[int]]:
        """The first token of each prompt, for each call."""
        actual = [unpack_sequences(request.prompts, "x", vocab_size=100) for request in self.requests]
        return [[int(prompt[0]) for prompt in prompts] for prompts in actual]

    def begun(self) -> list[list[list[int]]]:
        """The tokens that each response has already, for each call."""
        actual = [unpack_sequences(r.begun, "x", vocab_size=100, allow_empty=True) for r in self.requests]
        return [[tokens.tolist() for tokens in sequences] for sequences in actual]

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
