"""The text of a user's code, by which it is identified: of the module that holds it, and of the modules of the user's
own that this one imports. What Python has compiled of them has to be of that text.

Needs nothing but Python: the processes of reward functions, which begin within milliseconds, read it too.
"""

import ast
import contextlib
import inspect
import sysconfig
import tokenize
from collections.abc import Iterator
from importlib.util import cache_from_source, find_spec
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
    only = first if _is_installed(root) else None
    beside = {name: text for name, _, text in _beside(root, module.__name__, package, own, only)}
    return "\n".join([own, *(f"{name}\n{beside[name]}" for name in sorted(beside))])


def forget_compiled(name: str) -> None:
    """Removes what Python has compiled of a user's module, and of those beside it that it imports, where it may be of
    another text. Python knows that a file has changed by its size and by the second of its last change: what it
    compiled within that second may be of a text that was there before."""
    first = name.partition(".")[0]
    try:
        spec = find_spec(first)
    except ValueError:  # a module that was not imported, as of a program that is run
        return
    place = next(iter(spec.submodule_search_locations or ()), spec.origin) if spec else None
    if first in OURS or place is None or _is_installed(root := Path(place).absolute().parent):
        return
    if (file := _file(root, name)) is None or (text := _read(file)) is None:
        return
    beside = [each for _, each, _ in _beside(root, name, file.name == "__init__.py", text, None)]
    for source in (file, *beside):
        with contextlib.suppress(OSError):
            compiled = Path(cache_from_source(str(source)))
            if int(compiled.stat().st_mtime) <= int(source.stat().st_mtime):
                compiled.unlink()


def _is_installed(root: Path) -> bool:
    """True for a folder of installed modules: this Python's own, or a user's, or another's on which it builds."""
    return root.resolve() in _INSTALLED or root.name in ("site-packages", "dist-packages")


def _beside(root: Path, name: str, package: bool, text: str, only: str | None) -> Iterator[tuple[str, Path, str]]:
    """(name, file, text) of each module of the user's below `root` that this one imports, directly or through others;
    with `only` of that package alone."""
    known, waiting = {name}, [(name, package, text)]
    while waiting:
        for wanted in _imported(*waiting.pop()):
            top = wanted.partition(".")[0]
            if top in OURS or only not in (None, top):
                continue
            for each in accumulate(wanted.split("."), lambda outer, inner: f"{outer}.{inner}"):
                if each in known or (file := _file(root, each)) is None or (read := _read(file)) is None:
                    continue
                known.add(each)
                yield each, file, read
                waiting.append((each, file.name == "__init__.py", read))


def _read(file: Path) -> str | None:
    """The text of a module's file; None if it has none that Python could read."""
    with contextlib.suppress(OSError, SyntaxError, UnicodeDecodeError), tokenize.open(file) as opened:
        return opened.read()
    return None


def _file(root: Path, name: str) -> Path | None:
    """The file of the module of this name below `root`, if there is one."""
    place = root.joinpath(*name.split("."))
    files = (place / "__init__.py", place.with_name(f"{place.name}.py"))
    return next((file for file in files if file.is_file()), None)


def _imported(name: str, package: bool, text: str) -> Iterator[str]:
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
