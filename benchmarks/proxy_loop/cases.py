"""The largest requests that the port takes, of each kind."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from protos import common_pb2, critic_pb2, reward_pb2, rollout_pb2
from services.common.security.policy import Limits

_LONGEST = b"\xf8\x80\x80\x80\x00" + b"\x80" * 9 + b"\x00"
"""A field whose tag and number have as many bytes as they may."""


@dataclass(frozen=True, slots=True)
class Case:
    """A request."""

    method: str
    content: str
    request: bytes


def cases() -> Iterator[Case]:
    """The largest request of each kind."""
    stage, score, weights = "Critic/Stage", "Reward/Score", "Rollout/UpdateWeights"
    numbers = bytes(limit(stage) // 4)
    staged = critic_pb2.StageRequest(pairs=pairs_of(limit(stage) // 2), values=numbers, returns=numbers)
    yield Case(stage, "numbers", written(staged))
    yield Case(score, "numbers", written(reward_pb2.ScoreRequest(tokens=pairs_of(limit(score)))))
    prepare = rollout_pb2.Prepare(manifest=bytes(limit(weights)))
    yield Case(weights, "a manifest", written(rollout_pb2.WeightPhase(prepare=prepare)))
    for case in (
        Case(stage, "unknown fields", b"\x78\x00"),
        Case(stage, "unknown fields, longest", _LONGEST),
        Case(stage, "empty pairs", b"\x1a\x00"),
        Case(score, "empty labels", written(reward_pb2.ScoreRequest(labels=[""]))),
        Case(weights, "members", written(rollout_pb2.WeightPhase(members=[""]))),
    ):
        yield replace(case, request=case.request * (limit(case.method) // len(case.request)))
        yield _let_through(case)


def _let_through(case: Case) -> Case:
    """A request with as many of the case's fields as the port lets through, and numbers for the rest."""
    fields = case.request * (Limits().elements - 8)
    rest = limit(case.method) - len(fields)
    message: Any = {
        "Critic/Stage": critic_pb2.StageRequest(values=bytes(rest)),
        "Reward/Score": reward_pb2.ScoreRequest(tokens=pairs_of(rest)),
        "Rollout/UpdateWeights": rollout_pb2.WeightPhase(prepare=rollout_pb2.Prepare(manifest=bytes(rest))),
    }[case.method]
    return Case(case.method, f"{case.content}, fewer", fields + written(message))


def limit(method: str) -> int:
    """Largest request of a method, in bytes, less some for the fields around its numbers."""
    return Limits().of(f"/quartet.v1.{method}") - 100


def pairs_of(size: int) -> common_pb2.Pairs:
    """Pairs with so many bytes of token ids."""
    sequences = common_pb2.Sequences(token_ids=bytes(size // 2))
    return common_pb2.Pairs(prompts=sequences, responses=sequences)


def written(message: Any) -> bytes:
    """The message as it is sent."""
    return bytes(message.SerializeToString())
