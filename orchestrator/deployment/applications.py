"""The services' sections of the YAML file: `applications:`, each with its `args:` and `deployments:`."""

import re
import textwrap
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from quartet.config.base import Config, ConfigError
from quartet.config.explain import shown
from services.critic.config import CriticConfig
from services.reference.config import ReferenceConfig
from services.reward.config import RewardConfig
from services.rollout.config import RolloutConfig

Application = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Service:
    """The fixed properties of one of the four services."""

    import_path: str
    config: type[Config]
    """Class of its `args:`."""
    deployment: str
    """The name of the deployment that takes its calls, and of its only one unless it has several scorers."""

    @property
    def function(self) -> str:
        """The generated function that lets Serve's proxy take its calls."""
        return f"protos.{self.deployment.lower()}_pb2_grpc.add_{self.deployment}Servicer_to_server"


SERVICES = {
    "rollout": Service("services.rollout.replica:build", RolloutConfig, "Rollout"),
    "reward": Service("services.reward.replica:build", RewardConfig, "Reward"),
    "reference": Service("services.reference.replica:build", ReferenceConfig, "Reference"),
    "critic": Service("services.critic.replica:build", CriticConfig, "Critic"),
}
"""Default application name -> service."""
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_FRAME = re.compile(r'\s+File ".*", line \d+')
_CLASS = re.compile(r"^[\w.]*ConfigError: |^(?:\w+\.)+(?=\w+(?:: |$))")
"""The class of an error before its message: the names of its modules, or all of it where the message says enough."""
_SLOW = re.compile(
    r"Deployment '[^']*' in application '[^']*' has \d+ replicas that have taken more than \d+s to initialize\."
)
"""Serve's message about replicas that load, which names nothing that hinders them."""
_LINES = 20
"""Most lines of an error that are shown."""
_CHARACTERS = 400
"""Most characters of Serve's words on an application that starts."""
_BY_PATH = {service.import_path: service for service in SERVICES.values()}


def problems(applications: Sequence[Application], needed: Mapping[str, str]) -> list[str]:
    """Errors in the services' sections, a line each. Needs their models on this machine.

    Args:
        applications: the sections.
        needed: names of the applications that must exist -> a clause on what would be right without them.
    """
    errors = _wrong_names(applications, needed)
    for index, application in enumerate(applications):
        where = f"applications.{application.get('name', index)}"
        errors += _wrong_args(application, where) + _wrong_deployments(application, where)
        try:
            env_vars(application, where)
        except ConfigError as error:
            errors.append(str(error))
    return errors


def service_of(application: Application) -> Service | None:
    """The service that an application runs; None for one that is not Quartet's."""
    return _BY_PATH.get(str(application.get("import_path")))


def deployments_of(application: Application) -> tuple[str, ...]:
    """Names of the deployments of one of Quartet's applications; that which takes the calls comes first."""
    service, args = service_of(application), application.get("args")
    if service is None:
        return ()
    scorers = args.get("scorers") if service.config is RewardConfig and isinstance(args, Mapping) else None
    several = map(str, scorers) if isinstance(scorers, Mapping) and len(scorers) > 1 else ()
    return (service.deployment, *several)


def env_vars(application: Application, where: str) -> dict[str, str]:
    """The environment variables of the application's processes. ConfigError if they are not a mapping of texts."""
    where = f"{where}.runtime_env"
    variables = mapping(mapping(application.get("runtime_env"), where).get("env_vars"), f"{where}.env_vars")
    for name, value in variables.items():
        if not isinstance(value, str):
            raise ConfigError(f"{where}.env_vars.{name}: should be text, got {shown(value)}; put it in quotes")
    return dict(variables)


def mapping(value: Any, where: str) -> Mapping[str, Any]:
    """`value`, or an empty mapping for null. ConfigError if it is not a mapping."""
    if value is not None and not isinstance(value, Mapping):
        raise ConfigError(f"{where}: should be a mapping, got {shown(value)}")
    return value or {}


def parse(applications: Sequence[Application]) -> dict[str, Config]:
    """Application name -> its `args:`, for the sections that are valid on this machine."""
    parsed: dict[str, Config] = {}
    for application in applications:
        if service := service_of(application):
            with suppress(ConfigError):  # reported by `problems`
                parsed[str(application.get("name"))] = service.config.parse(application.get("args") or {}, "args")
    return parsed


def _wrong_names(applications: Sequence[Application], needed: Mapping[str, str]) -> list[str]:
    """Applications without a name, with the same name, or missing: Serve and the orchestrator find them by name."""
    names = [str(application["name"]) for application in applications if "name" in application]
    nameless = [index for index, application in enumerate(applications) if "name" not in application]
    twice = sorted({name for name in names if names.count(name) > 1})
    errors = [f"applications.{index}.name: required" for index in nameless]
    errors += [f"applications: none is named {name}{clause}" for name, clause in needed.items() if name not in names]
    return errors + [f"applications: more than one is named {name}" for name in twice]


