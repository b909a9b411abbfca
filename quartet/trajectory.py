"""The contract of a sample: a trajectory is made of segments, and what is trained on is what was sampled.

A prompt and its response are two segments. Where an environment answers, its tokens are a third, and the response to
them a fourth:

    Trajectory(number=17, group=16, row=3, segments=(given(prompt), sampled, given(answer), sampled))
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from quartet.columns import Columns
from quartet.wire.codec import Floats, Ints

VersionSpans = tuple[tuple[int, int, int], ...]
"""(policy_version, start, end) of runs of tokens sampled by one version; ((7, 0, 5), (8, 5, 9)) means that version 7
sampled tokens 0 to 4 and version 8 tokens 5 to 8."""


@dataclass(frozen=True, slots=True, eq=False)
class Segment:
    """Tokens that a policy sampled, or that were given."""

    ids: Ints
    """Token ids, [T]."""
    logprobs: Floats | None = None
    """Log-probs of the sampling policy, [T]; None for tokens that were given."""
    spans: VersionSpans = ()
    """Versions that sampled it; none of given tokens."""

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
    """Segments in their order, the first of them given."""

    @property
    def member(self) -> int:
        """Place in its group, from 0."""
        return self.number - self.group


def columns_of(trajectories: Sequence[Trajectory]) -> Columns:
    """The trajectories as columns, with number, group and row of each, and with logprobs and versions (int32) of each
    sampled token. ValueError, which names the column, if one of them cannot be."""
    segments = [segment for each in trajectories for segment in each.segments]
    sampled = [segment for segment in segments if segment.logprobs is not None]
    lengths = [sum(len(segment.ids) for segment in each.segments) for each in trajectories]
    columns = Columns.of(
        _joined((segment.ids for segment in segments), np.int32),
        np.asarray(lengths, np.int32),
        np.repeat([segment.sampled for segment in segments] or [False], [len(s.ids) for s in segments] or [0]),
    )
    return columns.with_rows(
        number=np.asarray([each.number for each in trajectories], np.int64),
        group=np.asarray([each.group for each in trajectories], np.int64),
        row=np.asarray([each.row for each in trajectories], np.int64),
    ).with_sampled(
        logprobs=_joined((s.logprobs for s in sampled), np.float32),
        versions=_joined((s.versions for s in sampled), np.int32),
    )


def _joined(arrays: Iterable[Any], dtype: Any) -> Any:
    return np.concatenate([np.empty(0, dtype), *arrays]).astype(dtype, copy=False)
