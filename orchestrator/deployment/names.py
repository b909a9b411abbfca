"""Modules of a user that have a name of one of Quartet's packages, of which Python would find only one."""

import os
from collections.abc import Iterator
from pathlib import Path

import services

OURS = ("orchestrator", "protos", "recipes", "services")
"""Quartet's packages, which lie beside each other."""
_HOME = Path(services.__file__).resolve().parents[1]


def clashes() -> Iterator[str]:
    """A line for each module in the current folder, and in those of PYTHONPATH, whose name is one of Quartet's."""
    given = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    for folder in dict.fromkeys(Path(place).resolve() for place in ("", *given)):
        if folder == _HOME:
            continue
        for name in OURS:
            if (folder / f"{name}.py").is_file() or _holds_code(folder / name):
                yield (
                    f"{folder} holds a Python module named {name}, which is the name of a package of Quartet's "
                    f"({_HOME / name}): rename yours, and the import paths of functions in it; or start the commands "
                    "in another folder"
                )


def _holds_code(folder: Path) -> bool:
    """True if the folder holds Python files, with or without an `__init__.py`; a folder of anything else is none of
    Python's."""
    return folder.is_dir() and next(folder.glob("*.py"), None) is not None
