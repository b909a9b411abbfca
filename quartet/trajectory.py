"""The contract of a sample: a trajectory is made of segments, and what is trained on is what was sampled.

A prompt and its response are two segments. Where an environment answers, its tokens are a third, and the response to
them a fourth:

    Trajectory(number=17, group=16, row=3, segments=(given(prompt), sampled, given(answer), sampled))

An agent may have shortened its history, or asked two things side by side. Its trajectory is then several sequences,
of which the second begins with a prompt of its own:

    (given(prompt), sampled, given(summary, begins=True), sampled)
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain
from typing import Any

import numpy as np

from quartet.columns import Columns
from quartet.wire.codec import Floats, Ints

VersionSpans = tuple[tuple[int, int, int], ...]
"""(policy_version, start, end) of runs of tokens sampled by one version; ((7, 0, 5), (8, 5, 9)) means that version 7
sampled tokens 0 to 4 and version 8 tokens 5 to 8."""


LARGEST_REWARD = 1e30
"""Largest reward of a response: the sum of a conversation's stays finite in 32 bits."""


@dataclass(frozen=True, slots=True, eq=False)
class Segment:
    """Tokens that a policy sampled, or that were given."""

    ids: Ints
    """Token ids, [T]."""
    logprobs: Floats | None = None
    """Log-probs of the sampling policy, [T]; None for tokens that were given."""
    spans: VersionSpans = ()
    """Versions that sampled it; none of given tokens."""
    begins: bool = False
    """True if it begins a further sequence, whose tokens see nothing of what is before it."""
    reward: float = 0.0
    """Reward of a response, besides the score of its sample."""

    @property
    def sampled(self) -> bool:
        """True if a policy sampled it."""
        return self.logprobs is not None

    @property
    def versions(self) -> Ints:
        """Version that sampled each token, [T]."""
        versions = np.zeros(len(self.ids), np.int32)
        for version, start, end in self.spans:
            versions[start:end] = version
        return versions


@dataclass(frozen=True, slots=True, eq=False)
class Trajectory:
    """One sample of a run."""

    number: int
    """Number of the sample in its run, from which prompt and seed follow."""
    group: int
    """Number of the first sample of the group that responds to the same prompt."""
    row: int
    """Row of its prompt in the data set."""
    segments: Sequence[Segment]
    """Segments in their order, the first of them given, and so the first of each sequence."""

    @property
    def member(self) -> int:
        """Place in its group, from 0."""
        return self.number - self.group


def as_one(sequences: Sequence[Trajectory]) -> Sequence[Segment]:
    """The segments of several sequences as those of one trajectory."""
    first, *further = sequences
    begun = [(replace(each.segments[0], begins=True), *each.segments[1:]) for each in further]
    return [*first.segments, *chain.from_iterable(begun)]


def columns_of(trajectories: Sequence[Trajectory]) -> Columns:
    """The trajectories as columns, with number, group and row of each, and with logprobs and versions (int32) of each
    sampled token. ValueError, which names the column, if one of them cannot be."""
    segments = [segment for each in trajectories for segment in each.segments]
    sampled = [segment for segment in segments if segment.logprobs is not None]
    lengths = [sum(len(segment.ids) for segment in each.segments) for each in trajectories]
    sizes = [len(segment.ids) for segment in segments]
    begins = np.zeros(sum(sizes), np.bool_)
    begins[[at - size for at, size, s in zip(accumulate(sizes), sizes, segments, strict=True) if s.begins]] = True
    columns = Columns.of(
        _joined((segment.ids for segment in segments), np.int32),
        np.asarray(lengths, np.int32),
        np.repeat([segment.sampled for segment in segments] or [False], sizes or [0]),
        begins,
    )
    return columns.with_rows(
        number=np.asarray([each.number for each in trajectories], np.int64),
        group=np.asarray([each.group for each in trajectories], np.int64),
        row=np.asarray([each.row for each in trajectories], np.int64),
    ).with_sampled(
        logprobs=_joined((s.logprobs for s in sampled), np.float32),
        versions=_joined((s.versions for s in sampled), np.int32),
    )


def turn_rewards(trajectories: Sequence[Trajectory]) -> Floats:
    """The rewards of responses, each at its last sampled token, zeros at the others. [M]"""
    sampled = [each for trajectory in trajectories for each in trajectory.segments if each.sampled and len(each.ids)]
    ends = np.cumsum([len(each.ids) for each in sampled], dtype=np.int64)
    rewards = np.zeros(ends[-1] if len(ends) else 0, np.float32)
    rewards[ends - 1] = [each.reward for each in sampled]
    return rewards


def _joined(arrays: Iterable[Any], dtype: Any) -> Any:
    return np.concatenate([np.empty(0, dtype), *arrays]).astype(dtype, copy=False)
