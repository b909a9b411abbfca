"""Functions named by import path in the configuration: scorers and judges."""

import importlib
from collections.abc import Callable, Sequence

from services.common.config import ConfigError
from services.common.pairs import Pair


def load_function(path: str, field: str = "function") -> Callable[[Sequence[Pair]], Sequence[float]]:
    """The function at `package.module:name`, which stands at `field` of the configuration.

    Raises:
        ConfigError: there is none, or its module fails while it is imported.
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
        raise ConfigError(f"{field}: {path!r} is no function")
    loaded: Callable[[Sequence[Pair]], Sequence[float]] = function
    return loaded
