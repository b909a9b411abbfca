"""Engines by name. A new one is a package beside vllm/ with a `start`, and a row here."""

import json
import subprocess
import sys
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

from quartet.config.base import ConfigError
from quartet.config.functions import imported

if TYPE_CHECKING:  # the configuration reads this table
    from services.rollout.config import RolloutConfig
    from services.rollout.http import Completions, Served
    from services.rollout.interface import Engine

Start = Callable[["RolloutConfig"], Awaitable["Engine"]]
"""Starts an engine."""
TOLD_S = 120.0
"""Longest wait for what another process tells of an engine, in seconds."""
_LOOK = """
import json, os, sys
from services.rollout.engines import own
try:
    own(*sys.argv[1:])
    problem = ""
except ValueError as error:
    problem = str(error)
print()
print(json.dumps(problem), flush=True)
os._exit(0)
"""
"""Tells the problem of an engine of the user's own, and ends before its module may print more or wait for threads."""


@dataclass(frozen=True, slots=True)
class EngineKind:
    """An engine, and what a file's check has to know of it."""

    start: str
    """`package.module:function` of its Start, imported in the replica alone."""
    cpu_head_sizes: tuple[int, ...] | None = None
    """Numbers per attention head that it has kernels for on a CPU; None: any."""
    completions: str | None = None
    """`package.module:function` that takes the configuration and a Served (services/rollout/http.py) and returns the
    engine's Completions; None if it has no answers in OpenAI's protocol."""
    parsers: str | None = None
    """Module whose last line is JSON: fields of the configuration that name a parser -> names that they may have.
    None: they are not checked."""


ENGINES = {
    "vllm": EngineKind(
        "services.rollout.vllm:start",
        # Those that vLLM's CPUAttentionBackend was compiled for.
        cpu_head_sizes=(32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512),
        completions="services.rollout.vllm:completions",
        parsers="services.rollout.vllm.parsers",
    )
}


def kind_of(config: "RolloutConfig") -> EngineKind:
    """The engine that a configuration names, or the user's own."""
    return ENGINES.get(config.engine) or EngineKind(config.engine)


async def start(config: "RolloutConfig") -> "Engine":
    """Starts the engine that a configuration names, one of the user's own found as reward functions are. ConfigError
    if that cannot be imported; other errors are the engine's own."""
    ours = ENGINES.get(config.engine)
    begin: Start = own(config.engine, "rollout.args.engine") if ours is None else resolve_name(ours.start)
    return await begin(config)


def own(path: str, field: str) -> Start:
    """The user's engine at `package.module:function`, which stands at `field`. ConfigError if it cannot be imported,
    or is not a function."""
    begin = imported(path, field)
    if not callable(begin):
        raise ConfigError(f"{field}: {path!r} is not a function")
    started: Start = begin
    return started


def problem_of_own(config: "RolloutConfig", field: str) -> str:
    """The reason for which an engine of the user's own could not be started, by its name alone; empty if there is
    none, or if the replica will tell."""
    told = None if config.engine in ENGINES else _told("-c", _LOOK, config.engine, field)
    return "" if told is None else str(told)


def completions(config: "RolloutConfig", served: "Served") -> "Completions | None":
    """The answers in OpenAI's protocol of the engine that a configuration names; None if it has none."""
    named = kind_of(config).completions
    if named is None:
        return None
    made: Completions = resolve_name(named)(config, served)
    return made


def unknown_parsers(config: "RolloutConfig") -> Mapping[str, list[str]]:
    """Fields that name a parser which the engine does not have -> the names that they may have. Empty where none is
    named, or where this machine cannot tell, as without the engine, and the replica will."""
    module = kind_of(config).parsers
    named = {field: name for field in ("tool_parser", "reasoning_parser") if (name := getattr(config, field))}
    if not named or module is None:
        return {}
    known: dict[str, list[str]] | None = _told("-m", module)
    return {} if known is None else {field: known[field] for field, name in named.items() if name not in known[field]}


def _told(*arguments: str) -> Any:
    """The JSON in the last line of another Python's output; None if that fails, which the replica will tell. In a
    process of its own, as importing vLLM changes the environment, which a head or ranks would inherit."""
    try:
        told = subprocess.run([sys.executable, "-P", *arguments], capture_output=True, timeout=TOLD_S, check=True)
        return json.loads(told.stdout.splitlines()[-1])
    except (subprocess.SubprocessError, OSError, IndexError, ValueError):  # a module may also write elsewhere, or end
        return None
