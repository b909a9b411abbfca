"""Clients of the services, and the check that all of them use the same tokens."""

import asyncio
import os
import shlex
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Self, TypeVar

from orchestrator.config.run import OrchestratorConfig
from protos import common_pb2, critic_pb2, reference_pb2, reward_pb2, rollout_pb2
from quartet.config.base import ConfigError
from quartet.security import credentials
from quartet.wire.callers import Purpose, declared
from quartet.wire.client import ServiceClient
from quartet.wire.errors import Unavailable
from quartet.wire.identity import model_hash, tokenizer_hash, vocabulary_size
from services.critic.client import CriticClient
from services.reference.client import ReferenceClient
from services.reward.client import RewardClient
from services.rollout.client import RolloutClient

Client = TypeVar("Client", bound=ServiceClient[Any])

REACH_S = 3.0
"""Longest wait for a connection, in seconds. Even a busy server accepts connections at once."""


@dataclass(frozen=True, slots=True)
class Infos:
    """The models and scorers behind the services."""

    rollout: rollout_pb2.RolloutInfo
    reward: reward_pb2.ScorerInfo
    """The scorer that scores the run's samples."""
    reference: reference_pb2.ReferenceInfo | None
    """The reference's Info; None if the run has no reference."""
    critic: critic_pb2.CriticInfo | None
    """The critic's Info; None if the run has no critic."""

    @property
    def by_service(self) -> dict[str, Any]:
        """The Info of each service that the run uses, by the name of the service."""
        every = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: info for name, info in every.items() if info is not None}

    @property
    def models(self) -> dict[str, common_pb2.ModelInfo]:
        """The services' models, by the name of the service."""
        return {name: info.model for name, info in self.by_service.items()}


@dataclass(frozen=True, slots=True)
class Services:
    """One client per service, with one channel per target. Tests build it from fakes."""

    rollout: RolloutClient
    reward: RewardClient
    reference: ReferenceClient | None
    """The reference's client; None if the run has no reference, because its KL coefficient is 0."""
    critic: CriticClient | None
    """The critic's client; None if the run has no critic, because its advantages need no values."""

    @classmethod
    def connect(cls, config: OrchestratorConfig, purpose: Purpose = Purpose.TRAINING) -> Self:
        """Clients for the configuration's targets, with the credentials that the environment names for each target;
        they connect at the first call.

        Args:
            config: configuration of the run; its name is sent with every call.
            purpose: purpose of the calls, by which busy services order them.
        """
        targets = targets_of(config)
        channels = {target: credentials.connect(target) for target in sorted(set(targets.values()))}

        def make(kind: type[Client]) -> Client:
            name = kind.SERVICE
            return kind(
                channels[targets[name]],
                config.services[name].application,
                attempt_s=config.timeouts.attempt_s,
                metadata=declared(config.name, purpose),
            )

        reference = make(ReferenceClient) if config.services.reference is not None else None
        critic = make(CriticClient) if config.services.critic is not None else None
        reward = make(RewardClient).named(config.services.reward.scorer)
        return cls(make(RolloutClient), reward, reference, critic)

    def declaring(self, run: str, purpose: Purpose) -> Self:
        """Copies of the clients, on the same channels, for another run name and purpose."""
        metadata = declared(run, purpose)
        return replace(self, **{name: client.declaring(metadata) for name, client in self._clients.items()})

    async def reach(self, config: OrchestratorConfig, file: Path) -> None:
        """Returns when a server accepts connections at every target of the configuration, which is from `file`.

        Raises:
            ConfigError: a target has TLS and this caller has not, or the reverse.
            Unavailable: a target accepts none within `timeouts.info_s` and REACH_S, the smaller of both.
        """
        patience_s = min(config.timeouts.info_s, REACH_S)
        for name, client in self._clients.items():
            if await client.reachable(patience_s):
                continue
            own = config.services[name].target
            await credentials.check_tls(own or config.target)
            where = (
                f"{own} (orchestrator.services.{name}.target)" if own else f"{config.target} (orchestrator.target)"
            )
            raise Unavailable(
                f"no answer at {where} within {patience_s:g} s; are the services up?"
                + ("" if own else f" {advice(file)}")
            )

    async def check_tls(self, config: OrchestratorConfig) -> None:
        """Raises ConfigError if a target of the configuration has TLS and this caller has not, or the reverse."""
        for target in sorted({*targets_of(config).values()}):
            await credentials.check_tls(target)

    async def infos(self, timeout_s: float) -> Infos:
        """Asks all services at once for their descriptions.

        Raises:
            ExceptionGroup: the ServiceErrors of services that do not answer within `timeout_s`.
        """
        found = await self.infos_of(self._clients, timeout_s)
        return Infos(found["rollout"], found["reward"], found.get("reference"), found.get("critic"))

    async def infos_of(self, names: Collection[str], timeout_s: float) -> dict[str, Any]:
        """Asks at once those of these services that the run uses for their descriptions, by name. ExceptionGroup as
        `infos` raises it."""
        async with asyncio.TaskGroup() as group:
            asked = {
                name: group.create_task(client.info(timeout_s))
                for name, client in self._clients.items()
                if name in names
            }
        return {name: task.result() for name, task in asked.items()}

    @property
    def leased(self) -> tuple[CriticClient | RolloutClient, ...]:
        """The services that one run at a time may change. A critic comes first: it has one replica, so that of two
        runs that claim at the same time one is refused."""
        return (self.rollout,) if self.critic is None else (self.critic, self.rollout)

    async def close(self) -> None:
        """Closes the channels."""
        for client in self._clients.values():
            await client.close()

    @property
    def _clients(self) -> dict[str, Any]:
        """The clients of the services that the run uses, by name."""
        every = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: client for name, client in every.items() if client is not None}


