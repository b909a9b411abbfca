"""Writes a new file, after a check that it works."""

import re
import tempfile
from dataclasses import dataclass
from pathlib import Path
from string import Template

from orchestrator.commands.checks.preflight import preflight
from orchestrator.commands.init.choices import Choices, values
from orchestrator.commands.init.machine import Machine
from orchestrator.commands.init.model import Model
from orchestrator.commands.init.prompts import look_at
from orchestrator.deployment.file import Deployment
from quartet.config.base import ConfigError
from quartet.config.functions import load_function
from quartet.folders import write
from quartet.models.loading import load_tokenizer
from quartet.wire.identity import tokenizer_hash

TEMPLATE = Path(__file__).with_name("template.yaml")
_FUNCTION = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")


@dataclass(frozen=True, slots=True)
class Wanted:
    """Arguments of `quartet init`, named like its flags."""

    policy: str
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
    text = compose(file, wanted, machine)
    with tempfile.TemporaryDirectory() as folder:
        tried = Path(folder) / file.name
        tried.write_text(text, encoding="utf-8")
        notes = preflight(Deployment.load(tried, check_services=True)).notes
    try:
        write(file, text)
    except OSError as error:
        raise ConfigError(f"{file}: cannot be written: {error.strerror}") from None
    return notes


def compose(file: Path, wanted: Wanted, machine: Machine) -> str:
    """The file's text. ConfigError if a flag is wrong."""
    policy = Model.at(wanted.policy, "--policy")
    try:
        tokenizer = load_tokenizer(wanted.policy)
    except ConfigError as error:
        raise ConfigError(f"--policy: {error}") from None
    reward = _reward_model(wanted.reward, tokenizer_hash(tokenizer))
    prompts = look_at(wanted.prompts, tokenizer, wanted.input_key, wanted.label_key)
    function = None if reward else wanted.reward
    choices = Choices(policy, reward, function, prompts, machine, wanted.max_new_tokens)
    name = re.sub(r"[^\w.-]", "-", file.stem, flags=re.ASCII).lstrip("_.-") or "run"
    template = Template(TEMPLATE.read_text(encoding="utf-8"))
    return template.substitute(values(choices) | {"file": str(file), "name": name})


def _reward_model(reward: str, expected: str) -> Model | None:
    """The model that scores; None if a function does."""
    if not Path(reward).is_dir():
        if not _FUNCTION.fullmatch(reward):
            raise ConfigError(
                f"--reward: should be a model's folder, but {reward} does not exist; or a function as "
                "package.module:name, such as my_reward:score"
            )
        load_function(reward, "--reward")
        return None
    model = Model.at(reward, "--reward")
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
