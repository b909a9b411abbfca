"""Samples that a client asked for and that are missing, and the tokens that have come of them."""

from collections.abc import Iterable, Sequence
from dataclasses import replace

from protos import rollout_pb2 as pb
from quartet.wire.errors import InvalidReply, ResourceExhausted, ServiceError
from quartet.wire.replies import reading
from quartet.wire.splitting import PAIRS
from services.rollout.sample import Sample, following, from_wire


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
        for sample in _read(response.segments, asked, call):
            if sample.finish_reason is not None:
                samples.append(_whole(begun, sample))
                continue
            before = self._parts.get(sample.index)
            self._parts[sample.index] = following(before, sample) if before else sample
        for sample in samples:
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


def _whole(begun: dict[int, Sample], rest: Sample) -> Sample:
    """A sample with the tokens that were there before its call."""
    part = begun.get(rest.index)
    return replace(following(part, rest), kept=len(part.response_ids)) if part else rest


def _read(messages: Iterable[pb.Segment], asked: Sequence[int], call: str) -> list[Sample]:
    """Reads samples, with the index of their prompt among the caller's, instead of among those of this
    call."""
    read = []
    for message in messages:
        if not 0 <= message.index < len(asked):
            raise InvalidReply(f"{call}: a segment of prompt {message.index}, but {len(asked)} were sent")
        with reading(call):
            read.append(from_wire(message, asked[message.index]))
    return read
