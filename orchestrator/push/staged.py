"""Weights on their way from the learner to the replicas."""

import asyncio
from dataclasses import dataclass

from protos import rollout_pb2 as pb


@dataclass(frozen=True, slots=True)
class StagedPush:
    """Weights that are being copied, or were copied, out of the learner."""

    policy_version: int
    push: int
    """Number of the push."""
    began: float
    answers: list[pb.WeightReport]
    """Reports of the replicas that answered."""
    gathering: asyncio.Future[None]
    """Done when the learner's weights are copied."""
    held: bool
    """True if the learner keeps these weights until they are delivered."""
