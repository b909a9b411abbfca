"""Code named by import path in the configuration: scorers, judges, and environments."""

import importlib
import inspect
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

from quartet.config.base import ConfigError
from quartet.config.source import forget_compiled, text_of
from quartet.wire.pairs import Pair

PATH = r"[A-Za-z_][\w.]*:[A-Za-z_]\w*"
"""The form of `package.module:name`."""
VARIABLE = "QUARTET_FUNCTIONS"
"""Folder of the user's modules, which `quartet up` gives to the services: its own. Everywhere else it is the current
folder. Python looks there last, so that no module in it hides one of an installed package."""


def imported(path: str, field: str) -> Any:
    """The object at `package.module:name`, which stands at `field` of the configuration.

    Raises:
        ConfigError: it does not exist, or its module cannot be imported.
    """
    module, _, name = path.partition(":")
    folder = os.environ.get(VARIABLE) or os.getcwd()
    if folder not in sys.path:
        sys.path.append(folder)
    forget_compiled(module)
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError, TypeError) as error:
        # Says which file was read, as another module of the same name may have been found first.
        place = getattr(sys.modules.get(module), "__file__", None)
        file = (
            f"; a module is named without its .py: {module.removesuffix('.py')}:{name}"
            if module.endswith(".py")
            else ""
        )
        raise ConfigError(
            f"{field}: {path!r} should be package.module:name, but cannot be imported: {error}"
            + (f" (the module is {place})" if place else file)
        ) from None
    except (Exception, SystemExit) as error:  # the user's own code, which may raise anything
        raise ConfigError(f"{field}: importing {module} fails with {type(error).__name__}: {error}") from None


def load_function(
    path: str, field: str = "function", *, asynchronous: bool = False
) -> Callable[[Sequence[Pair]], Sequence[float]]:
    """The function at `package.module:name`, which stands at `field` of the configuration; with `asynchronous` it may
    be a coroutine function.

    Raises:
        ConfigError: it does not exist, is not a function of one argument, or its module cannot be imported.
    """
    function = imported(path, field)
    if not callable(function):
        raise ConfigError(f"{field}: {path!r} is not a function")
    if not asynchronous and any(map(inspect.iscoroutinefunction, (function, type(function).__call__))):
        raise ConfigError(f"{field}: {path!r} is an async function; write it with def, as it is called in a thread")
    if (taken := _other_arguments(function)) is not None:
        raise ConfigError(f"{field}: {path!r} should take one argument, a sequence of pairs, but takes {taken}")
    loaded: Callable[[Sequence[Pair]], Sequence[float]] = function
    return loaded


def source_of(code: Callable[..., object], path: str, where: str) -> str:
    """The text by which a function or class is identified (`text_of`). ConfigError, which names `path` at `where`, if
    it has none."""
    try:
        return text_of(code)
    except (OSError, TypeError):
        raise ConfigError(f"{where}: {path} has no Python source to identify it by") from None


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
