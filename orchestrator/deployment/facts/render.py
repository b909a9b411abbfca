"""`quartet render`: the whole file that a file of facts stands for, as text that a person reads."""

import itertools
import shlex
from collections.abc import Mapping
from pathlib import Path
from textwrap import indent
from typing import Any

import yaml

from orchestrator.deployment.facts.read import derived, states_facts
from quartet.config.base import ConfigError, read_yaml

_OF_SERVICES = {
    "rollout": "samples, by vLLM",
    "reward": "scores",
    "reference": "the policy as it was, for the KL penalty",
    "critic": "predicts returns",
}
_OF_KEYS = {
    "grpc_servicer_functions:": "the first is the port's guard",
    "autoscaling_config:": "change both at any time, also while training runs",
    "num_replicas:": "always one, because its weights are trained",
    "max_length:": "prompt + response, in tokens",
    "kv_cache_mib:": "for what is sampled at the same time",
    "host_gib:": "as free -g shows it",
    "gpu_gib:": "as nvidia-smi shows it",
    "prompts_per_call:": "in one call to a replica",
}
"""Key at the start of a line -> a remark behind it, the first time."""
_WIDTH = 110
_KEYS = """
docs/configuration.md has the keys of each service's `args:`, of `orchestrator:` and of `security:`; all others are
Ray Serve's own."""


class _Dumper(yaml.SafeDumper):
    """Writes each value where it stands, without anchors."""

    def ignore_aliases(self, data: Any) -> bool:
        """True for all values."""
        return True


def render(path: Path) -> str:
    """The text of the whole file, below the comment that the file of facts begins with.

    Folders of models and data are not looked for unless a value depends on them: they may be on another machine.

    Raises:
        ConfigError: a fact is wrong, or the file is whole already.
    """
    raw = read_yaml(path)
    if not states_facts(raw, path):
        raise ConfigError(f"{path}: is a whole file already; give one that states facts")
    whole = derived(raw, path)
    lines = path.read_text(encoding="utf-8").splitlines()
    comment = itertools.takewhile(lambda line: line.startswith("#"), lines)
    own = "\n".join(line.removeprefix("#").removeprefix(" ") for line in comment)
    head = f"Rendered by `quartet render {shlex.quote(str(path))}`. Change the facts there and render them again."
    return _rendered(whole, f"{own}\n\n{head}{_KEYS}" if own else f"{head}{_KEYS}")


def _rendered(raw: Mapping[str, Any], head: str) -> str:
    """The file's text, with `head` as the comment above it."""
    parts = ["".join(f"# {line}".rstrip() + "\n" for line in head.splitlines())]
    for name, section in raw.items():
        if name != "applications":
            parts.append(_text({name: section}, in_lines=name == "grpc_options"))
            continue
        lines = "applications:\n"
        for application in section:
            lines += f"\n  # {_OF_SERVICES[application['name']]}\n" + indent(_text([application]), "  ")
        parts.append(lines)
    return _remarked("\n".join(parts))


def _text(value: Any, in_lines: bool = False) -> str:
    # None: a mapping or list of plain values only is written in one line; else each entry has its own.
    flow = False if in_lines else None
    text: str = yaml.dump(
        value, Dumper=_Dumper, default_flow_style=flow, sort_keys=False, allow_unicode=True, width=_WIDTH
    )
    return text


def _remarked(text: str) -> str:
    lines, told = [], set[str]()
    for line in text.splitlines():
        key = line.strip(" -").partition(" ")[0]
        # A value that goes on in the next line has a place for a remark as well.
        if (remark := _OF_KEYS.get(key)) and key not in told and not line.endswith(","):
            told.add(key)
            line = f"{line}  # {remark}"
        lines.append(line)
    return "\n".join(lines) + "\n"
