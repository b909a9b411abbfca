"""A file that is deployed while services run: the form in which Serve gets it, and its consequences for them."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from orchestrator.deployment.applications import Application, deployments_of, service_of
from quartet.config.explain import shown
from services.critic.config import CriticConfig


@dataclass(frozen=True, slots=True)
class Change:
    """The consequence of a file for one application that runs."""

    text: str
    """The consequence, for the user."""
    restarts: bool
    """True if replicas that run are replaced or stopped."""


def scalable(application: Application) -> dict[str, Any]:
    """The section with its number of replicas as an `autoscaling_config`, of equal bounds if the number is fixed.

    Serve counts the first `autoscaling_config` of an application as new code and replaces all of its replicas, but
    changes of its values replace none. With the key from the start, a deployment can be given bounds at any time.
    The critic's section, which always has one replica, and those of other applications stay as they are.
    """
    service, deployments = service_of(application), application.get("deployments", [])
    if service is None or service.config is CriticConfig or not isinstance(deployments, list):
        return dict(application)
    listed = {str(entry.get("name")) for entry in deployments}
    entries = [*deployments, *({"name": name} for name in deployments_of(application) if name not in listed)]
    return {**application, "deployments": [_bounded(entry) for entry in entries]}


def _bounded(entry: Mapping[str, Any]) -> dict[str, Any]:
    if entry.get("autoscaling_config") is not None:
        return dict(entry)
    count = entry.get("num_replicas")
    if count == "auto":  # Serve's own bounds
        return {**entry, "autoscaling_config": {}}
    return {**entry, **fixed(count or 1)}


def fixed(count: int) -> dict[str, Any]:
    """The keys of a deployment that give it so many replicas."""
    return {"num_replicas": None, "autoscaling_config": {"min_replicas": count, "max_replicas": count}}


def changes(running: Mapping[str, Any], wanted: Sequence[Application]) -> list[Change]:
    """The consequences of deploying the sections `wanted`; nothing for an application that stays as it is.

    Args:
        running: Serve's description of each application that is deployed, by name.
        wanted: the file's sections, valid and not yet `scalable`.
    """
    found = []
    names = [str(section.get("name")) for section in wanted]
    for name, described in running.items():
        if name not in names:
            text = f"{name}: not in the file, so {_replicas(described)} will be stopped"
            found.append(Change(text, restarts=True))
    for name, section in zip(names, wanted, strict=True):
        described = running.get(name)
        if described and (deployed := described.get("deployed_app_config")):
            found += _changes(name, described, deployed, scalable(section))
    return found


def differing(running: Mapping[str, Any], wanted: Sequence[Application]) -> dict[str, list[str]]:
    """Name of each application that runs otherwise than its section says -> the keys for which Serve would replace
    its replicas, or have another number of them. Arguments as of `changes`."""
    # Imported here because it loads Ray Serve, which takes seconds.
    from quartet.config.restarts import restarting

    found = {}
    for section in wanted:
        name = str(section.get("name"))
        if deployed := running.get(name, {}).get("deployed_app_config"):
            bounded = scalable(section)
            scaled = [f"deployments.{each}.{key}" for each, key in _scaling_keys(deployed, bounded)]
            found[name] = [*restarting(deployed, bounded), *scaled]
    return {name: keys for name, keys in found.items() if keys}


def kept(running: Mapping[str, Any], raw: Mapping[str, Any]) -> list[str]:
    """Options of Serve's ports that the file changes though Serve keeps the old ones while it runs, a line each.

    Args:
        running: Serve's description of itself.
        raw: contents of the file.
    """
    return [
        f"{section}.{key}: {difference}; `quartet down` first"
        for section in ("http_options", "grpc_options")
        for has in [running.get(section) or {}]
        for key, value in (raw.get(section) or {}).items()
        if key in has and (difference := _difference(key, has[key], value))
    ]


def _difference(key: str, has: Any, value: Any) -> str:
    """In what a port's option differs from the file's; empty if it does for the file. A port with more services than
    the file asks for does: the file before may have had a critic."""
    if key != "grpc_servicer_functions":
        return "" if has == value else f"{shown(value)}, but Serve runs with {shown(has)} and keeps it"
    lacking = [each for each in value if each not in has]
    return f"Serve runs without {', '.join(lacking)} and keeps it so" if lacking else ""


def _changes(name: str, described: Mapping[str, Any], deployed: Application, section: Application) -> list[Change]:
    # Imported here because it loads Ray Serve, which takes seconds.
    from quartet.config.restarts import moved, restarting

    keys = restarting(deployed, section)
    if keys:
        replicas = _replicas(described, moved(keys))
        return [Change(f"{name}: {replicas} will be restarted, because of {', '.join(keys)}", restarts=True)]
    if scaled := _scaled(deployed, section):
        several = len(section["deployments"]) > 1
        said = [f"{f'{each} ' if several else ''}from {was} to {becomes}" for each, (was, becomes) in scaled.items()]
        return [Change(f"{name}: {', '.join(said)}; those that stay are not restarted", restarts=False)]
    # What the deployed section does not set has Serve's default, as in the new one.
    if any(deployed.get(key) != value for key, value in section.items() if key in deployed or value):
        return [Change(f"{name}: changes in place; no replica is restarted", restarts=False)]
    return []


def _replicas(described: Mapping[str, Any], only: Collection[str] = ()) -> str:
    """The replicas of an application, in words; of some of its deployments alone, if any are named."""
    deployments = described.get("deployments") or {}
    only = only if len(deployments) > 1 else ()
    count = sum(len(each.get("replicas") or []) for name, each in deployments.items() if not only or name in only)
    whose = f"{' and '.join(only)}: " if only else ""
    return f"{whose}its {_counted(count)}" if count else f"{whose}its replicas, which are not up yet,"


def _scaled(deployed: Application, section: Application) -> dict[str, tuple[str, str]]:
    """Name of each deployment of which the section asks for another number of replicas -> that before and now."""
    before, one = _bounds(deployed), _counted(1)
    return {
        name: (before.get(name, one), after)
        for name, after in _bounds(section).items()
        if before.get(name, one) != after
    }


def _scaling_keys(deployed: Application, section: Application) -> Iterator[tuple[str, str]]:
    """(name, key) of each deployment of which the section asks for another number of replicas: `num_replicas`, which
    a file may write as equal bounds, or `autoscaling_config`."""
    scaled = _scaled(deployed, section)
    for entry in section.get("deployments") or []:
        if (name := str(entry.get("name"))) in scaled:
            scaling = entry.get("autoscaling_config") or {}
            equal = scaling.get("min_replicas", 1) == scaling.get("max_replicas", 1)
            yield name, "num_replicas" if equal and scaling else "autoscaling_config"


def _bounds(section: Application) -> dict[str, str]:
    """Name of each deployment -> the number of replicas that a section asks for, in words."""
    return {str(entry.get("name")): _bound(entry) for entry in section.get("deployments") or []}


def _bound(entry: Mapping[str, Any]) -> str:
    scaling = entry.get("autoscaling_config")
    if entry.get("num_replicas") == "auto":
        return "a number that Serve chooses"
    if scaling is None:
        return _counted(entry.get("num_replicas") or 1)
    low, high = scaling.get("min_replicas", 1), scaling.get("max_replicas", 1)
    return _counted(high) if low == high else f"{low} to {high} replicas"


def _counted(replicas: int) -> str:
    return "1 replica" if replicas == 1 else f"{replicas} replicas"
