"""Serve's options in a file without which its services would not be called, or not only past the guard."""

from collections.abc import Mapping, Sequence
from typing import Any

from orchestrator.deployment.applications import Application, service_of
from quartet.config.explain import shown
from quartet.security.port import GUARD, on_loopback

_FUNCTIONS = "grpc_options.grpc_servicer_functions"


def problems(raw: Mapping[str, Any], applications: Sequence[Application]) -> list[str]:
    """Errors in `http_options` and `grpc_options`, a line each, besides those that Serve's schema finds.

    Args:
        raw: the file.
        applications: its applications.
    """
    return [*_wrong_host(raw.get("http_options", {})), *_wrong_functions(raw.get("grpc_options", {}), applications)]


def _wrong_host(options: Any) -> list[str]:
    host = options.get("host") if isinstance(options, Mapping) else "127.0.0.1"
    if isinstance(host, str) and on_loopback(host):
        return []
    got = "Serve's default is every address" if host is None else f"got {shown(host)}"
    return [f"http_options.host: should be 127.0.0.1, as this port is for no other machine; {got}"]


def _wrong_functions(options: Any, applications: Sequence[Application]) -> list[str]:
    functions = options.get("grpc_servicer_functions", []) if isinstance(options, Mapping) else None
    if not (isinstance(functions, list) and all(isinstance(function, str) for function in functions)):
        return []
    needed = {f"{entry.get('name')}": service.function for entry in applications if (service := service_of(entry))}
    if not (functions or needed):
        return []
    # Serve takes `module.name` and `module:name`.
    given = [function.replace(":", ".") for function in functions]
    problems = []
    if given[:1] != [GUARD]:
        got = f"the first is {given[0]}" if given else "it is empty"
        problems.append(f"{_FUNCTIONS}: should begin with {GUARD}, without which the port is not opened; {got}")
    return problems + [
        f"{_FUNCTIONS}: should hold {function}, without which no call reaches application {name}"
        for name, function in needed.items()
        if function not in given
    ]
