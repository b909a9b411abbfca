"""Modules of a user that have the name of another module, of which Python would find only one."""

import os
import sys
from collections.abc import Iterator
from importlib.machinery import PathFinder
from pathlib import Path

import services

OURS = ("orchestrator", "protos", "quartet", "recipes", "services")
"""Quartet's packages, which lie beside each other."""
_HOME = Path(services.__file__).resolve().parents[1]
_UNUSED = frozenset({"benchmarks", "docs", "examples", "scripts", "test", "tests"})
"""Names that many projects have, that some packages install by mistake, and that nothing imports from elsewhere."""
INSTALLED = frozenset({"site-packages", "dist-packages"})
"""Names of the folders into which packages are installed."""
_CURE = "rename yours, and the import paths of functions in it; or start the commands in another folder"


def clashes() -> Iterator[str]:
    """A line for each module in the current folder, and in those of PYTHONPATH, whose name is one of Quartet's; and
    for each in the current folder whose name is one of Python's or of an installed package.

    Ray's workers look for every module first in the folder in which their cluster was started or a run joined it, so
    that a `random.py` there would be imported by all libraries. What PYTHONPATH hides of those is the user's choice.
    """
    current = Path.cwd().resolve()
    given = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    for folder in dict.fromkeys([current, *(Path(place).resolve() for place in given)]):
        if folder == _HOME:
            continue
        for name in OURS:
            if (folder / f"{name}.py").is_file() or _holds_code(folder / name):
                yield (
                    f"{folder} holds a Python module named {name}, which is the name of a package of Quartet's "
                    f"({_HOME / name}): {_CURE}"
                )
    for name, file in sorted(_modules(current)):
        if name not in _UNUSED and name not in OURS and (hidden := _hidden(name, current)):
            yield f"{file} has the name of {hidden}, which the services would no longer find: {_CURE}"


def _modules(folder: Path) -> Iterator[tuple[str, Path]]:
    """Name and file of each module in a folder that Python prefers to one of the same name in a later folder."""
    for file in folder.glob("*.py"):
        yield file.stem, file
    for file in folder.glob("*/__init__.py"):
        yield file.parent.name, file


def _hidden(name: str, folder: Path) -> str:
    """The module that one of this name in the folder would hide; empty if it hides none."""
    if name in sys.stdlib_module_names:
        return f"Python's module {name}"
    # The command itself has the folder on its path, last.
    spec = PathFinder.find_spec(name, [place for place in sys.path if Path(place).resolve() != folder])
    if spec is None or spec.origin is None:
        return ""
    origin = Path(spec.origin).resolve()
    # An environment may lie in the folder; what else lies there is the user's own.
    if origin.is_relative_to(folder) and not INSTALLED.intersection(origin.parts):
        return ""
    return f"the installed module {name} ({spec.origin})"


def _holds_code(folder: Path) -> bool:
    """True if the folder holds Python files, with or without an `__init__.py`; a folder of anything else is none of
    Python's."""
    return folder.is_dir() and next(folder.glob("*.py"), None) is not None
