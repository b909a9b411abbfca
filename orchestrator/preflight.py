"""What can be found wrong with a run before anything is started or asked; `quartet check` and `train` share it."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from transformers import AutoConfig

from orchestrator.config import OrchestratorConfig
from orchestrator.data import Prompt, PromptSet, check_disjoint, load_prompts
from orchestrator.deployment import Deployment
from orchestrator.evaluation import Judge
from services.common.config import ConfigError
from services.common.functions import load_function
from services.common.identity import tokenizer_hash
from services.common.models import load_tokenizer
from services.critic.config import CriticConfig
from services.reference.config import ReferenceConfig
from services.reward.config import (
    BlendScorerConfig,
    FunctionScorerConfig,
    ModelScorerConfig,
    RewardConfig,
    ScorerConfig,
)
from services.rollout.config import RolloutConfig

Result = TypeVar("Result")
_POLICY = "orchestrator.policy.model"
_ELSEWHERE = {"working_dir", "py_modules", "pip", "uv", "conda", "container", "image_uri"}
"""Keys of a runtime environment that brings modules of its own."""


@dataclass(frozen=True, slots=True)
class Inputs:
    """All that a run reads before it starts anything."""

    tokenizer: Any
    train: PromptSet
    held_out: PromptSet | None
    """None when evaluation is off."""
    judges: dict[str, Judge]

    @property
    def notes(self) -> list[str]:
        """What a user should know of them, though none of it is an error."""
        sets = [self.train, *([self.held_out] if self.held_out else [])]
        return [
            f"{part.too_long} of {part.too_long + len(part.prompts)} prompts of {part.name} are longer than "
            "data.max_prompt_length and left out"
            for part in sets
            if part.too_long
        ]


def preflight(deployment: Deployment) -> Inputs:
    """Reads what the run needs, and compares the sections with each other and with the models on this machine.

    Services whose models are on another machine are left to the check of what they say of themselves.

    Raises:
        ConfigError: everything that is wrong, a line each.
    """
    config, problems = deployment.orchestrator, _Problems()
    problems.lines += _disagreements(deployment)
    judges = problems.among(load_judges, config)
    problems.lines += _missing_functions(deployment)
    tokenizer = problems.among(load_tokenizer, config.policy.model, before=f"{_POLICY}: ")
    train = held_out = None
    if tokenizer is not None:
        problems.lines += _other_tokenizers(deployment, tokenizer)
        train = problems.among(_prompts, config, tokenizer, config.data.prompt_split)
        if config.evaluation.every:
            held_out = problems.among(_prompts, config, tokenizer, config.data.eval_split)
    if train and held_out:
        problems.among(check_disjoint, train, held_out)
    if problems.lines or train is None or judges is None:
        raise ConfigError("\n".join(dict.fromkeys(problems.lines)))
    return Inputs(tokenizer, train, held_out, judges)


def load_judges(config: OrchestratorConfig) -> dict[str, Judge]:
    """The evaluation's judges by name. ConfigError if one cannot be imported."""
    where = "orchestrator.evaluation.judges"
    return {name: load_function(path, f"{where}.{name}") for name, path in config.evaluation.judges.items()}


def evaluation_prompts(held_out: PromptSet, config: OrchestratorConfig) -> list[Prompt]:
    """Those of the held-out prompts that are used."""
    return list(held_out.prompts[: config.evaluation.max_prompts])


class _Problems:
    """Collects what is wrong, so that all of it is told at once."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def among(self, function: Callable[..., Result], *arguments: Any, before: str = "") -> Result | None:
        """The function's result; None once its ConfigError is noted."""
        try:
            return function(*arguments)
        except ConfigError as error:
            self.lines.append(f"{before}{error}")
            return None


def _prompts(config: OrchestratorConfig, tokenizer: Any, split: str) -> PromptSet:
    return load_prompts(config.data, tokenizer, split, vocab_size=len(tokenizer))


def _disagreements(deployment: Deployment) -> Iterator[str]:
    """What two sections of the file say differently, and lengths that do not fit."""
    config, services = deployment.orchestrator, deployment.services
    needed = config.data.max_prompt_length + config.sampling.max_new_tokens
    sum_of = f"orchestrator.data.max_prompt_length + orchestrator.sampling.max_new_tokens is {needed}"
    for name, section in services.items():
        if isinstance(section, RolloutConfig | RewardConfig) and section.max_length < needed:
            yield f"applications.{name}.args.max_length: {section.max_length}, but {sum_of}"
        if isinstance(section, RolloutConfig) and section.dtype != config.policy.dtype:
            yield (
                f"applications.{name}.args.dtype: {section.dtype}, but orchestrator.policy.dtype is "
                f"{config.policy.dtype}; weights are pushed as they are, so both must be the same"
            )
        if isinstance(section, RolloutConfig):
            yield from _other_backend(config.weights.backend, section.weight_backend, name)
            yield from _too_long_for_model(section, name)
    for field, path in _models(deployment):
        model = _load_config(path)
        if model is None:
            yield f"{field}: {path} holds no config.json of a model that transformers knows"
        elif _limit(model) < needed:
            yield f"{field}: {path} takes {_limit(model)} tokens (its max_position_embeddings), but {sum_of}"


