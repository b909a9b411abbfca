"""docs/configuration.md, made from the configuration's docstrings: `python -m tests.lint.configuration` writes it."""

import re
import types
from collections.abc import Iterator
from dataclasses import dataclass, field
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
from quartet.security.port import Port

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

Defaults in the tables below are those of a whole file. Beside what the facts' own tables say, a file of facts derives
these otherwise, and `quartet render` prints what came out:

| derived key | value |
|---|---|
| `algorithm.normalise_scores` | true, unless the reward model brings a mean \
and deviation of its own or only responses to the same prompt are compared |
| `algorithm.old_logprobs` | rollout in float32, unless \
`loop.max_staleness`, `correction`, `importance_cap` or `importance_band` is given |
| `algorithm.minibatch_size` | a quarter of `batch_size` |
| `orchestrator.evaluation.max_prompts` | 256, if `prompts.eval_split` is given |
| `orchestrator.prompts_per_call` | `batch_size`, 64 at most |
| policy's and critic's `zero_stage` | 1 in bfloat16, 3 with several ranks |
| policy's and critic's `gradient_checkpointing` | auto with GPUs |
| policy's and critic's `micro_batch_tokens`, the reward model's and the reference's `batch_tokens` \
| the fact `batch_tokens`; where it is not given, on a CPU 2048 at most for the latter two |
| `services.rollout.max_length` | the longest prompt and all that may follow it |
| `services.rollout.max_num_seqs` | `batch_size`, 256 at most |
| `services.rollout.kv_cache_mib` | what a whole batch needs, an eighth of the memory at most; \
null with a GPU of its own |
| `num_replicas`, `ranks`, `num_cpus`, `num_gpus`, `env_vars` | by `machine`; [placement](placement.md) |

**Models and data of the Hugging Face hub.** `model`, `reward`, `critic` and `prompts` may be ORG/NAME@REVISION, such
as `Qwen/Qwen2.5-0.5B-Instruct@main`, and where several folders of a data set hold data `prompts` is
ORG/NAME@REVISION/FOLDER, such as `openai/gsm8k@main/main`. A folder of that name is taken first. Before anything
starts, the files are fetched once into Hugging Face's cache (`HF_HOME`), with progress, from huggingface.co or from
`HF_ENDPOINT`. What is private, or has a licence to accept, needs an account's token there: `hf auth login` once, or
`HF_TOKEN` in the command's environment.
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
    ("Security", "security", Port),
    *((f"File of `quartet {name}`", name, training) for name, training in TRAININGS.items()),
)
"""Title, place in a file of facts, and section. In a whole file a service's keys are its application's `args:`; a
training's are at the top of its own file."""


def page() -> str:
    """The page's text."""
    told = _Told()
    lines = [INTRODUCTION]
    for title, place, section in PARTS:
        lines.append(f"\n## {title}\n")
        lines += _section(section, place, told)
    return "\n".join(lines).rstrip() + "\n"


@dataclass(slots=True)
class _Told:
    """The sections and keys that the page has so far."""

    places: dict[type[BaseModel], str] = field(default_factory=dict)
    """Section -> its place, also of those whose table is still to come."""
    printed: list[type[BaseModel]] = field(default_factory=list)
    """Sections whose table is there or has begun."""
    rows: dict[str, tuple[str, str, FieldInfo]] = field(default_factory=dict)
    """A key's place and meaning -> of which kind of a section it was, its value, and the field."""


