"""docs/configuration.md, made from the configuration's docstrings: `python -m tests.lint.configuration` writes it."""

import types
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from orchestrator.config.run import OrchestratorConfig
from orchestrator.deployment.applications import SERVICES
from orchestrator.deployment.facts.facts import Facts
from orchestrator.deployment.facts.scorers import ScorersFacts
from orchestrator.supervised.registry import TRAININGS
from quartet.config.base import Config
from quartet.config.explain import shown
from quartet.security.port import SecurityConfig

PAGE = Path(__file__).parents[2] / "docs/configuration.md"
INTRODUCTION = """\
# All keys

<!-- Made by `make configuration-page` from the docstrings of the configuration. Change those. -->

A run is described by one YAML file of either kind, and every command takes both:

- **A file of facts** states what a person decides, each once. Five facts are required: `name`, `model`, `reward`,
  `prompts` and `algorithm`. Everything else has a default that fits them. `quartet init` writes such a file. A file
  with `scorers` in their place serves these alone, without a run.
- **A whole file** holds Serve's own sections, one application for each service, and for a run `orchestrator:`.
  `quartet render FILE` prints the whole file that follows from facts, for `serve deploy` or to read. It is a file of
  this kind if it has `applications:`.

```yaml
name: mine
model: models/policy
reward: models/reward
prompts: prompts.jsonl
algorithm: {kind: ppo, learning_rate: 1.0e-6}
```

A derived key is set by hand below `services:` or `orchestrator:`, whose mappings are merged into what is derived:

```yaml
services:
  rollout: {num_replicas: 2, max_num_seqs: 64}            # an option of Serve's, and a key of the service's args
  reward: {ray_actor_options: {num_gpus: 0.5}}
orchestrator:
  loop: {max_staleness: 1}
```

Each fact is stated once: `orchestrator: {steps: 10}` is refused, since `steps` is a fact. Errors about derived keys
name the fact that they follow from. Text under `shared:` is ignored and may hold YAML anchors.

**Models and data of the Hugging Face hub.** `model`, `reward`, `critic` and `prompts` may be ORG/NAME@REVISION, such
as `Qwen/Qwen2.5-0.5B-Instruct@main`, and where several folders of a data set hold data `prompts` is
ORG/NAME@REVISION/FOLDER, such as `openai/gsm8k@main/main`. A folder of that name is taken first. Before anything
starts, the files are fetched once into Hugging Face's cache (`HF_HOME`), with progress, from huggingface.co or from
`HF_ENDPOINT`.
`mine.lock` beside `mine.yaml` then holds the commit and the SHA-256 of each file; keep it with the file. Later starts
ask for nothing that is there, compare all of it, and end with an error if a file differs: remove that file to fetch
it again, or its entry in the lock to take what the hub has now. Only safetensors, JSON and tokenizers' texts are
fetched, of data sets JSON and Parquet; a model that has its weights in pickle alone is refused. On a cluster each
node needs the files, so give it a folder that all nodes see as `HF_HOME`, or as `model`.
"""
PARTS: tuple[tuple[str, str, type[BaseModel]], ...] = (
    ("Facts", "", Facts),
    ("Facts of scorers alone", "", ScorersFacts),
    ("Orchestrator", "orchestrator", OrchestratorConfig),
    *((f"Service {name}", f"services.{name}", service.config) for name, service in SERVICES.items()),
    ("Security", "security", SecurityConfig),
    *((f"File of `quartet {name}`", name, training) for name, training in TRAININGS.items()),
)
"""Title, place in a file of facts, and section. In a whole file a service's keys are its application's `args:`; a
training's are at the top of its own file."""


def page() -> str:
    """The page's text."""
    told: dict[type[BaseModel], str] = {}
    rows: dict[str, tuple[str, str]] = {}
    lines = [INTRODUCTION]
    for title, place, section in PARTS:
        lines.append(f"\n## {title}\n")
        lines += _section(section, place, told, rows)
    return "\n".join(lines).rstrip() + "\n"


