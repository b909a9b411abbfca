"""The YAML file as a whole: Serve's sections and the orchestrator's own, each validated before anything starts."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from orchestrator.config import OrchestratorConfig
from services.common.config import Config, ConfigError, read_yaml
from services.critic.config import CriticConfig
from services.reference.config import ReferenceConfig
from services.reward.config import RewardConfig
from services.rollout.config import RolloutConfig

_SERVICES: dict[str, type[Config]] = {
    "services.rollout.replica:build": RolloutConfig,
    "services.reward.replica:build": RewardConfig,
    "services.reference.replica:build": ReferenceConfig,
    "services.critic.replica:build": CriticConfig,
}
_SERVE_KEYS = {"proxy_location", "http_options", "grpc_options", "logging_config", "applications"}
_OTHER_KEYS = {"orchestrator", "shared"}
_PORTS = {"http_options": 8000, "grpc_options": 9000}
"""Serve's sections with a port, and its default."""


@dataclass(frozen=True, slots=True)
class Deployment:
    """One deploy/*.yaml."""

    path: Path
    orchestrator: OrchestratorConfig
    applications: tuple[str, ...]
    raw: dict[str, Any]

    @property
    def ports(self) -> dict[str, int]:
        """The ports on which Serve will listen, by the key that sets them; Serve's defaults where none does."""
        return {
            f"{section}.port": int((self.raw.get(section) or {}).get("port", default))
            for section, default in _PORTS.items()
        }

    @classmethod
    def load(cls, path: str | Path, *, check_services: bool = False) -> Self:
        """Reads and validates.

        Args:
            path: the YAML file.
            check_services: also validate the services' sections, which needs their models on this machine.

        Raises:
            ConfigError: every wrong field of every section, a line each.
        """
        raw = read_yaml(path)
        known = _SERVE_KEYS | _OTHER_KEYS
        problems = [
            f"{path}: no such section: {key}; the sections are {', '.join(sorted(known))}"
            for key in raw
            if key not in known
        ]
        problems += _wrong_options(raw, path)
        applications = raw.get("applications") or []
        if not (isinstance(applications, list) and all(isinstance(entry, dict) for entry in applications)):
            problems.append(f"{path}: applications: should be a list, each with a name and an import_path")
            applications = []
        if check_services:
            problems += _wrong_names(applications)
            for application in applications:
                problems += _problems_of(application)
        orchestrator = None
        try:
            orchestrator = OrchestratorConfig.parse(raw.get("orchestrator") or {}, "orchestrator")
        except ConfigError as error:
            problems.append(str(error))
        else:
            problems += [] if problems else _wrong_port(orchestrator.target, raw)
        if problems or orchestrator is None:
            raise ConfigError("\n".join(problems))
        names = tuple(str(application.get("name")) for application in applications)
        return cls(Path(path), orchestrator, names, raw)


def _wrong_options(raw: dict[str, Any], path: str | Path) -> list[str]:
    """Serve checks its own sections; here only what is read of them."""
    problems = []
    for section in _PORTS:
        options = raw.get(section) or {}
        if not isinstance(options, dict):
            problems.append(f"{path}: {section}: should be a mapping, got {options!r}")
        elif not isinstance(port := options.get("port", 0), int):
            problems.append(f"{path}: {section}.port: should be a port number, got {port!r}")
    return problems


def _wrong_names(applications: list[dict[str, Any]]) -> list[str]:
    """Serve tells applications apart by name, and the orchestrator finds the four services by theirs."""
    names = [str(application.get("name")) for application in applications]
    missing = [name for name in ("rollout", "reward", "reference", "critic") if name not in names]
    twice = sorted({name for name in names if names.count(name) > 1})
    problems = [f"applications: none is named {name}" for name in missing]
    return problems + [f"applications: more than one is named {name}" for name in twice]


def _wrong_port(target: str, raw: dict[str, Any]) -> list[str]:
    """A target on this machine must be the port on which Serve of the same file listens."""
    host, _, port = target.rpartition(":")
    served = (raw.get("grpc_options") or {}).get("port")
    if host in ("127.0.0.1", "localhost") and served is not None and port != str(served):
        return [f"orchestrator.target: {target}, but grpc_options.port is {served}; they must be the same port"]
    return []


def _problems_of(application: dict[str, Any]) -> list[str]:
    kind = _SERVICES.get(str(application.get("import_path")))
    if kind is None and str(application.get("import_path")).startswith("services."):
        known = ", ".join(sorted(_SERVICES))
        return [f"applications.{application.get('name')}.import_path: no service of Quartet's; they are {known}"]
    if kind is None:
        return []
    try:
        kind.parse(application.get("args") or {}, f"applications.{application.get('name')}.args")
    except ConfigError as error:
        return [str(error)]
    return []