def _wrong_args(application: Application, where: str) -> list[str]:
    service = service_of(application)
    if service is None:
        ours = str(application.get("import_path")).startswith("services.")
        return [f"{where}.import_path: not a service of Quartet; those are {', '.join(_BY_PATH)}"] if ours else []
    try:
        service.config.parse(application.get("args") or {}, f"{where}.args")
    except ConfigError as error:
        return [str(error)]
    return []


def _wrong_deployments(application: Application, where: str) -> list[str]:
    """Deployments with a wrong name, which Serve would ignore, or named twice, and critics with more than one
    replica."""
    service, deployments = service_of(application), application.get("deployments")
    if service is None or not isinstance(deployments, list):
        return []
    where, name, names = f"{where}.deployments", service.deployment, deployments_of(application)
    entries = [entry for entry in deployments if isinstance(entry, Mapping)]
    there = f"the only one here is {name}" if len(names) == 1 else f"those here are {', '.join(names)}"
    given = [str(entry.get("name", name)) for entry in entries]
    errors = [f"{where}.{each}: no such deployment; {there}" for each in given if each not in names]
    errors += [f"{where}: should hold {each} once" for each in names if given.count(each) > 1]
    if service.config is RolloutConfig:
        errors += [line for entry in entries for line in _none_at_all(entry, f"{where}.{name}")]
    if service.config is CriticConfig:
        errors += [line for entry in entries for line in _more_than_one(entry, f"{where}.{name}")]
    return errors


def _none_at_all(deployment: Mapping[str, Any], where: str) -> list[str]:
    """A scale to zero, from which no run could begin, as it claims the replicas that run."""
    scaling = deployment.get("autoscaling_config")
    if isinstance(scaling, Mapping) and scaling.get("min_replicas") == 0:
        return [
            f"{where}.autoscaling_config.min_replicas: should be 1 or more, got 0; a run claims replicas that run"
        ]
    return []


def _more_than_one(deployment: Mapping[str, Any], where: str) -> list[str]:
    """Settings that would give the critic several replicas, which would be trained on different batches."""
    errors = []
    if (count := deployment.get("num_replicas")) not in (None, 1):
        errors.append(f"{where}.num_replicas: should be 1, got {shown(count)}; its weights are trained, in one place")
    if deployment.get("autoscaling_config") is not None:
        errors.append(f"{where}.autoscaling_config: should be left out; its weights are trained, in one place")
    return errors


def status_of(application: Mapping[str, Any] | None) -> str:
    """An application's state in Serve's words; while it starts, the number of replicas that run already."""
    if application is None:
        return "not deployed yet"
    state = str(application["status"])
    deployments = application.get("deployments") or {}
    replicas = [replica for deployment in deployments.values() for replica in deployment.get("replicas", [])]
    if state == "RUNNING" or not replicas:
        return "starting" if state == "DEPLOYING" else state
    count = f"{sum(replica.get('state') == 'RUNNING' for replica in replicas)} of {len(replicas)} replicas ready"
    return count if state == "DEPLOYING" else f"{state}, {count}"


def failure_of(application: Mapping[str, Any]) -> str:
    """The errors in Serve's messages about an application, without their tracebacks."""
    return "\n".join(_errors(application)) or str(application["status"])


def hindrance(application: Mapping[str, Any] | None) -> str:
    """Serve's own words, in one line, on what an application that starts is waiting for; empty if it says nothing."""
    told = [text for text in _errors(application or {}) if not _SLOW.match(text)]
    return textwrap.shorten("; ".join(told), _CHARACTERS, placeholder=" ...")


def _errors(application: Mapping[str, Any]) -> list[str]:
    deployments = (application.get("deployments") or {}).values()
    messages = [_error(str(part.get("message") or "")) for part in (application, *deployments)]
    return list(dict.fromkeys(filter(None, messages)))


def _error(message: str) -> str:
    """The error at the end of a message of Serve's, without traceback and colours; the whole message if it holds no
    traceback."""
    lines = _COLOURS.sub("", message).strip().splitlines()
    frames = [number for number, line in enumerate(lines) if _FRAME.match(line)]
    if not frames:
        return "\n".join(lines)
    # Below the last frame stand its lines of code, which are indented, and then the error, which may have any form.
    end = next((n for n in range(frames[-1], len(lines)) if lines[n].strip() and not lines[n][0].isspace()), None)
    if end is None:
        return lines[-1].strip()
    return "\n".join([_CLASS.sub("", lines[end]), *lines[end + 1 :]][:_LINES]).rstrip()
