"""Sampling parameters, samples and parts of them of the rollout service, without torch, vLLM or Ray."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TypeVar

import numpy as np

from protos import rollout_pb2 as pb
from quartet.wire.codec import Floats, Ints, pack_floats, pack_ints, split, unpack_floats, unpack_ints
from quartet.wire.errors import InvalidArgument

VersionSpans = tuple[tuple[int, int, int], ...]
"""(policy_version, start, end) of runs of tokens sampled by one version; ((7, 0, 5), (8, 5, 9)) means that version 7
sampled tokens 0 to 4 and version 8 tokens 5 to 8."""
MOST_STOPS = 256
"""Most stop tokens of one request; the engine keeps them with every prompt."""


HOTTEST = 2.0
"""Highest temperature that vLLM takes."""


class FinishReason(StrEnum):
    """Reason for which a response ended."""

    STOP = "stop"
    """An end-of-sequence or stop token, which is the last response token."""
    LENGTH = "length"
    """The limit on its length."""


_TO_WIRE = {
    FinishReason.STOP: pb.FINISH_REASON_STOP,
    FinishReason.LENGTH: pb.FINISH_REASON_LENGTH,
}
_FROM_WIRE = {wire: reason for reason, wire in _TO_WIRE.items()}


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling parameters; the fields are those of rollout.proto's SamplingParams."""

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_new_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    def to_wire(self) -> pb.SamplingParams:
        """Converts to protobuf."""
        return pb.SamplingParams(
            max_new_tokens=self.max_new_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_new_tokens=self.min_new_tokens,
            stop_token_ids=self.stop_token_ids,
            ignore_eos=self.ignore_eos,
        )

    @classmethod
    def from_wire(cls, message: pb.SamplingParams) -> "Sampling":
        """Reads protobuf. InvalidArgument names the first field that is wrong."""
        if len(message.stop_token_ids) > MOST_STOPS:
            raise InvalidArgument(
                f"sampling.stop_token_ids: {len(message.stop_token_ids)} of them; may be {MOST_STOPS} at most"
            )
        sampling = cls(
            max_new_tokens=message.max_new_tokens,
            temperature=message.temperature if message.HasField("temperature") else 1.0,
            top_p=message.top_p if message.HasField("top_p") else 1.0,
            top_k=message.top_k,
            min_new_tokens=message.min_new_tokens,
            stop_token_ids=tuple(message.stop_token_ids),
            ignore_eos=message.ignore_eos,
        )
        problems = {
            "max_new_tokens": (sampling.max_new_tokens >= 1, "at least 1"),
            "temperature": (0 <= sampling.temperature <= HOTTEST, f"0 (greedy) to {HOTTEST:g}"),
            "top_p": (0 < sampling.top_p <= 1, "above 0 and at most 1"),
            "top_k": (sampling.top_k >= 0, "0 (off) or more"),
            "min_new_tokens": (
                0 <= sampling.min_new_tokens <= sampling.max_new_tokens,
                "between 0 and max_new_tokens",
            ),
        }
        for name, (fine, should) in problems.items():
            if not fine:
                raise InvalidArgument(f"sampling.{name}: {getattr(sampling, name):g}; must be {should}")
        return sampling


