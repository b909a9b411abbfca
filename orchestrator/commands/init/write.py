"""Writes a new file, after a check that it works."""

import math
import re
import shlex
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from shutil import copyfile
from typing import Any

import yaml

from orchestrator.commands.checks.preflight import preflight
from orchestrator.commands.checks.startable import sums_of
from orchestrator.commands.init.choices import Choices
from orchestrator.commands.init.machine import Machine
from orchestrator.commands.init.prompts import look_at
from orchestrator.deployment.facts.derive import FUNCTION, TARGET
from orchestrator.deployment.facts.facts import Facts
from orchestrator.deployment.facts.hub import Pinned
from orchestrator.deployment.facts.model import ModelOnDisk
from orchestrator.deployment.facts.read import derived
from orchestrator.deployment.file import Deployment
from quartet.config.base import ConfigError
from quartet.config.functions import load_function
from quartet.folders import write
from quartet.models.loading import load_tokenizer
from quartet.wire.identity import tokenizer_hash


@dataclass(frozen=True, slots=True)
class Wanted:
    """Arguments of `quartet init`, named like its flags."""

    model: str
    reward: str
    prompts: str
    input_key: str | None = None
    label_key: str | None = None
    max_new_tokens: int | None = None


def init(file: Path, wanted: Wanted, machine: Machine, *, overwrite: bool = False) -> list[str]:
    """Writes the file; returns remarks on it for the user.

    Raises:
        ConfigError: a flag is wrong, the file exists and may not be overwritten, or `quartet check` would refuse it.
    """
    if file.exists() and not overwrite:
        raise ConfigError(f"{file} exists; give --overwrite to replace it, or another name")
    if file.suffix not in (".yaml", ".yml"):
        raise ConfigError(f"{file}: should end in .yaml")
    choices, notes = chosen(file, wanted, machine), list[str]()
    text = compose(file, wanted, choices)
    with tempfile.TemporaryDirectory() as folder:
        tried = Path(folder) / file.name
        if (lock := Pinned.beside(file).lock).exists():
            copyfile(lock, Pinned.beside(tried).lock)
        deployment = _loaded(tried, text)
        if problem := _shortage(deployment):
            notes.append(f"{problem}; so adapters are trained (lora) in place of all weights")
            text = compose(file, wanted, replace(choices, adapters=True))
            deployment = _loaded(tried, text)
        notes += map(deployment.worded, preflight(deployment).notes)
    try:
        write(file, text)
    except OSError as error:
        raise ConfigError(f"{file}: cannot be written: {error.strerror}") from None
    return notes


def _loaded(file: Path, text: str) -> Deployment:
    file.write_text(text, encoding="utf-8")
    return Deployment.load(file, check_services=True)


def _shortage(deployment: Deployment) -> str | None:
    """The first part of the memory that is too small for the run; None if all fits, or its folders tell nothing."""
    try:
        return next(map(deployment.worded, sums_of(deployment).problems()), None)
    except ConfigError:
        return None  # reported by the checks


def chosen(file: Path, wanted: Wanted, machine: Machine) -> Choices:
    """Reads models and prompts. ConfigError if a flag is wrong."""
    pinned = Pinned.beside(file)
    policy = ModelOnDisk.at(pinned.place(wanted.model, "model", "--model"), "--model")
    try:
        tokenizer = load_tokenizer(policy.folder)
    except ConfigError as error:
        raise ConfigError(f"--model: {error}") from None
    place = pinned.place(wanted.reward, "model", "--reward")
    reward = _reward_model(place, tokenizer_hash(tokenizer))
    data = pinned.place(wanted.prompts, "dataset", "--prompts")
    prompts = look_at(data, tokenizer, wanted.input_key, wanted.label_key)
    return Choices(policy, reward, prompts, machine, wanted.max_new_tokens)


def compose(file: Path, wanted: Wanted, choices: Choices) -> str:
    """The file's text. ConfigError if the models lack room for responses."""
    name = re.sub(r"[^\w.-]", "-", file.stem, flags=re.ASCII).lstrip("_.-") or "run"
    facts = choices.facts(name, wanted.model, wanted.reward, wanted.prompts)
    return _text(file, facts, derived(facts, file), choices.policy.size)


def _text(file: Path, facts: Mapping[str, Any], whole: Mapping[str, Any], size: str) -> str:
    """The facts, a line each, and below them the rest as comments, each with what it is here."""
    name, unstated = shlex.quote(str(file)), _unstated(whole)
    lines = [
        f"# Written by `quartet init` for a model of {size} parameters. How to use it:",
        f"#   quartet check {name} && quartet up {name} && quartet train {name} && quartet down",
        f"# `quartet render {name}` prints the whole file that follows from these facts.",
        "",
        *(f"{name}: {_yaml(value)}" for name, value in facts.items()),
        "",
        "# The rest is derived; a line without its # changes it:",
    ]
    for name, field in Facts.model_fields.items():
        if name not in facts:
            first = re.split(r"(?<=[\w)`])[.;:](?=\s|$)", (field.description or "").replace("\n", " "))[0]
            value = unstated.get(name, field.get_default(call_default_factory=True))
            lines.append(f"# {name}: {_yaml(value)}  # {first}")
    return "\n".join(lines) + "\n"


def _unstated(whole: Mapping[str, Any]) -> dict[str, Any]:
    """Fact -> what it is in the whole file where it is not stated, or an example of what it may be; not those that
    have their default then."""
    args = {application["name"]: application["args"] for application in whole["applications"]}
    policy = whole["orchestrator"]["policy"]
    return {
        "critic": args["critic"]["model"],
        "max_new_tokens": whole["orchestrator"]["sampling"]["max_new_tokens"],
        "dtype": policy["dtype"],
        "packing": policy["packing"],
        "batch_tokens": policy["micro_batch_tokens"],
        "services": {"rollout": {"num_replicas": 2}},
        "orchestrator": {"loop": {"max_staleness": 1}},
    }


def _yaml(value: Any) -> str:
    """The value as YAML in one line."""
    line = yaml.safe_dump(value, default_flow_style=True, width=math.inf, allow_unicode=True, sort_keys=False)
    return line.removesuffix("...\n").strip()


def _reward_model(reward: str, expected: str) -> ModelOnDisk | None:
    """The model that scores; None if a function or another service does."""
    if TARGET.fullmatch(reward):
        return None
    if not Path(reward).is_dir() and FUNCTION.fullmatch(reward):
        load_function(reward, "--reward", asynchronous=True)
        return None
    model = ModelOnDisk.at(reward, "--reward")
    if model.config.num_labels != 1:
        raise ConfigError(
            f"--reward: {reward} gives {model.config.num_labels} numbers to a text; it should be a sequence "
            "classifier with num_labels 1"
        )
    try:
        actual = tokenizer_hash(load_tokenizer(reward))
    except ConfigError as error:
        raise ConfigError(f"--reward: {error}") from None
    if actual != expected:
        raise ConfigError(
            f"--reward: the tokenizer of {reward} is not the policy's, so its token ids mean something else; "
            "choose a reward model that shares it, or a function, which is given texts"
        )
    return model
