"""Client of the rollout service."""

import asyncio
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from typing import Any

import grpc

from protos import common_pb2
from protos import rollout_pb2 as pb
from protos.rollout_pb2_grpc import RolloutStub
from services.common.arrays import Ints, pack_longs, pack_sequences
from services.common.client import Backoff, ServiceClient
from services.common.errors import (
    DeadlineExceeded,
    FailedPrecondition,
    InvalidArgument,
    ServiceError,
    Unavailable,
    from_rpc,
)
from services.rollout.sample import Sample, Sampling


class RolloutClient(ServiceClient[RolloutStub]):
    """Samples from the policy, and drives weight pushes."""

    def __init__(self, channel: grpc.aio.Channel, application: str = "rollout") -> None:
        super().__init__(channel, RolloutStub, application)

    async def generate(
        self,
        prompts: Sequence[Ints],
        sampling: Sampling,
        *,
        seeds: Sequence[int] | None = None,
        min_version: int = 0,
        max_version: int | None = None,
        timeout_s: float,
        stall_s: float = 20,
        on_repeat: Callable[[int], None] = lambda missing: None,
    ) -> AsyncIterator[list[Sample]]:
        """One sample per prompt, as they finish, each exactly once.

        A replica that dies, falls silent, is too old or too new or drops requests in a push costs only its
        unfinished samples: those are asked for again, until the deadline.

        Args:
            prompts: token ids, each [P].
            sampling: how to sample.
            seeds: one per prompt, for reproducible samples; None samples freely.
            min_version: oldest policy version that may serve this.
            max_version: newest that may; None for any.
            timeout_s: deadline of the whole, repeats included.
            stall_s: silence after which a replica is given up as stuck. Replicas speak every 2 s, busy or not.
            on_repeat: told how many samples are asked for once more, each time.

        Raises:
            InvalidArgument: the request can never succeed, or there is not one seed per prompt.
            DeadlineExceeded: not all samples came in time.
            Unavailable, FailedPrecondition: nobody could serve the rest until the deadline.
        """
        if seeds is not None and len(seeds) != len(prompts):
            raise InvalidArgument(f"seeds: {len(seeds)} for {len(prompts)} prompts; give one each, or None")
        backoff = Backoff(timeout_s)
        missing = set(range(len(prompts)))
        while missing:
            asked = sorted(missing)
            stream = self._stream(prompts, asked, sampling, seeds, (min_version, max_version), backoff.left_s)
            try:
                async for response in _heard(stream, stall_s):
                    samples = [_renumbered(sample, asked) for sample in response.samples]
                    missing.difference_update(sample.index for sample in samples)
                    if samples:
                        yield samples
                failure: ServiceError = Unavailable(f"rollout.Generate: ended with {len(missing)} samples missing")
            except grpc.RpcError as error:
                failure = from_rpc(error, "rollout.Generate")
            except TimeoutError:
                failure = Unavailable(f"rollout.Generate: a replica was silent for {stall_s:g} s")
            finally:
                stream.cancel()  # whoever leaves early must not leave the replica sampling
            if missing:
                await self._retry(failure, backoff, timeout_s, len(missing))
                on_repeat(len(missing))

    def _stream(
        self,
        prompts: Sequence[Ints],
        asked: list[int],
        sampling: Sampling,
        seeds: Sequence[int] | None,
        versions: tuple[int, int | None],
        timeout_s: float,
    ) -> grpc.aio.UnaryStreamCall:
        request = pb.GenerateRequest(
            prompts=pack_sequences([prompts[index] for index in asked]),
            sampling=sampling.to_wire(),
            seeds=pack_longs(seeds[index] for index in asked) if seeds else b"",
            min_version=versions[0],
            max_version=versions[1],
        )
        return self._stub.Generate(request, metadata=self._metadata, timeout=timeout_s)

    async def _retry(self, failure: ServiceError, backoff: Backoff, timeout_s: float, missing: int) -> None:
        if isinstance(failure, DeadlineExceeded):
            raise DeadlineExceeded(f"rollout.Generate: {missing} samples missing after {timeout_s:g} s")
        if not isinstance(failure, (Unavailable, FailedPrecondition)):
            raise failure
        await backoff.wait(failure)

    async def info(self, timeout_s: float) -> pb.RolloutInfo:
        """Model, version and load of one replica."""
        info: pb.RolloutInfo = await self._call(self._stub.Info, common_pb2.InfoRequest(), timeout_s, "Info")
        return info

    async def update_weights(
        self, timeout_s: float, *, members: Collection[str] = (), **phase: Any
    ) -> list[pb.WeightReport]:
        """Has every replica carry out one phase, given as `prepare=Prepare(...)`; the reports that came.

        Returns when all `members` have answered, everyone if there are none, or else after `timeout_s`.
        Not repeated when the fan-out's own replica is lost on the way: the caller aborts and pushes again.
        """
        request = pb.WeightPhase(timeout_s=timeout_s, members=members, **phase)
        try:
            reply = await self._stub.UpdateWeights(request, metadata=self._metadata, timeout=timeout_s + 5)
        except grpc.RpcError as error:
            raise from_rpc(error, f"rollout.UpdateWeights({request.WhichOneof('phase')})") from None
        return list(reply.reports)


async def _heard(stream: grpc.aio.UnaryStreamCall, stall_s: float) -> AsyncIterator[pb.GenerateResponse]:
    """The stream's messages; TimeoutError when none comes for `stall_s`."""
    messages = aiter(stream)
    while True:
        try:
            async with asyncio.timeout(stall_s):
                message = await anext(messages)
        except StopAsyncIteration:
            return
        yield message


def _renumbered(message: pb.Sample, asked: list[int]) -> Sample:
    """The sample, its index being that of the caller's prompts and not of a repeat's remainder."""
    message.index = asked[message.index]
    return Sample.from_wire(message)