@dataclass(frozen=True, slots=True)
class Sample:
    """One finished response."""

    index: int
    """Index of its prompt in the request."""
    response_ids: Ints
    """Token ids, the end-of-sequence token included, [T]."""
    logprobs: Floats
    """log pi(y_t | prefix) of the sampling policy at the sampling temperature, [T]."""
    finish_reason: FinishReason
    spans: VersionSpans
    """Versions that sampled it."""
    kept: int = 0
    """Number of its first tokens that were kept from replicas that did not finish it."""

    @property
    def policy_version(self) -> int:
        """Version of the weights that sampled the last token."""
        return self.spans[-1][0]

    @property
    def oldest_version(self) -> int:
        """Oldest version that sampled any of its tokens."""
        return min(version for version, _, _ in self.spans)

    @property
    def versions(self) -> Ints:
        """Version that sampled each token, [T]."""
        versions = np.zeros(len(self.response_ids), np.int32)
        for version, start, end in self.spans:
            versions[start:end] = version
        return versions

    def to_wire(self) -> pb.Sample:
        """Converts to protobuf."""
        return pb.Sample(
            index=self.index,
            response_ids=pack_ints(self.response_ids),
            logprobs=pack_floats(self.logprobs),
            finish_reason=_TO_WIRE[self.finish_reason],
            policy_version=self.policy_version,
            spans=_spans_to_wire(self.spans),
            kept=self.kept,
        )

    @classmethod
    def from_wire(cls, message: pb.Sample) -> "Sample":
        """From protobuf."""
        return cls(
            index=message.index,
            response_ids=unpack_ints(message.response_ids, "sample.response_ids"),
            logprobs=unpack_floats(message.logprobs, "sample.logprobs"),
            finish_reason=_FROM_WIRE[message.finish_reason],
            spans=_spans_from_wire(message.spans),
            kept=message.kept,
        )


@dataclass(frozen=True, slots=True)
class Part:
    """T tokens of a response that is not finished, which follow those of its parts before."""

    index: int
    """Index of its prompt in the request."""
    response_ids: Ints
    """Token ids, [T]."""
    logprobs: Floats
    """Log-probs of the sampling policy, as of a sample, [T]."""
    spans: VersionSpans
    """Versions that sampled it, counted from its own first token."""

    def to_wire(self) -> pb.Part:
        """Converts to protobuf."""
        return pb.Part(
            index=self.index,
            response_ids=pack_ints(self.response_ids),
            logprobs=pack_floats(self.logprobs),
            spans=_spans_to_wire(self.spans),
        )

    @classmethod
    def from_wire(cls, message: pb.Part) -> "Part":
        """Reads protobuf. InvalidArgument unless there is a log-prob for each token."""
        ids = unpack_ints(message.response_ids, "part.response_ids")
        logprobs = unpack_floats(message.logprobs, "part.logprobs")
        [logprobs] = split(logprobs, [len(ids)], "part.logprobs")
        return cls(message.index, ids, logprobs, _spans_from_wire(message.spans))


Rest = TypeVar("Rest", Part, Sample)


def following(part: Part, rest: Rest) -> Rest:
    """Puts the tokens of a part before those of the rest of its response.

    Spans (7, 0, 3) and then (7, 0, 2), (8, 2, 4) become (7, 0, 5), (8, 5, 7).
    """
    count = len(part.response_ids)
    shifted: VersionSpans = tuple((version, count + start, count + end) for version, start, end in rest.spans)
    return replace(
        rest,
        response_ids=np.concatenate([part.response_ids, rest.response_ids]),
        logprobs=np.concatenate([part.logprobs, rest.logprobs]),
        spans=_merged((*part.spans, *shifted)),
    )


def cut(spans: VersionSpans, start: int) -> VersionSpans:
    """The spans of the tokens from `start` on, counted from there."""
    return tuple((version, max(s - start, 0), e - start) for version, s, e in spans if e > start)


def _merged(spans: VersionSpans) -> VersionSpans:
    merged: list[tuple[int, int, int]] = []
    for version, start, end in spans:
        if merged and merged[-1][0] == version:
            start = merged.pop()[1]
        merged.append((version, start, end))
    return tuple(merged)


def _spans_to_wire(spans: VersionSpans) -> list[pb.VersionSpan]:
    return [pb.VersionSpan(policy_version=version, start=start, end=end) for version, start, end in spans]


def _spans_from_wire(spans: Iterable[pb.VersionSpan]) -> VersionSpans:
    return tuple((span.policy_version, span.start, span.end) for span in spans)
