"""Client of the rollout service."""

import asyncio
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from dataclasses import replace
from typing import Any

import grpc
import numpy as np

from protos import common_pb2
from protos import rollout_pb2 as pb
from protos.rollout_pb2_grpc import RolloutStub
from quartet.wire.backoff import Backoff, Deadline
from quartet.wire.client import ServiceClient, too_busy
from quartet.wire.codec import Ints, pack_longs, pack_sequences
from quartet.wire.errors import (
    DeadlineExceeded,
    FailedPrecondition,
    InvalidArgument,
    InvalidReply,
    LeaseLost,
    ResourceExhausted,
    ServiceError,
    TooLarge,
    Unavailable,
    from_rpc,
)
from quartet.wire.hedging import MOST_ATTEMPTS, first_answer
from quartet.wire.replies import reading
from quartet.wire.splitting import PAIRS
from services.rollout.sample import Sample, Sampling, following, from_wire

RELAY_S = 3.0
"""Seconds beyond a phase's own deadline that the replica which passes it on gets to answer."""


class Remaining:
    """The prompts whose samples have not come yet, what has come of those, and how many of them one call asks for."""

    def __init__(self, prompts: int) -> None:
        self._missing, self._most = set(range(prompts)), PAIRS
        self._parts: dict[int, Sample] = {}
        self._lease = 0

    def __len__(self) -> int:
        return len(self._missing)

    def next(self) -> list[int]:
        """Indices of the prompts for the next call; empty when all samples have come."""
        return sorted(self._missing)[: self._most]

    def begun(self, asked: Sequence[int], versions: tuple[int, int | None], lease: int) -> dict[int, Sample]:
        """Parts that have come of these samples, without those that hold a token of a version outside `versions`.
        Under another lease, which is another timeline, there are none for calls that name a version."""
        if lease != self._lease and versions != (0, None):
            self._parts = {}
        self._lease = lease
        oldest, newest = versions
        for index in asked:
            spans = self._parts[index].spans if index in self._parts else ()
            if not all(oldest <= version and (newest is None or version <= newest) for version, _, _ in spans):
                del self._parts[index]
        return {index: self._parts[index] for index in asked if index in self._parts}

    def receive(
        self, response: pb.GenerateResponse, asked: Sequence[int], begun: dict[int, Sample], call: str
    ) -> list[Sample]:
        """Records what has come; returns the samples, with the tokens that they had before the call."""
        samples = []
        for message in response.segments:
            if not 0 <= message.index < len(asked):
                raise InvalidReply(f"{call}: a segment of prompt {message.index}, but {len(asked)} were sent")
            with reading(call):  # with its prompt's index among the caller's, instead of among those of this call
                sample = from_wire(message, asked[message.index])
            if sample.finish_reason is None:
                before = self._parts.get(sample.index)
                self._parts[sample.index] = following(before, sample) if before else sample
            else:
                part = begun.get(sample.index)
                samples.append(replace(following(part, sample), kept=len(part.response_ids)) if part else sample)
                self._missing.discard(sample.index)
                self._parts.pop(sample.index, None)
        return samples

    def among(self, asked: Sequence[int]) -> int:
        """Number of these prompts whose samples have not come."""
        return sum(index in self._missing for index in asked)

    def halve(self, again: int, failure: ServiceError) -> bool:
        """Makes later calls half as large if this one was refused for its size; True if it did."""
        refused = isinstance(failure, ResourceExhausted) and failure.retry_after_s is None and again > 1
        self._most = again // 2 if refused else self._most
        return refused


