"""Functions named by import path in the configuration: scorers and judges."""

import importlib
import inspect
import os
import sys
from collections.abc import Callable, Sequence

from quartet.config.base import ConfigError
from quartet.wire.pairs import Pair

VARIABLE = "QUARTET_FUNCTIONS"
"""Folder of the user's modules, which `quartet up` gives to the services: its own. Python looks there last, so that
no module in it hides one of an installed package."""


def load_function(path: str, field: str = "function") -> Callable[[Sequence[Pair]], Sequence[float]]:
    """The function at `package.module:name`, which stands at `field` of the configuration.

    Raises:
        ConfigError: it does not exist, is not a function of one argument, or its module cannot be imported.
    """
    module, _, name = path.partition(":")
    folder = os.environ.get(VARIABLE)
    if folder and folder not in sys.path:
        sys.path.append(folder)
    try:
        function = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError, TypeError) as error:
        # Says which file was read, as another module of the same name may have been found first.
        place = getattr(sys.modules.get(module), "__file__", None)
        raise ConfigError(
            f"{field}: {path!r} should be package.module:name, but cannot be imported: {error}"
            + (f" (the module is {place})" if place else "")
        ) from None
    except (Exception, SystemExit) as error:  # the user's own code, which may raise anything
        raise ConfigError(f"{field}: importing {module} fails with {type(error).__name__}: {error}") from None
    if not callable(function):
        raise ConfigError(f"{field}: {path!r} is not a function")
    if inspect.iscoroutinefunction(function):
        raise ConfigError(f"{field}: {path!r} is an async function; write it with def, as it is called in a thread")
    if (taken := _other_arguments(function)) is not None:
        raise ConfigError(f"{field}: {path!r} should take one argument, a sequence of pairs, but takes {taken}")
    loaded: Callable[[Sequence[Pair]], Sequence[float]] = function
    return loaded


def source_of(function: Callable[..., object], path: str, where: str) -> str:
    """The text of the function's module, by which a scorer is identified. ConfigError, which names `path` at `where`,
    if it has none."""
    try:
        return inspect.getsource(inspect.getmodule(function) or function)
    except (OSError, TypeError):
        raise ConfigError(f"{where}.function: {path} has no Python source to identify it by") from None


def _other_arguments(function: Callable[..., object]) -> str | None:
    """The function's arguments as Python writes them if it cannot be called with one; else None."""
    try:
        signature = inspect.signature(function)
    except (ValueError, TypeError):  # some functions in C do not tell
        return None
    try:
        signature.bind(())
    except TypeError:
        return str(signature)
    return None