def _other_backend(ours: str, theirs: str, name: str) -> Iterator[str]:
    if "auto" not in (ours, theirs) and ours != theirs:
        yield (
            f"orchestrator.weights.backend: {ours}, but applications.{name}.args.weight_backend is {theirs}; "
            "set both the same, or one to auto"
        )


def _too_long_for_model(section: RolloutConfig, name: str) -> Iterator[str]:
    """vLLM does not start with more than the model's positions, unless those are stretched by RoPE scaling."""
    model = _load_config(section.model)
    rope = getattr(model, "rope_parameters", None) or {}
    if model is not None and rope.get("rope_type", "default") == "default" and section.max_length > _limit(model):
        yield (
            f"applications.{name}.args.max_length: {section.max_length}, but {section.model} takes "
            f"{_limit(model)} tokens (its max_position_embeddings)"
        )


def _other_tokenizers(deployment: Deployment, tokenizer: Any) -> Iterator[str]:
    """Models whose token ids mean something else than the policy's."""
    expected = tokenizer_hash(tokenizer)
    for field, path in (*_models(deployment), *_tokenizers(deployment)):
        try:
            found = tokenizer_hash(load_tokenizer(path))
        except ConfigError as error:
            yield f"{field}: {error}"
            continue
        if found != expected:
            yield (
                f"{field}: the tokenizer of {path} is not that of {_POLICY} "
                f"({deployment.orchestrator.policy.model}), so its token ids mean something else"
            )


def _missing_functions(deployment: Deployment) -> Iterator[str]:
    """Functions that score and cannot be imported here, unless the service has an environment of its own."""
    for application in deployment.raw.get("applications") or []:
        name = str(application.get("name"))
        section = deployment.services.get(name)
        if not isinstance(section, RewardConfig) or _is_elsewhere(application.get("runtime_env")):
            continue
        for field, scorer in _scorers(section.scorer, f"applications.{name}.args.scorer"):
            if isinstance(scorer, FunctionScorerConfig):
                try:
                    load_function(scorer.function, f"{field}.function")
                except ConfigError as error:
                    yield str(error)


def _is_elsewhere(runtime_env: Any) -> bool:
    """Modules may be found in this runtime environment that are not found here."""
    if not isinstance(runtime_env, Mapping):
        return runtime_env is not None
    variables = runtime_env.get("env_vars")
    return bool(_ELSEWHERE & runtime_env.keys()) or (isinstance(variables, Mapping) and "PYTHONPATH" in variables)


def _models(deployment: Deployment) -> Iterator[tuple[str, str]]:
    """Every model of the file that reads or writes tokens: its field and its folder."""
    yield _POLICY, deployment.orchestrator.policy.model
    for name, section in deployment.services.items():
        where = f"applications.{name}.args"
        if isinstance(section, RolloutConfig | ReferenceConfig | CriticConfig):
            yield f"{where}.model", section.model
        elif isinstance(section, RewardConfig):
            for field, scorer in _scorers(section.scorer, f"{where}.scorer"):
                if isinstance(scorer, ModelScorerConfig):
                    yield f"{field}.model", scorer.model


def _tokenizers(deployment: Deployment) -> Iterator[tuple[str, str]]:
    """Folders of which nothing but the tokenizer is used."""
    for name, section in deployment.services.items():
        if isinstance(section, RewardConfig):
            yield f"applications.{name}.args.tokenizer", section.tokenizer


def _scorers(scorer: ScorerConfig, where: str) -> Iterator[tuple[str, ScorerConfig]]:
    """The scorer or, of a blend, those that it is made of, each with its field."""
    if isinstance(scorer, BlendScorerConfig):
        for index, part in enumerate(scorer.parts):
            yield from _scorers(part.scorer, f"{where}.parts.{index}.scorer")
    else:
        yield where, scorer


def _load_config(path: str) -> Any:
    """The model's config.json as transformers reads it; None where there is no such model."""
    try:
        return AutoConfig.from_pretrained(path)
    except (OSError, ValueError):
        return None


def _limit(model: Any) -> int:
    """Longest sequence that the model takes, in tokens."""
    return int(getattr(model, "max_position_embeddings", 1 << 30))
