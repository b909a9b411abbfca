"""The YAML file as a whole: Serve's sections and the orchestrator's own, each validated before anything starts.

A file of facts stands for the whole file that is derived from it.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from orchestrator.algorithms.contract import Algorithm
from orchestrator.algorithms.registry import kinds, parse
from orchestrator.config.run import OrchestratorConfig
from orchestrator.config.services import ServicesConfig
from orchestrator.deployment import applications, guarded
from orchestrator.deployment.facts import scorers
from orchestrator.deployment.facts.derive import stated
from orchestrator.deployment.facts.read import derived, states_facts
from orchestrator.deployment.listeners import PortError
from orchestrator.deployment.names import clashes
from orchestrator.deployment.record import gaps, record
from quartet.config.base import LAST_PORT, Config, ConfigError, read_yaml
from quartet.config.explain import shown, unknown
from quartet.config.learner import LearnerConfig
from quartet.security.port import Port
from services.critic.config import CriticConfig
from services.reward.config import RewardConfig

SERVE_KEYS = {
    "proxy_location",
    "http_options",
    "grpc_options",
    "controller_options",
    "logging_config",
    "tracing_config",
    "applications",
    "target_capacity",
}
"""Serve's own sections."""
_OTHER_KEYS = {"orchestrator", "security", "shared"}
_PORTS = {"http_options": 8000, "grpc_options": 9000}
"""Serve's sections with a port -> its default."""
_OPTIONAL = {
    "reference": "; a run needs none if orchestrator.algorithm.kl.coef is 0",
    "critic": f"; a run needs none if orchestrator.algorithm.kind is {kinds(critic=False)}",
}
"""Service that some runs do without -> which runs."""


POLICY = "policy"
"""Name of the policy among the learners."""


