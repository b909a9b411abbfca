"""Signatures of vLLM's classes as text, read from its source without importing it, and the recorded ones.

`python -m tests.unit.vllm_signatures VERSION FOLDER` records those of an unpacked vLLM.
"""

import ast
import inspect
import json
import sys
from pathlib import Path
from typing import Any

RECORDED = Path(__file__).with_name("vllm_signatures.json")
CLASSES = {
    "AsyncLLM": "v1/engine/async_llm.py",
    "WeightTransferEngine": "distributed/weight_transfer/base.py",
    "WeightTransferEngineFactory": "distributed/weight_transfer/factory.py",
    "EngineArgs": "engine/arg_utils.py",
    "AsyncEngineArgs": "engine/arg_utils.py",
    "CompletionOutput": "outputs.py",
    "EngineCoreOutput": "v1/engine/__init__.py",
    "EngineCoreOutputs": "v1/engine/__init__.py",
    "LayerReloadingInfo": "model_executor/model_loader/reload/types.py",
    "WeightTransferConfig": "config/weight_transfer.py",
}
FUNCTIONS = {"layerwise": "model_executor/model_loader/reload/layerwise.py"}
"""Files whose functions and module variables are recorded."""

Version = dict[str, dict[str, str]]
"""Class or file -> name -> arguments of a method, such as `(self, level=..., mode=...)`, or `field`. Abstract methods
begin with `abstract `."""


def read(folder: Path) -> Version:
    """The signatures of the vLLM in `folder`."""
    classes = {name: _of_class(ast.parse((folder / path).read_text()), name) for name, path in CLASSES.items()}
    return classes | {name: _of_body(ast.parse((folder / path).read_text()).body) for name, path in FUNCTIONS.items()}


def recorded() -> dict[str, Version]:
    """Version -> its signatures."""
    versions: dict[str, Version] = json.loads(RECORDED.read_text())
    return versions


def signature(text: str) -> inspect.Signature:
    """The signature that a method's text stands for."""
    return inspect.signature(eval(f"lambda {text.removeprefix('abstract ')[1:-1]}: None"))


def _of_class(module: ast.Module, name: str) -> dict[str, str]:
    wanted = next(node for node in module.body if isinstance(node, ast.ClassDef) and node.name == name)
    return _of_body(wanted.body)


def _of_body(body: list[ast.stmt]) -> dict[str, str]:
    members: dict[str, str] = {}
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            abstract = any(getattr(decorator, "id", "") == "abstractmethod" for decorator in node.decorator_list)
            members[node.name] = f"{'abstract ' if abstract else ''}({_arguments(node.args)})"
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            members[node.target.id] = "field"
    return members


def _arguments(arguments: ast.arguments) -> str:
    """The arguments without annotations, each default as `...`."""
    for argument in ast.walk(arguments):
        if isinstance(argument, ast.arg):
            argument.annotation = None
    arguments.defaults = [ast.Constant(...) for _ in arguments.defaults]
    arguments.kw_defaults = [default and ast.Constant(...) for default in arguments.kw_defaults]
    return ast.unparse(arguments)


def main() -> None:
    """Records one version."""
    version, folder = sys.argv[1:]
    versions: dict[str, Any] = recorded() if RECORDED.exists() else {}
    versions[version] = read(Path(folder))
    RECORDED.write_text(json.dumps(versions, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
