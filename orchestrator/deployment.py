"""The YAML file as a whole: Serve's sections and the orchestrator's own, each validated before anything starts."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from orchestrator import applications
from orchestrator.config import OrchestratorConfig
from services.common.config import LAST_PORT, Config, ConfigError, read_yaml
from services.common.findings import shown, unknown

_SERVE_KEYS = {
    "proxy_location",
    "http_options",
    "grpc_options",
    "controller_options",
    "logging_config",
    "tracing_config",
    "applications",
    "target_capacity",
}
_OTHER_KEYS = {"orchestrator", "shared"}
_PORTS = {"http_options": 8000, "grpc_options": 9000}
"""Serve's sections with a port, and its default."""


@dataclass(frozen=True, slots=True)
class Deployment:
    """One deploy/*.yaml."""

    path: Path
    orchestrator: OrchestratorConfig
    applications: tuple[str, ...]
    services: Mapping[str, Config]
    """The services' `args:` by the application's name. One whose models are on another machine is not here."""
    raw: dict[str, Any]

    @property
    def ports(self) -> dict[str, int]:
        """The ports on which Serve will listen, by the key that sets them; Serve's defaults where none does."""
        return _ports(self.raw)

    @classmethod
    def load(cls, path: str | Path, *, check_services: bool = False) -> Self:
        """Reads and validates.

        Args:
            path: the YAML file.
            check_services: also validate the services' sections, which needs their models on this machine, and
                Serve's, which takes the seconds of importing it.

        Raises:
            ConfigError: every wrong field of every section, a line each.
        """
        raw = read_yaml(path)
        known = _SERVE_KEYS | _OTHER_KEYS
        problems = [f"{path}: {key}: {unknown(str(key), known, 'section')}" for key in raw if key not in known]
        problems += _wrong_ports(raw, path)
        found = raw.get("applications") or []
        if not (isinstance(found, list) and all(isinstance(entry, dict) for entry in found)):
            problems.append(f"{path}: applications: should be a list, each with a name and an import_path")
            found = []
        if check_services:
            problems += applications.problems(found)
            problems += _wrong_for_serve(raw | {"applications": found}, problems)
        orchestrator = None
        try:
            orchestrator = OrchestratorConfig.parse(raw.get("orchestrator") or {}, "orchestrator")
        except ConfigError as error:
            problems.append(str(error))
        else:
            problems += [] if problems else _wrong_target(orchestrator.target, raw)
        if problems or orchestrator is None:
            raise ConfigError("\n".join(problems))
        names = tuple(str(application.get("name")) for application in found)
        return cls(Path(path), orchestrator, names, applications.parse(found), raw)


def _ports(raw: Mapping[str, Any]) -> dict[str, int]:
    sections = {section: raw.get(section) or {} for section in _PORTS}
    return {f"{section}.port": options.get("port", _PORTS[section]) for section, options in sections.items()}


def _wrong_ports(raw: Mapping[str, Any], path: str | Path) -> list[str]:
    """Two different ports, and mappings that hold them. The rest of these sections is Serve's to check."""
    problems = [
        f"{path}: {section}: should be a mapping, got {shown(options)}"
        for section in _PORTS
        if not isinstance(options := raw.get(section) or {}, dict)
    ]
    if problems:
        return problems
    ports = _ports(raw)
    problems = [
        f"{path}: {field}: should be a port from 1 to {LAST_PORT}, got {shown(port)}"
        for field, port in ports.items()
        if not isinstance(port, int) or isinstance(port, bool) or not 1 <= port <= LAST_PORT
    ]
    if not problems and len(set(ports.values())) < len(ports):
        problems.append(f"{path}: {' and '.join(ports)}: should differ, got {', '.join(map(str, ports.values()))}")
    return problems


def _wrong_for_serve(raw: Mapping[str, Any], problems: list[str]) -> list[str]:
    """What Serve would refuse or pass over, less the fields named in `problems` already."""
    # Not above: this brings Ray Serve, two seconds that `train` need not wait.
    from services.common import serve_sections

    told = "\n".join(problems)
    found = serve_sections.problems({key: value for key, value in raw.items() if key in _SERVE_KEYS})
    return [line for line in found if f"{line.partition(':')[0]}:" not in told]


def _wrong_target(target: str, raw: Mapping[str, Any]) -> list[str]:
    """A target on this machine must be the port on which Serve of the same file listens."""
    host, _, port = target.rpartition(":")
    served = (raw.get("grpc_options") or {}).get("port")
    if host in ("127.0.0.1", "localhost") and served is not None and int(port) != served:
        return [f"orchestrator.target: {target}, but grpc_options.port is {served}; they must be the same port"]
    return []
