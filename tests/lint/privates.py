"""Shipped code takes private names of other libraries through quartet/seams alone."""

import ast
import sys
from collections.abc import Iterator

from tests.lint.dependencies import OURS, ROOT, SHIPPED

SEAMS = ROOT / "quartet/seams"
DOCUMENTED = {"_asdict", "_replace", "_exit"}
"""Names with an underscore that Python's documentation describes."""


def check() -> Iterator[str]:
    """A line for each private name of another library."""
    files = [path for folder in SHIPPED for path in sorted((ROOT / folder).rglob("*.py")) if "_pb2" not in path.name]
    trees = {path: ast.parse(path.read_text()) for path in files}
    own = set[str]().union(*map(defined, trees.values()))
    for path, tree in trees.items():
        if not path.is_relative_to(SEAMS):
            yield from (f"{path.relative_to(ROOT)}:{line}" for line in privates(tree, own))


def defined(tree: ast.AST) -> set[str]:
    """Names of functions, classes, variables and attributes of `self` or `cls` that a file defines."""
    found = set[str]()
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                found.add(node.name)
            case ast.Name(id=name, ctx=ast.Store()):
                found.add(name)
            case ast.Attribute(value=ast.Name(id="self" | "cls"), attr=name, ctx=ast.Store()):
                found.add(name)
    return found


def privates(tree: ast.AST, own: set[str]) -> Iterator[str]:
    """Line and text of each private name that is none of `own`, or belongs to something that another library gave."""
    foreign = set[str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            modules = [node.module or ""] if isinstance(node, ast.ImportFrom) else [a.name for a in node.names]
            if not _is_foreign(modules[0]):
                continue
            foreign |= {alias.asname or alias.name.partition(".")[0] for alias in node.names}
            names = [part for module in modules for part in module.split(".")]
            names += [alias.name for alias in node.names] if isinstance(node, ast.ImportFrom) else []
            if any(map(_is_private, names)):
                yield f"{node.lineno}: {ast.unparse(node)}"
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and _is_private(node.attr):
            if node.attr not in own or _root(node) in foreign:
                yield f"{node.lineno}: {ast.unparse(node)}"
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "setattr", "hasattr"):
            match node.args:
                case [_, ast.Constant(value=str(name)), *_] if _is_private(name) and name not in own:
                    yield f"{node.lineno}: {ast.unparse(node)}"


def _is_foreign(module: str) -> bool:
    top = module.partition(".")[0]
    return bool(top) and top not in OURS and top not in sys.stdlib_module_names


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__") and name not in DOCUMENTED


def _root(node: ast.Attribute) -> str:
    """The name at which a chain of attributes begins; empty if it begins with something else."""
    value: ast.expr = node
    while isinstance(value, ast.Attribute):
        value = value.value
    return value.id if isinstance(value, ast.Name) else ""
