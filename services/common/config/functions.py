"""Functions named by import path in the configuration: scorers and judges."""

import importlib
import inspect
from collections.abc import Callable, Sequence

from services.common.config.base import ConfigError
from services.common.wire.pairs import Pair


def load_function(path: str, field: str = "function") -> Callable[[Sequence[Pair]], Sequence[float]]:
    """The function at `package.module:name`, which stands at `field` of the configuration.

    Raises:
        ConfigError: it does not exist, is not a function, or its module cannot be imported.
    """
    module, _, name = path.partition(":")
    try:
        function = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError, TypeError) as error:
        raise ConfigError(
            f"{field}: {path!r} should be package.module:name, but cannot be imported: {error}"
        ) from None
    except Exception as error:  # the user's own code, which may raise anything
        raise ConfigError(f"{field}: importing {module} fails with {type(error).__name__}: {error}") from None
    if not callable(function):
        raise ConfigError(f"{field}: {path!r} is not a function")
    if inspect.iscoroutinefunction(function):
        raise ConfigError(f"{field}: {path!r} is an async function; write it with def, as it is called in a thread")
    loaded: Callable[[Sequence[Pair]], Sequence[float]] = function
    return loaded
