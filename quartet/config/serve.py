"""Serve's own sections of the YAML file, checked with Serve's own schema before anything is deployed.

Serve ignores unknown fields, so that a typo would silently do nothing: they are reported here too. Apart from the
other configuration, because it loads Ray Serve, which takes seconds.
"""

from collections.abc import Iterator, Mapping, Sequence
from types import UnionType
from typing import Any, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from ray.serve.schema import ServeApplicationSchema, ServeDeploySchema

from quartet.config.explain import explain, shown, unknown

DEFAULT_ROUTE = "/"
"""Route of an application that names none; a test compares it with Serve's schema."""


def problems(raw: Mapping[str, Any]) -> list[str]:
    """Fields that Serve would refuse or ignore in these sections, a line each, as `applications.<name>.field: ...`.

    Args:
        raw: Serve's sections alone; `applications` is a list of mappings.
    """
    applications: Sequence[Mapping[str, Any]] = raw.get("applications") or []
    errors = [
        line
        for index, application in enumerate(applications)
        for line in _wrong(ServeApplicationSchema, application, f"applications.{_label(application, index)}")
    ]
    rest = {name: section for name, section in raw.items() if name != "applications"}
    for name, section in rest.items():
        errors += _unknown(ServeDeploySchema.model_fields[name].annotation, section, name)
    # Applications are compared with each other only once each is valid by itself.
    errors = errors or list(_wrong_routes(applications))
    errors += _refused(ServeDeploySchema, rest | {"applications": [] if errors else list(applications)})
    return errors


def _wrong_routes(applications: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Applications without a route, or with that of an earlier one: Serve finds an application for gRPC calls only if
    it has a route of its own."""
    first: dict[str, str] = {}
    for index, application in enumerate(applications):
        name, route = _label(application, index), application.get("route_prefix", DEFAULT_ROUTE)
        where = f"applications.{name}.route_prefix"
        if route is None:
            yield f"{where}: should be a path, such as /{name}, got null; without one no gRPC call reaches it"
        elif isinstance(route, str) and first.setdefault(route, name) != name:
            given = "" if "route_prefix" in application else "left out, which is "
            yield f"{where}: {given}{route}, as of {first[route]}; give each application its own, such as /{name}"


def _wrong(model: type[BaseModel], given: Mapping[str, Any], where: str) -> list[str]:
    deployments = given.get("deployments")
    for index, entry in enumerate(deployments if isinstance(deployments, list) else []):
        if not isinstance(entry, Mapping):  # Serve's own check would break on it
            return [f"{where}.deployments.{index}: should be a mapping of fields to values, got {shown(entry)}"]
    return [*_unknown(model, given, where), *_refused(model, given, where)]


def _unknown(kind: Any, given: Any, where: str) -> Iterator[str]:
    """Fields of `given`, at any depth, that the schema `kind` does not have."""
    model = _model(kind)
    if get_origin(kind) is list and isinstance(given, list):
        for index, entry in enumerate(given):
            yield from _unknown(get_args(kind)[0], entry, f"{where}.{_label(entry, index)}")
    elif model is not None and isinstance(given, Mapping):
        for name, value in given.items():
            field = model.model_fields.get(name)
            if field is None:
                yield f"{where}.{name}: {unknown(str(name), set(model.model_fields))}"
            else:
                yield from _unknown(field.annotation, value, f"{where}.{name}")
        if model is not kind and dict in (get_origin(choice) or choice for choice in get_args(kind)):
            # Serve checks the contents of plain dictionaries only when it deploys.
            yield from _refused(model, given, where)


def _refused(model: type[BaseModel], given: Mapping[str, Any], where: str = "") -> list[str]:
    """The schema's own objections, with the names of deployments where pydantic gives their positions."""
    try:
        model.model_validate(given)
    except ValidationError as error:
        text = explain(error, model, where)
        deployments = given.get("deployments")
        for index, entry in enumerate(deployments if isinstance(deployments, list) else []):
            text = text.replace(f"{where}.deployments.{index}", f"{where}.deployments.{_label(entry, index)}")
        return text.splitlines()
    return []


def _label(entry: Any, index: int) -> str:
    return str(entry.get("name", index)) if isinstance(entry, Mapping) else str(index)


def _model(kind: Any) -> type[BaseModel] | None:
    """The section among the types that `kind` allows, if any."""
    choices = get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)
    return next((choice for choice in choices if isinstance(choice, type) and issubclass(choice, BaseModel)), None)
