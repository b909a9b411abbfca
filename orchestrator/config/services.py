"""Targets and names of the four services."""

from typing import Annotated

from pydantic import AfterValidator, Field

from quartet.config.base import LAST_PORT, Config, matching


def _port_in_range(target: str) -> str:
    if not 1 <= int(target.rpartition(":")[2]) <= LAST_PORT:
        raise ValueError(f"should end in a port from 1 to {LAST_PORT}")
    return target


Target = Annotated[str, matching(r"\S+:\d{1,5}", "host:port"), AfterValidator(_port_in_range)]
"""host:port of a Serve gRPC proxy."""


class ServiceConfig(Config):
    """Target and application name of one service."""

    target: Target | None = None
    """host:port of the service's gRPC proxy. Null: orchestrator.target."""
    application: Annotated[str, Field(min_length=1)] | None = None
    """Name of the service's application. Null: the default, such as `reward`."""


class RewardServiceConfig(ServiceConfig):
    """Target, application name and scorer of the reward service."""

    scorer: str = ""
    """Name of the scorer in the application's `scorers:`. Empty: the only one."""


class ServicesConfig(Config):
    """The services with another target or name, for instance a reward service that another team deployed. A service
    with its own target need not be in this file's `applications:`."""

    rollout: ServiceConfig = ServiceConfig()
    """The rollout service. Since its weights are pushed, it has to be in the Ray cluster in which the run trains."""
    reward: RewardServiceConfig = RewardServiceConfig()
    """The reward service."""
    reference: ServiceConfig | None = ServiceConfig()
    """The reference service. Null, or without such an application in a file whose algorithm.kl.coef is 0: the run has
    none, and the KL to it is not measured."""
    critic: ServiceConfig | None = ServiceConfig()
    """The critic, which runs cannot share: it trains for one run at a time. Null with an algorithm that
    takes no values."""

    def __getitem__(self, service: str) -> ServiceConfig:
        config: ServiceConfig | None = getattr(self, service)
        if config is None:
            raise KeyError(f"services.{service}: this run has none")
        return config

    @property
    def used(self) -> tuple[str, ...]:
        """The names of those that take part in the run."""
        return tuple(name for name in type(self).model_fields if getattr(self, name) is not None)
