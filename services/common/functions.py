"""Functions named by import path in the configuration: scorers and judges."""

import importlib
from collections.abc import Callable, Sequence

from services.common.config import ConfigError
from services.common.pairs import Pair


def load_function(path: str) -> Callable[[Sequence[Pair]], Sequence[float]]:
    """The function at `package.module:name`. ConfigError if there is none."""
    module, _, name = path.partition(":")
    try:
        function = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError, TypeError) as error:
        raise ConfigError(
            f"function: {path!r} should be package.module:name, but cannot be imported: {error}"
        ) from None
    if not callable(function):
        raise ConfigError(f"function: {path!r} is no function")
    loaded: Callable[[Sequence[Pair]], Sequence[float]] = function
    return loaded
