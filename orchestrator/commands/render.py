"""`quartet render`: the whole file that a file of facts stands for."""

import itertools
from pathlib import Path

from orchestrator.deployment.facts.read import derived, states_facts
from orchestrator.deployment.facts.render import rendered
from quartet.config.base import ConfigError, read_yaml

_KEYS = """
docs/configuration.md has the keys of each service's `args:`, of `orchestrator:` and of `security:`; all others are
Ray Serve's own."""


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
    own = "\n".join(line.removeprefix("#").removeprefix(" ") for line in itertools.takewhile(_is_comment, lines))
    head = f"Rendered by `quartet render {path}`. Change the facts there and render them again."
    return rendered(whole, f"{own}\n\n{head}{_KEYS}" if own else f"{head}{_KEYS}")


def _is_comment(line: str) -> bool:
    return line.startswith("#")