def _section(section: type[BaseModel], place: str, told: _Told) -> Iterator[str]:
    """A section's table and those of the sections in it, each told once; and of several kinds of a section the keys
    that mean the same in another, and those that it only fills in."""
    told.places[section] = place
    told.printed.append(section)
    shared: dict[str, list[str]] = {}
    further: dict[str, list[str]] = {}
    filled: list[str] = []
    table: list[str] = []
    inner: list[tuple[type[BaseModel], str]] = []
    for name, known in section.model_fields.items():
        if (other := _told_before(section, name, told)) and not known.is_required():
            further.setdefault(other, []).append(f"`{name}`")
            continue
        meaning = " ".join((known.description or "").split())
        nested = list(_sections(known.annotation))
        new = [each for each in nested if each not in told.places]
        if nested and not new:
            meaning += f" Its keys are those of `{told.places[nested[0]]}`."
        inner += [(each, f"{place}.{name}".lstrip(".")) for each in new]
        told.places |= {each: f"{place}.{name}".lstrip(".") for each in new}
        value = _value(known, bool(nested))
        # A section in a key is not told twice, which is no difference between kinds.
        told_before, default, same = told.rows.setdefault(
            f"{place} {name} {known.description}", (_kind(section), value, known)
        )
        if _kind(section) and told_before != _kind(section):
            if differing := _differing(known, same):
                filled += [f"`{name}.{key}` {_default(value)}" for key, value in differing.items()]
                continue
            if value == default:
                shared.setdefault(told_before, []).append(f"`{name}`")
                continue
            if not known.is_required():
                filled.append(f"`{name}` {_default(known.default)}")
                continue
        if differing := _differing(known):
            values = ", ".join(f"`{key}` {_default(value)}" for key, value in differing.items())
            meaning += f" Other defaults here: {values}."
        table.append(f"| `{name}` | {_cell(value)} | {_cell(meaning)} |")
    yield f"{' '.join((section.__doc__ or '').split())}\n"
    if table:
        yield "| key | value | meaning |\n|---|---|---|"
    yield from table
    notes = [f"As in `{other}`: {', '.join(names)}." for other, names in further.items()]
    for kind, names in shared.items():
        # A kind with a row of its own for nothing but the kind differs by what it fills in.
        notes.append(f"As{kind}: {', '.join(names) if table[1:] else 'all others'}.")
    notes += [f"Filled in: {', '.join(filled)}."] if filled else []
    yield from (f"\n{note}" if table or number else note for number, note in enumerate(notes))
    for each, where in inner:
        yield f"\n### `{where}`{_kind(each)}\n"
        yield from _section(each, where, told)


def _told_before(section: type[BaseModel], name: str, told: _Told) -> str:
    """The place of another section in which the same field was told, as both have it of one base; else empty."""
    bases = [base for base in section.__mro__ if base not in (Config, BaseModel) and issubclass(base, BaseModel)]
    for other in told.printed:
        place = told.places[other]
        common = [base for base in bases if issubclass(other, base) and name in base.model_fields]
        if place != told.places[section] and common and _same(other.model_fields[name], section.model_fields[name]):
            return place
    return ""


def _differing(known: FieldInfo, other: FieldInfo | None = None) -> dict[str, Any]:
    """The keys of a section in a key whose defaults are others here than there, or than the section's own."""
    here, there = known.default, None if other is None else other.default
    if not isinstance(here, BaseModel) or (other is not None and type(here) is not type(there)):
        return {}
    fields = type(here).model_fields
    return {
        name: value
        for name, value in here
        if value != (fields[name].get_default(call_default_factory=True) if there is None else getattr(there, name))
    }


def _same(one: FieldInfo, other: FieldInfo) -> bool:
    parts = [(each.description, each.annotation, each.default) for each in (one, other)]
    return parts[0] == parts[1]


def _kind(section: type[BaseModel]) -> str:
    """The words for one of several kinds of a section."""
    kind = section.model_fields.get("kind")
    choices = get_args(kind.annotation) if kind and get_origin(kind.annotation) is Literal else ()
    return f" of kind {choices[0]}" if len(choices) == 1 else ""


def _value(known: FieldInfo, nested: bool) -> str:
    """The kind of value, and the default."""
    if known.is_required():
        return "required" if nested else f"{_words(known.annotation)}, required"
    default = known.get_default(call_default_factory=True)
    if nested and (isinstance(default, BaseModel) or default is PydanticUndefined):
        return "section"
    return f"{_words(known.annotation)}; {_default(default)}"


def _default(value: Any) -> str:
    if isinstance(value, tuple | list):
        return f"[{', '.join(map(str, value))}]"
    if isinstance(value, str):
        return "empty" if not value else _literal(value) if re.search(r"[\\`*]", value) else value
    return f"{value:g}" if isinstance(value, float) else shown(value)


def _literal(text: str) -> str:
    """The text as Markdown's code, between more backquotes than stand in it."""
    fence = "`" * (max(map(len, re.findall("`+", text)), default=0) + 1)
    return f"{fence} {text} {fence}" if "`" in text else f"`{text}`"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _words(kind: Any) -> str:
    """The type in words."""
    origin = get_origin(kind)
    if origin is Annotated:
        return _words(get_args(kind)[0])
    if origin is Literal:
        return ", ".join(str(choice) or "empty" for choice in get_args(kind))
    if origin in (Union, types.UnionType):
        return " or ".join(dict.fromkeys(_words(choice) for choice in get_args(kind)))
    if origin in (tuple, list):
        return "list"
    names = {bool: "true or false", int: "whole number", float: "number", types.NoneType: "null"}
    names |= dict.fromkeys((str, Path), "text")
    return names.get(kind, "mapping")


def _sections(kind: Any) -> Iterator[type[BaseModel]]:
    """The sections that a type holds."""
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        yield kind
    for argument in get_args(kind):
        yield from _sections(argument)


if __name__ == "__main__":
    PAGE.write_text(page())