def targets_of(config: OrchestratorConfig) -> dict[str, str]:
    """Host:port of each service that the run uses."""
    return {name: config.services[name].target or config.target for name in config.services.used}


def advice(file: Path | str) -> str:
    """The commands that start the services of a file, or show their state: those of Serve on a cluster of the user's
    own, and those of Quartet where `quartet up` was used."""
    file = shlex.quote(str(file))
    here = f"`quartet up {file}` starts them"
    own = (
        f"`serve status` shows them, `serve deploy {file}` starts them "
        f"(of a file of facts, what `quartet render {file}` prints)"
    )
    if os.environ.get("RAY_ADDRESS"):
        return own
    return here if Path(".quartet").is_dir() else f"{here} on this machine; on a Ray cluster of your own {own}"


def check_compatible(infos: Infos, tokenizer: Any, config: OrchestratorConfig) -> None:
    """Raises ConfigError unless every service uses the policy's tokens and accepts the run's lengths and dtypes."""
    check_models(infos.models, tokenizer, config)
    check_scores(infos.reward, config)
    problems = [*unlike_backends(config, infos.rollout.weight_backend, "the rollout replicas' weight_backend")]
    if config.pushed_adapters and infos.rollout.model.model_hash != model_hash(config.policy.model):
        problems.append(
            f"rollout: {infos.rollout.model.name} has other weights than orchestrator.policy.model "
            f"({config.policy.model}), and orchestrator.weights.adapters pushes the adapters alone"
        )
    if (kept := infos.rollout.adapter_versions) != (needed := config.adapter_versions):
        problems.append(
            f"rollout: the replicas have adapter_versions {kept}, but the run needs {needed} (one more than "
            "loop.max_staleness with orchestrator.weights.in_flight finish, else 1); deploy the run's file"
        )
    for service, model in infos.models.items():
        problems += unlike_dtypes(config, service, model.dtype, f"the {service} service's dtype")
    if problems:
        raise ConfigError("\n".join(problems))


def unlike_dtypes(config: OrchestratorConfig, service: str, dtype: str, where: str) -> Iterator[str]:
    """The problem with a service's dtype, which stands at `where`, if it has to be the policy's."""
    whys = {"rollout": "weights are pushed as they are"}
    whys |= {"reference": "the KL penalty would measure their rounding"} if config.algorithm.needs_reference else {}
    if service in whys and dtype != config.policy.dtype:
        yield (
            f"{where}: {dtype}, but orchestrator.policy.dtype is {config.policy.dtype}; {whys[service]}, so both "
            "must be the same"
        )


def unlike_backends(config: OrchestratorConfig, theirs: str, where: str) -> Iterator[str]:
    """The problem with the backend of the replicas, which stands at `where`, if it is not the run's."""
    if "auto" not in (ours := config.weights.backend, theirs) and ours != theirs:
        yield f"orchestrator.weights.backend: {ours}, but {where} is {theirs}; set both the same, or one to auto"


def check_scores(info: reward_pb2.ScorerInfo, config: OrchestratorConfig) -> None:
    """Raises ConfigError unless the reward service gives scores of the names that the algorithm weighs."""
    if problems := [*config.algorithm.misfits(info.identity.names, f"the reward service's {info.identity.name}")]:
        raise ConfigError("\n".join(problems))


def agreed_backend(ours: str, theirs: str) -> str:
    """The backend of pushes, from weights.backend and rollout.args.weight_backend, either of which may be auto."""
    return theirs if ours == "auto" else ours


def check_models(models: Mapping[str, common_pb2.ModelInfo], tokenizer: Any, config: OrchestratorConfig) -> None:
    """Raises ConfigError unless each service's model uses the policy's tokens and takes the longest pair."""
    expected, vocabulary = tokenizer_hash(tokenizer), vocabulary_size(tokenizer)
    needed, sum_of = config.longest_sequence
    for name, model in models.items():
        if model.tokenizer_hash != expected:
            raise ConfigError(
                f"{name}: the tokenizer of {model.name} is not that of orchestrator.policy.model "
                f"({config.policy.model}), so its token ids mean something else"
            )
        if model.vocab_size < vocabulary:
            raise ConfigError(
                f"{name}: {model.name} has {model.vocab_size} entries in its vocabulary, but the policy's tokenizer "
                f"gives ids up to {vocabulary - 1}; resize the model's embeddings"
            )
        if model.max_length < needed:
            raise ConfigError(
                f"{name}: as it is deployed it takes {model.max_length} tokens, but {sum_of}; deploy this file, or "
                "lower one of them"
            )