class RolloutClient(ServiceClient[RolloutStub]):
    """Samples from the policy and drives weight pushes."""

    SERVICE = "rollout"
    STUB = RolloutStub

    lease = common_pb2.Lease()
    """The lease from the last `claim`, with the identity that it was granted to. Every phase of a push carries it,
    and every Generate that asks for a version, so that a run which lost its lease can't sample any more."""

    proved: pb.Proof | None = None
    """The last proof of the run's pushes, which goes with every phase for the replicas to tell their callers."""

    async def generate(
        self,
        prompts: Sequence[Ints],
        sampling: Sampling,
        *,
        seeds: Sequence[int] | None = None,
        min_version: int = 0,
        max_version: int | None = None,
        timeout_s: float,
        stall_s: float = 8,
        on_repeat: Callable[[int], None] = lambda missing: None,
    ) -> AsyncIterator[list[Sample]]:
        """Samples one response per prompt and yields the samples as they finish, each exactly once.

        What a replica leaves unfinished, as it dies, is silent or gets other weights, is asked for from there on.

        Args:
            prompts, sampling: token ids, each [P], and how to sample their responses.
            seeds: one per prompt, for reproducible samples; None for unseeded sampling.
            min_version: oldest version, of the run's timeline, that may serve this; 0 for any weights.
            max_version: newest version that may; None for any. With either, the client needs the run's lease.
            timeout_s: deadline for all samples, repeats included.
            stall_s: seconds of silence after which a replica counts as stuck; a working one speaks every 2 s.
            on_repeat: called before each repeat with the number of samples that are asked for again.

        Raises:
            InvalidArgument: the request can never succeed, or the number of seeds is wrong.
            DeadlineExceeded, Unavailable, FailedPrecondition: some samples did not come in time, or LeaseLost.
        """
        deadline, remaining = Deadline(timeout_s), Remaining(len(prompts))
        bounds = (min_version, max_version)
        backoff, call, refusal = Backoff(deadline), f"{self.application}.Generate", None
        while asked := remaining.next():
            begun = remaining.begun(asked, bounds, self.lease.number)
            stream = self._stream(prompts, asked, begun, sampling, seeds, bounds, deadline.left_s)
            try:
                async for response in _heard(stream, stall_s):
                    refusal = None
                    if samples := remaining.receive(response, asked, begun, call):
                        yield samples
                failure: ServiceError = Unavailable(f"{call}: ended with {len(remaining)} samples missing")
            except grpc.RpcError as error:
                failure = from_rpc(error, call)
            except TimeoutError:
                failure = Unavailable(f"{call}: a replica was silent for {stall_s:g} s")
            finally:
                stream.cancel()  # a caller that leaves early must not leave the replica sampling
            if (again := remaining.among(asked)) and not remaining.halve(again, failure):
                refusal = await _pause(failure, refusal, backoff, f"{call}: {len(remaining)} samples missing")
                on_repeat(0 if isinstance(failure, ResourceExhausted) else again)

    def _stream(
        self,
        prompts: Sequence[Ints],
        asked: list[int],
        begun: dict[int, Sample],
        sampling: Sampling,
        seeds: Sequence[int] | None,
        versions: tuple[int, int | None],
        timeout_s: float,
    ) -> grpc.aio.UnaryStreamCall:
        if seeds is not None and len(seeds) != len(prompts):
            raise InvalidArgument(f"seeds: {len(seeds)} for {len(prompts)} prompts; give one each, or None")
        tokens = [begun[index].response_ids if index in begun else np.empty(0, np.int32) for index in asked]
        request = pb.GenerateRequest(
            prompts=pack_sequences([prompts[index] for index in asked]),
            sampling=sampling.to_wire(),
            seeds=pack_longs(seeds[index] for index in asked) if seeds else b"",
            min_version=versions[0],
            max_version=versions[1],
            lease=self.lease if versions != (0, None) else None,
            begun=pack_sequences(tokens) if begun else None,
        )
        return self._stub.Generate(request, metadata=self._metadata, timeout=timeout_s)

    async def info(self, timeout_s: float) -> pb.RolloutInfo:
        """Model, version and load of one replica."""
        info: pb.RolloutInfo = await self._call(
            self._stub.Info, common_pb2.InfoRequest(), timeout_s, "Info", anywhere=True
        )
        return info

    async def claim(
        self, lease: common_pb2.Lease, ttl_s: float, timeout_s: float, *, take_over: bool = False
    ) -> list[pb.WeightReport]:
        """Puts the lease in force on every replica, or renews it, for `ttl_s` seconds; 0 releases the replicas.

        Raises:
            LeaseLost: another run holds the replicas and is alive, or has a later lease.
        """
        claim = common_pb2.Claim(ttl_s=ttl_s, take_over=take_over)
        reports = await self._phase(timeout_s, lease, claim=claim)
        refused = [f"{report.replica}: {report.error}" for report in reports if not report.ok]
        if len(refused) < len(reports) or not refused:
            identity = next((report.held.lease.identity for report in reports if report.ok), self.lease.identity)
            self.lease = common_pb2.Lease(run_id=lease.run_id, number=lease.number, identity=identity)
        if refused:
            raise Unavailable(f"{self.application}.UpdateWeights(claim): " + "; ".join(refused))
        return reports

    async def update_weights(
        self, timeout_s: float, *, members: Collection[str] = (), **phase: Any
    ) -> list[pb.WeightReport]:
        """Makes every replica carry out one phase, given as `prepare=Prepare(...)`; returns the reports that came.

        Returns when all `members` have answered (all replicas if no members are given), at the latest after
        `timeout_s`. The call is not repeated if the replica that fans it out is lost: the caller aborts and pushes
        again.

        Raises:
            LeaseLost: another run holds the replicas.
        """
        return await self._phase(timeout_s, self.lease, members=members, **phase)

    async def _phase(self, timeout_s: float, lease: common_pb2.Lease, **fields: Any) -> list[pb.WeightReport]:
        request = pb.WeightPhase(timeout_s=timeout_s, lease=lease, proved=self.proved, **fields)

        async def ask() -> pb.WeightReports:
            try:
                reply: pb.WeightReports = await self._stub.UpdateWeights(
                    request, metadata=self._metadata, timeout=timeout_s + RELAY_S
                )
                return reply
            except grpc.RpcError as error:
                raise from_rpc(error, f"{self.application}.UpdateWeights({request.WhichOneof('phase')})") from None

        # A discover changes nothing, so another replica may pass it on too if the first one stands still.
        reply = await (first_answer(ask, timeout_s / MOST_ATTEMPTS) if "discover" in fields else ask())
        if fenced := [report for report in reply.reports if report.fenced]:
            raise LeaseLost(f"{self.application}.UpdateWeights: {fenced[0].replica}: {fenced[0].error}")
        return list(reply.reports)


