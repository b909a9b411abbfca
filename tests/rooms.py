"""The contract that each room imports, and is imported by, what its docstring says; a type of import-linter's.

A room is a package. The docstring of its `__init__.py` ends with two sentences, such as

    May import config and tracing. commands and loop import it.

Names are those beside the room: its siblings, then its parent's, up to the top-level packages. `nothing`, `all` and
`all but ...` may stand for names. A room may import all and use few; where `all` import it, each of its siblings
does. Every room may import protos.
"""

import ast
import re
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Self

from grimp import ImportGraph
from importlinter import Contract, ContractCheck, output

_IMPORTS = re.compile(r"May import (.+?)[.;:]\s", re.DOTALL)
_IMPORTED = re.compile(r"\.\s+([^.]+?) imports? it\b", re.DOTALL)
_FILLING = {"and", "the", "of"}


@dataclass(frozen=True, slots=True)
class Names:
    """The names in one sentence of a docstring."""

    named: frozenset[str]
    others: bool = False
    """True if all others are meant, too, but for those of `excepted`."""
    excepted: frozenset[str] = frozenset()

    @classmethod
    def of(cls, text: str) -> Self:
        """The names in the text."""
        words = [word.lower() for word in re.findall(r"\w+", text)]
        if words[0] == "all":
            return cls(frozenset(), others=True, excepted=frozenset(words[2:]) - _FILLING)
        return cls(frozenset(words) - _FILLING - {"nothing"})

    def wrong(self, actual: set[str], siblings: frozenset[str] = frozenset()) -> list[str]:
        """The actual names that the sentence does not allow, and the names in it that are not among the actual; `all`
        names the siblings."""
        if self.others:
            missing = siblings - self.excepted - actual
            return sorted(actual & self.excepted) + [f"{name} (not needed)" for name in sorted(missing)]
        return sorted(actual - self.named) + [f"{name} (not needed)" for name in sorted(self.named - actual)]


def name_beside(room: str, module: str) -> str:
    """The name by which a room's docstring calls another module: `config` for orchestrator.config.run, seen from
    orchestrator.push."""
    beside = room
    while beside := beside.rpartition(".")[0]:
        if module.startswith(f"{beside}."):
            return module.removeprefix(f"{beside}.").split(".")[0]
    return module.split(".")[0]


def complaints(graph: ImportGraph, room: str, docstring: str) -> list[str]:
    """Sentences that say in what a room's docstring differs from its imports; none if it is right."""
    imports, imported = _IMPORTS.search(f"{docstring} "), _IMPORTED.search(docstring)
    if not imports or not imported:
        return [f"{room}: its docstring does not end with `May import ... . ... import it.`"]
    inside = {room} | graph.find_descendants(room)
    outward = {m for each in inside for m in graph.find_modules_directly_imported_by(each)} - inside
    inward = {m for each in inside for m in graph.find_modules_that_directly_import(each)} - inside
    # Packages of others are not divided into modules.
    ours = {name_beside(room, m) for m in outward if not graph.is_module_squashed(m)} - {"protos"}
    told = [f"{room} imports {name}" for name in Names.of(imports[1]).wrong(ours)]
    importers = {name_beside(room, m) for m in inward}
    wrong = Names.of(imported[1]).wrong(importers, siblings(graph, room))
    return told + [f"{room} is imported by {name}" for name in wrong]


def siblings(graph: ImportGraph, room: str) -> frozenset[str]:
    """Names of the packages and modules beside a room."""
    parent, _, own = room.rpartition(".")
    return (
        frozenset(each.rpartition(".")[2] for each in graph.find_children(parent)) - {own} if parent else frozenset()
    )


class Docstrings(Contract):
    """Fails for each package whose docstring does not say what it imports and what imports it."""

    def check(self, graph: ImportGraph, verbose: bool) -> ContractCheck:
        """Compares all docstrings with the imports."""
        told: list[str] = []
        for module in sorted(graph.modules):
            if not graph.is_module_squashed(module) and (docstring := _docstring(module)) is not None:
                told += complaints(graph, module, docstring)
        return ContractCheck(kept=not told, metadata={"told": told})

    def render_broken_contract(self, check: ContractCheck) -> None:
        """Prints the differences."""
        for line in check.metadata["told"]:
            output.print_error(line)


def _docstring(module: str) -> str | None:
    """The docstring of a package, empty if it has none; None for a module that is not a package."""
    spec = find_spec(module)
    origin = Path(spec.origin or "") if spec else Path()
    if origin.name != "__init__.py":
        return None
    return ast.get_docstring(ast.parse(origin.read_text())) or ""
