"""Reasons for which the command `quartet` cannot start. Imports nothing that an installation may lack."""

import sys

OURS = frozenset({"orchestrator", "protos", "quartet", "recipes", "services"})
_INSTALL = (
    "this is the light install, for clients of the services. `quartet score`, and `quartet evaluate` of rows, need "
    "its extra `cli`, all other commands the full install: in a checkout of Quartet `make install`, with a GPU "
    "`make install EXTRA=gpu`"
)


def reason(error: ModuleNotFoundError) -> str:
    """A line for the user whose installation lacks a module, or whose own package hides one of Quartet's."""
    missing = error.name or ""
    package = missing.partition(".")[0]
    if package not in OURS:
        return f"no module {missing}: {_INSTALL}"
    places = ", ".join(getattr(sys.modules.get(package), "__path__", [])) or "another place"
    return (
        f"no module {missing}: Python found a package {package} in {places}, which is not Quartet's; rename "
        "it, or take its folder off PYTHONPATH"
    )
