"""Engines by name. A new one is a package beside vllm/ with a `start`, and a row here."""

import importlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # the configuration reads this table
    from services.rollout.config import RolloutConfig
    from services.rollout.http import Completions, Served
    from services.rollout.interface import Engine

Start = Callable[["RolloutConfig"], Awaitable["Engine"]]
"""Starts an engine."""


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


ENGINES = {
    "vllm": EngineKind(
        "services.rollout.vllm:start",
        # Those that vLLM's CPUAttentionBackend was compiled for.
        cpu_head_sizes=(32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512),
        completions="services.rollout.vllm:completions",
    )
}


def kind_of(config: "RolloutConfig") -> EngineKind:
    """The engine that a configuration names, or the user's own."""
    return ENGINES.get(config.engine) or EngineKind(config.engine)


async def start(config: "RolloutConfig") -> "Engine":
    """Starts the engine that a configuration names. The errors are the engine's own."""
    begin: Start = _imported(kind_of(config).start)
    return await begin(config)


def completions(config: "RolloutConfig", served: "Served") -> "Completions | None":
    """The answers in OpenAI's protocol of the engine that a configuration names; None if it has none."""
    named = kind_of(config).completions
    if named is None:
        return None
    made: Completions = _imported(named)(config, served)
    return made


def _imported(path: str) -> Any:
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)
