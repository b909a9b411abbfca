"""Code that the services, their clients and the orchestrator share; and the Python API, for scripts and notebooks.

The API's names (`__all__`) come from orchestrator/api.py when they are first used, so that clients of the services,
which import packages of this one, stay light.

May import nothing. orchestrator, recipes and services import it.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from orchestrator.api import Step, Training, connect, down, evaluate, metrics, up

__all__ = ["Step", "Training", "connect", "down", "evaluate", "metrics", "up"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(import_module("orchestrator.api"), name)
    raise AttributeError(f"module {__name__} has no attribute {name}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
