"""Identities of the services' models, of the environment and of the agent, by which a run notices that one was
replaced."""

import hashlib
import json
from collections.abc import Iterator, Mapping

from orchestrator.clients import Infos
from orchestrator.environments.agent import Agent
from orchestrator.environments.contract import Environment
from protos import reward_pb2
from quartet.config.base import Config

SHOWN_DIGITS = 12
"""Characters of a hash in a message."""


class PartIdentity(Config):
    """The identity of one part of a service: of a model, a tokenizer or a scorer."""

    name: str
    """Name for messages."""
    digest: str
    """Digest; equal digests mean equal answers."""

    def __str__(self) -> str:
        return f"{self.name} ({self.digest[:SHOWN_DIGITS]})"


def user_identities(environment: Environment | None, agent: Agent | None = None) -> dict[str, PartIdentity]:
    """Place -> identity of the run's environment or agent; nothing without one."""
    if agent is not None:
        return {"agent": PartIdentity(name=agent.name, digest=agent.identity)}
    if environment is None:
        return {}
    digest = environment.identity
    if environment.tools:  # which a class may inherit from another file
        digest = hashlib.sha256(json.dumps([digest, *map(dict, environment.tools)]).encode()).hexdigest()
    return {"environment": PartIdentity(name=environment.name, digest=digest)}


def identities(infos: Infos) -> dict[str, PartIdentity]:
    """Place -> identity, for models, tokenizers and scorers of the services."""
    known = {}
    for service, model in infos.models.items():
        known[f"{service}.tokenizer"] = PartIdentity(name=model.name, digest=model.tokenizer_hash)
        if service != "reward":  # its scorers have their own identities
            known[f"{service}.model"] = PartIdentity(name=model.name, digest=model.model_hash)
    return known | dict(_scorers("reward.scorer", infos.reward.identity))


def _scorers(where: str, scorer: reward_pb2.ScorerIdentity) -> Iterator[tuple[str, PartIdentity]]:
    of = f" of {', '.join(scorer.names)}" if scorer.names else ""
    yield where, PartIdentity(name=scorer.name + of, digest=scorer.model_hash + of)
    for index, part in enumerate(scorer.parts):
        yield from _scorers(f"{where}.parts.{index}", part)


def changes(
    before: Mapping[str, PartIdentity], now: Mapping[str, PartIdentity], since: str = "when the checkpoint was taken"
) -> list[str]:
    """Changes since a checkpoint, or since the time that `since` names, a line each."""
    lines = []
    for place in sorted(before.keys() | now.keys()):
        was, becomes = before.get(place), now.get(place)
        if was is None or becomes is None or was.digest != becomes.digest:
            lines.append(f"{place}: {was or 'nothing'} {since}, {becomes or 'nothing'} now")
    return lines
