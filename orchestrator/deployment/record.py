"""A deployment file without secrets, as it is kept beside a run, shown in its report and sent to W&B."""

from collections.abc import Iterator, Mapping
from typing import Any

HIDDEN = "(not kept)"
"""Replacement for values of environment variables, which may be passwords or tokens."""


def record(raw: Mapping[str, Any]) -> dict[str, Any]:
    """`raw` with the names of environment variables but not their values.

    Also without `shared`, whose values appear where they are used.
    """
    return {name: _without_secrets(name, value) for name, value in raw.items() if name != "shared"}


def gaps(raw: Mapping[str, Any]) -> list[str]:
    """The values that are missing from a recorded file when it is used as a deployment, a line for each."""
    return [f"{where}: not kept with the run; insert its value again" for where in _gaps(raw, "")]


def _without_secrets(name: str, value: Any) -> Any:
    if isinstance(value, Mapping):
        hidden = name == "env_vars"
        return {key: HIDDEN if hidden else _without_secrets(str(key), inner) for key, inner in value.items()}
    return [_without_secrets("", inner) for inner in value] if isinstance(value, list) else value


def _gaps(value: Any, where: str) -> Iterator[str]:
    entries: list[tuple[Any, Any]] = []
    if isinstance(value, Mapping):
        entries = [*value.items()]
    elif isinstance(value, list):
        # A name may be anything, and given twice, in a file that is yet to be checked.
        entries = [(each.get("name", i) if isinstance(each, Mapping) else i, each) for i, each in enumerate(value)]
    elif value == HIDDEN:
        yield where
    for name, inner in entries:
        yield from _gaps(inner, f"{where}.{name}".lstrip("."))
