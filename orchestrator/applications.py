"""The services' sections of the YAML file: `applications:`, each with its `args:` and `deployments:`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from services.common.config import Config, ConfigError
from services.common.findings import shown
from services.critic.config import CriticConfig
from services.reference.config import ReferenceConfig
from services.reward.config import RewardConfig
from services.rollout.config import RolloutConfig

Application = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Service:
    """What is known of one of the four."""

    import_path: str
    config: type[Config]
    """Of its `args:`."""
    deployment: str
    """The name of its only deployment."""


SERVICES = {
    "rollout": Service("services.rollout.replica:build", RolloutConfig, "Rollout"),
    "reward": Service("services.reward.replica:build", RewardConfig, "Reward"),
    "reference": Service("services.reference.replica:build", ReferenceConfig, "Reference"),
    "critic": Service("services.critic.replica:build", CriticConfig, "Critic"),
}
"""The four services, by the name of their application."""
_BY_PATH = {service.import_path: service for service in SERVICES.values()}


def problems(applications: Sequence[Application]) -> list[str]:
    """What is wrong with the services' sections, a line each. Needs their models on this machine."""
    found = _wrong_names(applications)
    for index, application in enumerate(applications):
        where = f"applications.{application.get('name', index)}"
        found += _wrong_args(application, where) + _wrong_deployments(application, where)
        try:
            env_vars(application, where)
        except ConfigError as error:
            found.append(str(error))
    return found


def env_vars(application: Application, where: str) -> dict[str, str]:
    """The environment variables of the application's processes. ConfigError if they are none."""
    where = f"{where}.runtime_env"
    variables = mapping(mapping(application.get("runtime_env"), where).get("env_vars"), f"{where}.env_vars")
    for name, value in variables.items():
        if not isinstance(value, str):
            raise ConfigError(f"{where}.env_vars.{name}: should be text, got {shown(value)}; put it in quotes")
    return dict(variables)


def mapping(value: Any, where: str) -> Mapping[str, Any]:
    """`value`, or an empty mapping for null. ConfigError if it is none."""
    if value is not None and not isinstance(value, Mapping):
        raise ConfigError(f"{where}: should be a mapping, got {shown(value)}")
    return value or {}


def parse(applications: Sequence[Application]) -> dict[str, Config]:
    """The `args:` of the four services that are valid on this machine, by the application's name."""
    parsed: dict[str, Config] = {}
    for application in applications:
        service = _BY_PATH.get(str(application.get("import_path")))
        if service and not _wrong_args(application, "applications"):
            parsed[str(application.get("name"))] = service.config.parse(application.get("args") or {}, "args")
    return parsed


def _wrong_names(applications: Sequence[Application]) -> list[str]:
    """Serve tells applications apart by name, and the orchestrator finds the four services by theirs."""
    names = [str(application["name"]) for application in applications if "name" in application]
    nameless = [index for index, application in enumerate(applications) if "name" not in application]
    twice = sorted({name for name in names if names.count(name) > 1})
    found = [f"applications.{index}.name: required" for index in nameless]
    found += [f"applications: none is named {name}" for name in SERVICES if name not in names]
    return found + [f"applications: more than one is named {name}" for name in twice]


def _wrong_args(application: Application, where: str) -> list[str]:
    path = str(application.get("import_path"))
    service = _BY_PATH.get(path)
    if service is None:
        ours = path.startswith("services.")
        return [f"{where}.import_path: no service of Quartet's; they are {', '.join(_BY_PATH)}"] if ours else []
    try:
        service.config.parse(application.get("args") or {}, f"{where}.args")
    except ConfigError as error:
        return [str(error)]
    return []


def _wrong_deployments(application: Application, where: str) -> list[str]:
    """Serve would pass over a deployment of another name, and the service's own would keep its defaults."""
    service, deployments = _BY_PATH.get(str(application.get("import_path"))), application.get("deployments")
    if service is None or not isinstance(deployments, list):
        return []
    where, name = f"{where}.deployments", service.deployment
    entries = [entry for entry in deployments if isinstance(entry, Mapping)]
    found = [
        f"{where}.{entry['name']}: no such deployment; the only one here is {name}"
        for entry in entries
        if entry.get("name", name) != name
    ]
    if len(entries) > 1 and not found:
        found.append(f"{where}: should hold {name} once")
    if service.config is CriticConfig:
        found += [line for entry in entries for line in _more_than_one(entry, f"{where}.{name}")]
    return found


def _more_than_one(deployment: Mapping[str, Any], where: str) -> list[str]:
    """Replicas of the critic would be trained on different batches and drift apart."""
    found = []
    if (count := deployment.get("num_replicas")) not in (None, 1):
        found.append(f"{where}.num_replicas: should be 1, got {shown(count)}; its weights are trained, in one place")
    if deployment.get("autoscaling_config") is not None:
        found.append(f"{where}.autoscaling_config: should be left out; its weights are trained, in one place")
    return found