@dataclass(frozen=True, slots=True)
class Placed:
    """A deployment of one of the services, as Serve gets it."""

    name: str
    """The application's name; of several scorers in one each has its own behind it."""
    section: Config
    """The application's `args:`, of several scorers with this one alone."""
    application: Mapping[str, Any]
    entry: Mapping[str, Any]
    """Serve's options of the deployment."""

    @property
    def actor(self) -> Mapping[str, Any]:
        """Options of a replica for Ray: resources, `num_cpus`, `num_gpus`."""
        return self.entry.get("ray_actor_options") or {}

    @property
    def gpus(self) -> float:
        """GPUs that Ray reserves for a replica."""
        return float(self.actor.get("num_gpus") or 0)

    @property
    def variables(self) -> dict[str, str]:
        """Environment variables of a replica."""
        return applications.env_vars(self.application, f"applications.{self.name}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServicesFile:
    """A file of services, such as deploy/reward.yaml, or what is derived from a file of facts."""

    path: Path
    applications: tuple[str, ...]
    services: Mapping[str, Config]
    """Application name -> its `args:`, without services whose models are on another machine."""
    raw: dict[str, Any]
    """Contents of the file, including the values of environment variables; of a file of facts, those of the whole
    file."""
    port: Port
    """Address and policy of the gRPC port: from `security:`, or without that from the environment."""
    facts: bool = False
    """True if the file states facts."""
    worded: Callable[[str], str] = str
    """Puts a message about keys in the words of the file: with facts in place of keys that are derived from them."""

    @contextmanager
    def naming(self) -> Iterator[None]:
        """Puts the messages of errors meanwhile, in groups too, in the words of the file; their causes, such as an
        error of a user's own code, stay."""
        try:
            yield
        except (ConfigError, PortError, ExceptionGroup) as error:
            raise self._named(error) from error.__cause__

    def _named(self, error: Exception) -> Exception:
        if isinstance(error, ExceptionGroup):
            return error.derive([self._named(each) for each in error.exceptions])
        if not isinstance(error, ConfigError | PortError):
            return error
        named = type(error)(self.worded(str(error)))
        named.__cause__ = error.__cause__
        return named

    def placed(self) -> Iterator[Placed]:
        """The deployments of the services in `services`, but for those that only pass calls on to scorers."""
        for application in self.raw.get("applications") or []:
            name = str(application.get("name"))
            if name not in self.services:
                continue
            section, entries = self.services[name], application.get("deployments") or [{}]
            if not isinstance(section, RewardConfig) or len(section.scorers) < 2:
                yield from (Placed(name, section, application, entry) for entry in entries)
                continue
            by_name = {entry.get("name"): entry for entry in entries}
            for scorer in section.scorers:
                yield Placed(f"{name}.{scorer}", section.only(scorer), application, by_name.get(scorer, {}))

    def critics(self) -> dict[str, CriticConfig]:
        """Critics by the names of their applications. GPUs, custom resources and environment are those of each rank:
        of a critic with one rank its replica's, in whose place it computes."""
        critics: dict[str, CriticConfig] = {}
        for placed in self.placed():
            if isinstance(section := placed.section, CriticConfig):
                given: dict[str, Any] = {"env_vars": placed.variables | section.env_vars}
                if section.ranks == 1:
                    given |= {"num_gpus": placed.gpus, "resources": placed.actor.get("resources") or {}}
                critics[placed.name] = section.model_copy(update=given)
        return critics

    def http_addresses(self, service: type[Config]) -> dict[str, str]:
        """Application name -> its address at the HTTP port, of those whose `args:` are of `service`."""
        root = f"http://127.0.0.1:{self.ports['http_options.port']}"
        return {
            str(application["name"]): root + str(application.get("route_prefix", "/")).rstrip("/")
            for application in self.raw.get("applications") or []
            if isinstance(self.services.get(str(application.get("name"))), service)
        }

    @property
    def target(self) -> str:
        """Host:port at which this machine reaches the services."""
        host = "127.0.0.1" if self.port.everywhere else self.port.host
        return f"{host}:{self.ports['grpc_options.port']}"

    @property
    def record(self) -> dict[str, Any]:
        """The contents without secrets, which may be kept and shown."""
        return record(self.raw)

    @property
    def ports(self) -> dict[str, int]:
        """Key that sets a port -> the port on which Serve will listen, its default if the key is missing."""
        return _ports(self.raw)


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployment(ServicesFile):
    """A file of a run, such as deploy/ppo.yaml: its services, and what trains with them."""

    orchestrator: OrchestratorConfig

    def learners(self) -> dict[str, LearnerConfig]:
        """The critics, and the policy."""
        return {**self.critics(), POLICY: self.orchestrator.policy}

    @classmethod
    def load(cls, path: str | Path, *, check_services: bool = False) -> "Deployment":
        """Reads and validates a file of a run, as `load_file` does. ConfigError also if it has services alone."""
        loaded = load_file(path, check_services=check_services)
        if not isinstance(loaded, Deployment):
            raise ConfigError(
                f"{path}: has services alone, which `quartet up` starts; a run needs the section orchestrator, or "
                "facts"
            )
        return loaded


def load_file(path: str | Path, *, check_services: bool = False) -> ServicesFile:
    """Reads and validates a file: of a run, or of services alone where it has no section `orchestrator`.

    Args:
        path: the YAML file, whole or of facts.
        check_services: True to validate also the services' sections, which needs their models on this machine, and
            Serve's sections, which needs seconds to import Serve.

    Raises:
        ConfigError: every wrong field of every section, a line each.
    """
    raw = read_yaml(path)
    if states_facts(raw, path):
        whole = derived(raw, path)
        worded = stated if "orchestrator" in whole else scorers.stated
        try:
            return replace(_whole(whole, path, check_services), facts=True, worded=worded)
        except ConfigError as error:
            raise ConfigError(worded(str(error))) from None
    return _whole(raw, path, check_services)


def _whole(raw: dict[str, Any], path: str | Path, check_services: bool) -> ServicesFile:
    """A whole file's contents."""
    known = SERVE_KEYS | _OTHER_KEYS
    problems = [f"{path}: {key}: {unknown(str(key), known, 'section')}" for key in raw if key not in known]
    problems += [*clashes(), *_wrong_ports(raw, path)] + [f"{path}: {gap}" for gap in gaps(raw)]
    listed = raw.get("applications") or []
    if not (isinstance(listed, list) and all(isinstance(entry, dict) for entry in listed)):
        problems.append(f"{path}: applications: should be a list, each with a name and an import_path")
        listed = []
    port = Port.of()
    try:
        if "security" in raw:
            port = Port.parse(raw["security"] or {}, "security")
        if check_services:
            port.checked()
    except ConfigError as error:
        problems.append(str(error))
    runs = "orchestrator" in raw
    if not (runs or listed):
        problems.append(f"{path}: applications: empty; a file of services holds one or more")
    names = tuple(str(entry.get("name")) for entry in listed)
    orchestrator, wrong = _orchestrator(raw) if runs else (None, [])
    if orchestrator:
        used = _used(orchestrator.services, orchestrator.algorithm, names)
        orchestrator = orchestrator.model_copy(update={"services": used})
    if check_services:
        problems += applications.problems(listed, _needed(raw, orchestrator, names))
        problems += _wrong_for_serve(raw | {"applications": listed}, problems) + guarded.problems(raw, listed)
    problems += wrong
    if orchestrator and not problems:
        problems += _wrong_target(orchestrator.target, raw)
    if problems:
        raise ConfigError("\n".join(problems))
    given: dict[str, Any] = {
        "path": Path(path),
        "applications": names,
        "services": applications.parse(listed),
        "raw": raw,
        "port": port,
    }
    return Deployment(**given, orchestrator=orchestrator) if orchestrator else ServicesFile(**given)


def _orchestrator(raw: Mapping[str, Any]) -> tuple[OrchestratorConfig | None, list[str]]:
    """The orchestrator's section, or None and its errors."""
    try:
        return OrchestratorConfig.parse(raw.get("orchestrator") or {}, "orchestrator"), []
    except ConfigError as error:
        return None, [str(error)]


def _needed(
    raw: Mapping[str, Any], orchestrator: OrchestratorConfig | None, names: Collection[str]
) -> dict[str, str]:
    """Names of the applications that the file has to hold, those of all services without another target -> a clause
    on what would be right without them. Of a wrong section of the orchestrator its right parts tell, so that no error
    follows from another. `names` are those of the file's applications."""
    services = orchestrator.services if orchestrator else _services_of(raw, names)
    if services is None:
        return {}
    deployed = [name for name in services.used if services[name].target is None]
    return {services[name].application or name: _OPTIONAL.get(name, "") for name in deployed}


def _services_of(raw: Mapping[str, Any], names: Collection[str]) -> ServicesConfig | None:
    """The services that a run with a wrong section uses; None if the section does not tell."""
    section = raw.get("orchestrator")
    if not isinstance(section, Mapping):
        return None
    try:
        services = ServicesConfig.parse(section.get("services") or {}, "services")
        algorithm = parse(section.get("algorithm"))
    except ConfigError:
        return None
    return _used(services, algorithm, names)


def _used(services: ServicesConfig, algorithm: Algorithm, names: Collection[str]) -> ServicesConfig:
    """The services without the critic, if the algorithm takes no values; and without the reference, if it needs none
    and the file, whose applications are called `names`, neither deploys one nor names another place for it."""
    unused = set() if algorithm.needs_critic else {"critic"}
    reference = services.reference
    if reference and not (reference.target or (reference.application or "reference") in names):
        unused |= set() if algorithm.needs_reference else {"reference"}
    return services.model_copy(update=dict.fromkeys(unused))


def _ports(raw: Mapping[str, Any]) -> dict[str, int]:
    sections = {section: raw.get(section) or {} for section in _PORTS}
    return {f"{section}.port": options.get("port", _PORTS[section]) for section, options in sections.items()}


def _wrong_ports(raw: Mapping[str, Any], path: str | Path) -> list[str]:
    """Errors in Serve's ports; the rest of these sections is checked by Serve's schema."""
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
    """Fields that Serve would refuse or ignore, without those that `problems` names already."""
    # Imported here because loading Ray Serve takes two seconds, which `train` need not wait.
    from quartet.config import serve as serve_sections

    told = "\n".join(problems)
    refused = serve_sections.problems({key: value for key, value in raw.items() if key in SERVE_KEYS})
    return [line for line in refused if f"{line.partition(':')[0]}:" not in told]


def _wrong_target(target: str, raw: Mapping[str, Any]) -> list[str]:
    """An error if the target is on this machine but is not the port on which Serve of the same file listens."""
    host, _, port = target.rpartition(":")
    served = (raw.get("grpc_options") or {}).get("port")
    if host in ("127.0.0.1", "localhost") and served is not None and int(port) != served:
        return [f"orchestrator.target: {target}, but grpc_options.port is {served}; they must be the same port"]
    return []