async def _pause(failure: ServiceError, refusal: ServiceError | None, backoff: Backoff, missing: str) -> ServiceError:
    """Waits before the next try; returns why the last one was refused.

    Args:
        failure: the last try's; raised at once if waiting does not mend it, or no time is left.
        refusal: of the try before; raised if the deadline ended the last one, which had little time because of it.
        missing: said if the deadline ended the last try and nothing had been refused.
    """
    if isinstance(failure, DeadlineExceeded):
        raise refusal or DeadlineExceeded(f"{missing} after {backoff.deadline.timeout_s:g} s")
    if isinstance(failure, TooLarge | LeaseLost):
        raise failure
    if isinstance(failure, ResourceExhausted):
        busy = too_busy(failure, backoff.deadline)
        await backoff.wait(busy, failure.retry_after_s)
        return busy
    if not isinstance(failure, Unavailable | FailedPrecondition):
        raise failure
    await backoff.wait(failure)
    return failure


async def _heard(stream: grpc.aio.UnaryStreamCall, stall_s: float) -> AsyncIterator[pb.GenerateResponse]:
    """Yields the stream's messages; TimeoutError if no message comes for `stall_s`."""
    messages = aiter(stream)
    while True:
        async with asyncio.timeout(stall_s):
            message = await anext(messages, None)
        if message is None:
            return
        yield message
