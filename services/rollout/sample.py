"""Sampling parameters and samples of the rollout service, without torch, vLLM or Ray."""

from dataclasses import asdict, dataclass, replace
from enum import StrEnum

import numpy as np

from protos import rollout_pb2 as pb
from quartet.trajectory import Segment, VersionSpans
from quartet.wire.codec import Floats, Ints, pack_floats, pack_ints, unpack_floats, unpack_ints
from quartet.wire.errors import InvalidArgument

MOST_STOPS = 256
"""Most stop tokens of one request; the engine keeps them with every prompt."""
COLDEST, HOTTEST = 0.01, 2.0
"""Lowest temperature above 0 that vLLM samples at, as it raises lower ones, and the highest that it takes."""


def check_versions(request: pb.GenerateRequest) -> None:
    """Raises InvalidArgument if no version can be within the request's bounds."""
    if request.HasField("max_version") and request.min_version > request.max_version:
        raise InvalidArgument(
            f"min_version: {request.min_version}; must be at most max_version, {request.max_version}"
        )


def seed_of_turn(seed: int, turn: int) -> int:
    """Seed of a response in a conversation, or of one that goes on, from that of the first: with the same the engine
    would draw the same numbers again. `turn` counts from 0."""
    if turn == 0:
        return seed
    return int(np.random.SeedSequence([seed, turn]).generate_state(1, np.uint64)[0] >> 1)


class FinishReason(StrEnum):
    """Reason for which a response ended."""

    STOP = "stop"
    """An end-of-sequence or stop token, which is the last response token."""
    LENGTH = "length"
    """The limit on its length."""


_TO_WIRE: dict[FinishReason | None, pb.FinishReason] = {
    None: pb.FINISH_REASON_UNSPECIFIED,
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
        return pb.SamplingParams(**asdict(self))

    @classmethod
    def from_wire(cls, message: pb.SamplingParams) -> "Sampling":
        """Reads protobuf. InvalidArgument names the first field that is wrong."""
        if len(message.stop_token_ids) > MOST_STOPS:
            raise InvalidArgument(
                f"sampling.stop_token_ids: {len(message.stop_token_ids)} of them; may be {MOST_STOPS} at most"
            )
        temperature = message.temperature if message.HasField("temperature") else 1.0
        if temperature == np.float32(COLDEST):
            temperature = COLDEST  # the wire's float is below it
        sampling = cls(
            max_new_tokens=message.max_new_tokens,
            temperature=temperature,
            top_p=message.top_p if message.HasField("top_p") else 1.0,
            top_k=message.top_k,
            min_new_tokens=message.min_new_tokens,
            stop_token_ids=tuple(message.stop_token_ids),
            ignore_eos=message.ignore_eos,
        )
        problems = {
            "max_new_tokens": (sampling.max_new_tokens >= 1, "at least 1"),
            "temperature": (
                sampling.temperature == 0 or COLDEST <= sampling.temperature <= HOTTEST,
                f"0 (greedy) or {COLDEST:g} to {HOTTEST:g}",
            ),
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
    """A response, or T tokens of one that is not finished, which follow those that came before."""

    index: int
    """Index of its prompt in the request."""
    response_ids: Ints
    """Token ids, the end-of-sequence token included, [T]."""
    logprobs: Floats
    """log pi(y_t | prefix) of the sampling policy at the sampling temperature, [T]."""
    finish_reason: FinishReason | None
    """Reason for its end; None if the response is not finished."""
    spans: VersionSpans
    """Versions that sampled it, counted from its own first token."""
    kept: int = 0
    """Number of its first tokens that were kept from replicas that did not finish it."""

    @property
    def segment(self) -> Segment:
        """The response as a segment of its trajectory."""
        return Segment(self.response_ids, self.logprobs, self.spans)

    @property
    def policy_version(self) -> int:
        """Version of the weights that sampled the last token."""
        return self.spans[-1][0]

    def to_wire(self) -> pb.Segment:
        """Converts to protobuf."""
        return pb.Segment(
            index=self.index,
            ids=pack_ints(self.response_ids),
            logprobs=pack_floats(self.logprobs),
            spans=[
                pb.VersionSpan(policy_version=version, start=start, end=end) for version, start, end in self.spans
            ],
            finish_reason=_TO_WIRE[self.finish_reason],
        )


def from_wire(message: pb.Segment, index: int) -> Sample:
    """Reads protobuf, as a response to the prompt with this index. InvalidArgument unless there is a log-prob for
    each token, and every version and the reason are ones that can be."""
    ids, logprobs = unpack_ints(message.ids, "segment.ids"), unpack_floats(message.logprobs, "segment.logprobs")
    if len(logprobs) != len(ids):
        raise InvalidArgument(
            f"segment.logprobs: {len(logprobs)} values for {len(ids)} response tokens; there must be one per token"
        )
    spans = tuple((span.policy_version, span.start, span.end) for span in message.spans)
    for version, _, _ in spans:
        if not 0 <= version < 1 << 31:
            raise InvalidArgument(f"segment.spans: version {version}; must be 0 to {(1 << 31) - 1}")
    if message.finish_reason not in _FROM_WIRE:
        raise InvalidArgument(f"segment.finish_reason: {message.finish_reason}; must be one of the enum")
    return Sample(index, ids, logprobs, _FROM_WIRE[message.finish_reason], spans)


def following(part: Sample, rest: Sample) -> Sample:
    """Puts the tokens that came of a response before those of the rest of it.

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
