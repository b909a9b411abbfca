"""A conversation: a prompt and a response, or several with answers between them, while it is sampled."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np

from orchestrator.environments.agent import RESULT
from orchestrator.experience.requests import SampleRequest
from quartet.columns import Columns
from quartet.trajectory import Segment, Trajectory, columns_of, turn_rewards
from quartet.wire.codec import Ints
from services.rollout.sample import FinishReason, Sample, seed_of_turn


@dataclass(frozen=True, slots=True, eq=False)
class Conversation:
    """One sample as far as it has come. Its last segment is sampled, unless another response is to follow."""

    request: SampleRequest
    segments: tuple[Segment, ...]
    texts: tuple[str, ...] = ()
    """Text of each segment after the prompt; only where an environment reads them."""
    turn: int = 0
    """Number of responses."""
    kept: int = 0
    """Number of their tokens that came from replicas which did not finish the response."""
    calls: int = 0
    """Number of calls of tools that were answered."""
    wrong_calls: int = 0
    """Number of those that could not be made as they were written."""
    result: Any = None
    """Value that an agent returned at its end."""
    truncated: bool = False
    """True if the limit on length cut the last response off, or left no room for another one."""

    @classmethod
    def of(cls, request: SampleRequest) -> Self:
        """The conversation that has a prompt and no response yet."""
        return cls(request, (Segment(request.prompt.prompt_ids),))

    @property
    def ids(self) -> Ints:
        """All tokens, [T]; a prompt alone is not copied."""
        if len(self.segments) == 1:
            return self.segments[0].ids
        return np.concatenate([segment.ids for segment in self.segments])

    @property
    def follows(self) -> int:
        """Number of tokens after the prompt."""
        return sum(len(segment.ids) for segment in self.segments[1:])

    @property
    def sampled(self) -> int:
        """Number of tokens of its responses."""
        return sum(len(segment.ids) for segment in self.segments if segment.sampled)

    @property
    def seed(self) -> int | None:
        """Seed of the next response; None for the engine's own."""
        return None if self.request.seed is None else seed_of_turn(self.request.seed, self.turn)

    @property
    def columns(self) -> Mapping[str, Any]:
        """Further columns for the reward."""
        columns = self.request.prompt.columns
        return columns if self.result is None else {**columns, RESULT: self.result}

    def responded(self, sample: Sample) -> Self:
        """The conversation with one more response at its end."""
        return replace(
            self,
            segments=(*self.segments, sample.segment),
            turn=self.turn + 1,
            kept=self.kept + sample.kept,
            truncated=sample.finish_reason is FinishReason.LENGTH,
        )

    def rewarded(self, reward: float) -> Self:
        """The conversation whose last response has this reward, and what it had."""
        at = max(place for place, segment in enumerate(self.segments) if segment.sampled)
        last = replace(self.segments[at], reward=self.segments[at].reward + reward)
        return replace(self, segments=(*self.segments[:at], last, *self.segments[at + 1 :]))

    def answered(self, ids: Ints) -> Self:
        """The conversation with an environment's answer at its end."""
        return replace(self, segments=(*self.segments, Segment(ids)))


def trajectories(conversations: Sequence[Conversation], *, turns: bool = False) -> Columns:
    """The conversations as columns, with what the rollout service says about them; with the rewards of their `turns`,
    where they may have some."""
    made = [
        Trajectory(each.request.number, each.request.group, each.request.prompt.row, each.segments)
        for each in conversations
    ]
    rewards = {"turn_rewards": turn_rewards(made)} if turns else {}
    return (
        columns_of(made)
        .with_sampled(**rewards)
        .with_rows(
            truncated=np.asarray([each.truncated for each in conversations], np.bool_),
            **{
                name: np.asarray([getattr(each, name) for each in conversations], np.int32)
                for name in ("kept", "turn", "calls", "wrong_calls")
            },
        )
    )
