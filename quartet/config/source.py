"""The text of a user's code, by which it is identified: of the module that holds it, and of the modules of the user's
own that this one imports.

Needs nothing but Python: the processes of reward functions, which begin within milliseconds, read it too.
"""

import ast
import contextlib
import inspect
import sysconfig
import tokenize
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path
from types import ModuleType
from typing import Any

OURS = frozenset({"orchestrator", "protos", "quartet", "recipes", "services"})
"""Quartet's packages. They may lie in the user's folder, as in a clone."""
_INSTALLED = {Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "platstdlib", "purelib", "platlib")}


def text_of(code: Any) -> str:
    """The text of the module of a function or class and, in the order of their names, of the modules beside it that
    it imports, directly or through others. For a module that is installed those of its own package count alone, and
    none of Quartet's packages does.

    Raises:
        OSError, TypeError: the module has no text.
    """
    module = inspect.getmodule(code) or code
    own, place = inspect.getsource(module), getattr(module, "__file__", None)
    if not isinstance(module, ModuleType) or place is None:
        return own
    package = hasattr(module, "__path__")
    above = Path(place).absolute().parents
    depth = module.__name__.count(".") + package
    if depth >= len(above):  # a name that says nothing of its place
        return own
    root, first = above[depth], module.__name__.partition(".")[0]
    installed, texts = root.resolve() in _INSTALLED, {module.__name__: own}
    waiting = [(module.__name__, package)]
    while waiting:
        name, package = waiting.pop()
        for wanted in _imported(texts[name], name, package):
            top = wanted.partition(".")[0]
            if top in OURS or (installed and top != first):
                continue
            for each in accumulate(wanted.split("."), lambda outer, inner: f"{outer}.{inner}"):
                if each not in texts and (file := _file(root, each)):
                    with contextlib.suppress(OSError, SyntaxError, UnicodeDecodeError), tokenize.open(file) as opened:
                        texts[each] = opened.read()
                        waiting.append((each, file.name == "__init__.py"))
    del texts[module.__name__]
    return "\n".join([own, *(f"{name}\n{texts[name]}" for name in sorted(texts))])


def _file(root: Path, name: str) -> Path | None:
    """The file of the module of this name below `root`, if there is one."""
    place = root.joinpath(*name.split("."))
    files = (place / "__init__.py", place.with_name(f"{place.name}.py"))
    return next((file for file in files if file.is_file()), None)


def _imported(text: str, name: str, package: bool) -> Iterator[str]:
    """Names of modules that the module `name` may import anywhere in its text, and of things within them."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            outer = name.split(".")
            # A package's own text is one level further inside than its name.
            base = outer[: len(outer) + package - node.level] if node.level else []
            inside = [*base, *([node.module] if node.module else [])]
            yield from (".".join([*inside, alias.name]) for alias in node.names if alias.name != "*")
            if inside:
                yield ".".join(inside)