def _section(
    section: type[BaseModel], place: str, told: dict[type[BaseModel], str], rows: dict[str, tuple[str, str]]
) -> Iterator[str]:
    """A section's table and those of the sections in it, each told once; and of several kinds of a section the keys
    that mean the same in another, and those that it only fills in. `rows` holds what was told: a key's place and
    meaning, of which kind it was, and its value."""
    told[section] = place
    shared: dict[str, list[str]] = {}
    further: dict[str, list[str]] = {}
    filled: list[str] = []
    yield f"{' '.join((section.__doc__ or '').split())}\n"
    yield "| key | value | meaning |\n|---|---|---|"
    inner: list[tuple[type[BaseModel], str]] = []
    for name, field in section.model_fields.items():
        if (known := _told_before(section, name, told)) and not field.is_required():
            further.setdefault(known, []).append(f"`{name}`")
            continue
        meaning = " ".join((field.description or "").split())
        nested = list(_sections(field.annotation))
        new = [each for each in nested if each not in told]
        if nested and not new:
            meaning += f" Its keys are those of `{told[nested[0]]}`."
        inner += [(each, f"{place}.{name}".lstrip(".")) for each in new]
        told |= {each: f"{place}.{name}".lstrip(".") for each in new}
        value = _value(field, bool(nested))
        # A section in a key is not told twice, which is no difference between kinds.
        told_before, default = rows.setdefault(f"{place} {name} {field.description}", (_kind(section), value))
        if _kind(section) and told_before != _kind(section) and value == default:
            shared.setdefault(told_before, []).append(f"`{name}`")
            continue
        if _kind(section) and told_before != _kind(section) and not field.is_required():
            filled.append(f"`{name}` {_default(field.default)}")
            continue
        yield f"| `{name}` | {value} | {meaning.replace('|', chr(92) + '|')} |"
    for other, names in further.items():
        yield f"\nAs in `{other}`: {', '.join(names)}."
    for kind, names in shared.items():
        whole = len(names) + len(filled) + 1 == len(section.model_fields)
        yield f"\nAs{kind}: {'all others' if whole else ', '.join(names)}."
    if filled:
        yield f"\nFilled in: {', '.join(filled)}."
    for each, where in inner:
        yield f"\n### `{where}`{_kind(each)}\n"
        yield from _section(each, where, told, rows)


def _told_before(section: type[BaseModel], name: str, told: dict[type[BaseModel], str]) -> str:
    """The place of another section in which the same field was told, as both have it of one base; else empty."""
    bases = [base for base in section.__mro__ if base not in (Config, BaseModel) and issubclass(base, BaseModel)]
    for other, place in told.items():
        common = [base for base in bases if issubclass(other, base) and name in base.model_fields]
        if place != told[section] and common and _same(other.model_fields[name], section.model_fields[name]):
            return place
    return ""


def _same(one: FieldInfo, other: FieldInfo) -> bool:
    parts = [(field.description, field.annotation, field.default) for field in (one, other)]
    return parts[0] == parts[1]


def _kind(section: type[BaseModel]) -> str:
    """The words for one of several kinds of a section."""
    kind = section.model_fields.get("kind")
    choices = get_args(kind.annotation) if kind and get_origin(kind.annotation) is Literal else ()
    return f" of kind {choices[0]}" if len(choices) == 1 else ""


def _value(field: FieldInfo, nested: bool) -> str:
    """The kind of value, and the default."""
    if field.is_required():
        return "required" if nested else f"{_words(field.annotation)}, required"
    default = field.get_default(call_default_factory=True)
    if nested and (isinstance(default, BaseModel) or default is PydanticUndefined):
        return "section"
    return f"{_words(field.annotation)}; {_default(default)}"


def _default(value: Any) -> str:
    if isinstance(value, tuple | list):
        return f"[{', '.join(map(str, value))}]"
    return f"{value:g}" if isinstance(value, float) else shown(value).strip("'")


def _words(kind: Any) -> str:
    """The type in words."""
    origin = get_origin(kind)
    if origin is Annotated:
        return _words(get_args(kind)[0])
    if origin is Literal:
        return ", ".join(str(choice) for choice in get_args(kind))
    if origin in (Union, types.UnionType):
        return " or ".join(dict.fromkeys(_words(choice) for choice in get_args(kind)))
    if origin in (tuple, list):
        return "list"
    names = {bool: "true or false", int: "whole number", float: "number", str: "text", types.NoneType: "null"}
    return names.get(kind, "mapping")


def _sections(kind: Any) -> Iterator[type[BaseModel]]:
    """The sections that a type holds."""
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        yield kind
    for argument in get_args(kind):
        yield from _sections(argument)


if __name__ == "__main__":
    PAGE.write_text(page())
