"""Checks of a run before anything is started or called; `quartet check` and `train` share them."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from orchestrator.clients import unlike_dtypes
from orchestrator.commands.checks.agents import agent_of, door_of_agents, without_template
from orchestrator.commands.checks.architectures import untested
from orchestrator.commands.checks.fitting import (
    ends_without_token,
    idle_critics,
    misfits_of_critic,
    misfits_of_reward,
    misfits_of_rollout,
    old_tokens,
    open_pushes,
    other_critics,
    rests,
    rounded_adapters,
    rounded_ratios,
    schedules,
    wrong_backend,
    wrong_folders,
)
from orchestrator.commands.checks.models import (
    POLICY_FIELD,
    load_model_config,
    models_of_run,
    other_tokenizers,
    scorers_asked,
)
from orchestrator.commands.checks.startable import decided_here, sums_of, unfit_learner, unstartable
from orchestrator.config.data import EVAL
from orchestrator.config.run import OrchestratorConfig
from orchestrator.data.prompts import Prompt, PromptSet, check_disjoint, load_prompts
from orchestrator.data.tables import split_names
from orchestrator.deployment.file import Deployment, ServicesFile
from orchestrator.deployment.recomputation import choices
from orchestrator.environments.agent import Agent
from orchestrator.environments.contract import Environment, Schema, load_environment
from orchestrator.evaluation.judges import Judge
from orchestrator.experience.calls import form_of
from orchestrator.policy.sampled import sampled_from
from quartet.config.base import Config, ConfigError
from quartet.config.functions import load_function
from quartet.models.distribution import Distribution
from quartet.models.loading import load_tokenizer, max_length
from quartet.wire.identity import vocabulary_size
from services.critic.config import CriticConfig
from services.reference.config import ReferenceConfig
from services.reward.config import RewardConfig, field_of
from services.rollout.config import DEFAULT_LENGTH, RolloutConfig

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Inputs:
    """Everything that a run reads before it starts anything."""

    tokenizer: Any
    train: PromptSet
    held_out: PromptSet | None
    """Held-out prompts; None if evaluation is off."""
    judges: dict[str, Judge]
    distribution: Distribution
    """Distribution that responses are sampled from."""
    environment: Environment | None = None
    """The environment that answers responses; None if the run has none."""
    agent: Agent | None = None
    """The agent that has the conversations; None if the run has none."""
    remarks: tuple[str, ...] = ()
    """Remarks on the configuration."""

    @property
    def notes(self) -> list[str]:
        """Remarks for the user that are not errors, in the words of the whole file."""
        sets = [self.train, *([self.held_out] if self.held_out else [])]
        return [*self.remarks] + [
            f"{part.too_long} of {part.too_long + len(part.prompts)} prompts of {part.name} are longer than "
            "data.max_prompt_length and left out"
            for part in sets
            if part.too_long
        ]


def checked(written: ServicesFile) -> tuple[ServicesFile, Sequence[str]]:
    """The file with what it leaves to the sums of memory decided, and remarks for the user: all that `quartet check`
    finds without the machine. ConfigError has a line for each error."""
    if not isinstance(written, Deployment):
        if problems := list(dict.fromkeys(unstartable(written))):
            raise ConfigError("\n".join(problems))
        return written, [*untested(written), f"services alone, without a run: {', '.join(written.applications)}"]
    deployment = decided_here(written)
    notes = preflight(deployment).notes
    filled_in = f"orchestrator.algorithm: {deployment.orchestrator.algorithm.filled_in()}"
    return deployment, [*sums_of(deployment).lines(), *choices(written, deployment), filled_in, *notes]


def preflight(deployment: Deployment) -> Inputs:
    """Reads the run's inputs, and compares the sections with each other and with the models on this machine.

    Services whose models are on another machine are checked later, by their Info.

    Raises:
        ConfigError: one line for each error.
    """
    with deployment.naming():
        return _inputs(deployment)


def _inputs(deployment: Deployment) -> Inputs:
    config, problems = deployment.orchestrator, _Problems()
    problems.lines += _disagreements(deployment)
    judges = problems.among(load_judges, config)
    environment, agent = problems.among(environment_of, config), problems.among(agent_of, config)
    if config.agent is not None:
        problems.among(door_of_agents, deployment)
    # Facts have no length of the engine's own, and what follows from theirs was compared with all models at once.
    told = config.longest_sequence[0] if deployment.facts else None
    problems.lines += [*unstartable(deployment, told), *unfit_learner(config.policy, "orchestrator.policy")]
    tokenizer = problems.among(load_tokenizer, config.policy.model, before=f"{POLICY_FIELD}: ")
    train = held_out = None
    if tokenizer is not None:
        problems.lines += other_tokenizers(deployment, tokenizer)
        tools = () if environment is None else environment.tools
        train = problems.among(_prompts, config, tokenizer, config.data.prompt_split, tools)
        if config.evaluation.every and (split := problems.among(_held_out, config)):
            held_out = problems.among(_prompts, config, tokenizer, split, tools)
        if train:
            problems.among(form_of, environment, config.data.chat_template, tokenizer)
    if train and held_out:
        problems.among(check_disjoint, train, held_out)
    distribution = None
    if tokenizer is not None and not problems.lines:
        distribution = sampled_from(config, tokenizer)
        problems.lines += ends_without_token(config, distribution)
    if problems.lines or train is None or judges is None or distribution is None:
        raise ConfigError("\n".join(dict.fromkeys(problems.lines)))
    kinds = (
        idle_critics,
        other_critics,
        schedules,
        rests,
        old_tokens,
        rounded_adapters,
        rounded_ratios,
        open_pushes,
        untested,
    )
    remarks = tuple(remark for each in kinds for remark in each(deployment))
    remarks += (*without_template(config, tokenizer), *bare_prompts(config, tokenizer))
    if config.evaluation.every and held_out is None:
        remarks += (
            f"orchestrator.data: {config.data.path} has no split {EVAL}, so nothing is evaluated during the run; "
            "to hold prompts out, set prompt_split to train[:90%] and eval_split to train[90%:]",
        )
    return Inputs(tokenizer, train, held_out, judges, distribution, environment, agent, remarks)


def bare_prompts(config: OrchestratorConfig, tokenizer: Any) -> Iterator[str]:
    """A remark where a chat model gets the prompts without its template, and the file does not say so."""
    if tokenizer.chat_template and config.agent is None and "chat_template" not in config.data.model_fields_set:
        yield (
            f"orchestrator.data.chat_template: not given, so {config.policy.model} gets the prompts as they are, "
            "without its chat template; true puts each into it, false says that this is meant"
        )


def load_judges(config: OrchestratorConfig) -> dict[str, Judge]:
    """The evaluation's judges by name. ConfigError if one cannot be imported."""
    where = "orchestrator.evaluation.judges"
    return {name: load_function(path, f"{where}.{name}") for name, path in config.evaluation.judges.items()}


def environment_of(config: OrchestratorConfig) -> Environment | None:
    """The run's environment; None if it has none. ConfigError if it cannot be made."""
    section = config.environment
    return None if section is None else load_environment(section.kind)


def evaluation_prompts(held_out: PromptSet, config: OrchestratorConfig) -> list[Prompt]:
    """The held-out prompts that the evaluation uses."""
    return list(held_out.prompts[: config.evaluation.max_prompts])


def _held_out(config: OrchestratorConfig) -> str | None:
    """The split to evaluate on; None if the file asks for none and the data have none of the usual name."""
    if config.data.eval_split is not None or "evaluation" in config.model_fields_set:
        return config.data.eval_split or EVAL
    return EVAL if EVAL in split_names(config.data.path) else None


class _Problems:
    """Collects errors, so that all of them are reported at once."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def among(self, function: Callable[..., Result], *arguments: Any, before: str = "") -> Result | None:
        """The function's result; None if it raises ConfigError, which is recorded."""
        try:
            return function(*arguments)
        except ConfigError as error:
            self.lines.append(f"{before}{error}")
            return None


def _prompts(config: OrchestratorConfig, tokenizer: Any, split: str, tools: Sequence[Schema]) -> PromptSet:
    return load_prompts(config.data, tokenizer, split, vocab_size=vocabulary_size(tokenizer), tools=tools)


def _disagreements(deployment: Deployment) -> Iterator[str]:
    """Contradictions between sections of the file, and lengths that do not fit."""
    config, services = deployment.orchestrator, deployment.services
    yield from wrong_backend(deployment)
    yield from wrong_folders(config)
    needed, sum_of = config.longest_sequence
    for name, section in services.items():
        for field, length in _longest(config, name, section):
            if length < needed:
                yield f"applications.{name}.args.{field}: {length}, but {sum_of}"
        if isinstance(section, RolloutConfig | ReferenceConfig):
            service = "rollout" if isinstance(section, RolloutConfig) else "reference"
            yield from unlike_dtypes(config, service, section.dtype, f"applications.{name}.args.dtype")
        if isinstance(section, RolloutConfig):
            yield from misfits_of_rollout(config, section, name)
        if isinstance(section, RewardConfig):
            yield from misfits_of_reward(config, section, name)
        if isinstance(section, CriticConfig) and config.algorithm.needs_critic:
            yield from misfits_of_critic(config, section, name)
    fields: dict[str, str] = {}
    for field, path in models_of_run(deployment):
        fields.setdefault(path, field)
    configs = {path: load_model_config(path) for path in fields}  # None is reported by the check of models
    lengths = {path: max_length(config) for path, config in configs.items() if config is not None}
    if short := [f"{fields[path]} ({path}) takes {length}" for path, length in lengths.items() if length < needed]:
        yield f"{sum_of} tokens, but {', '.join(short)} (max_position_embeddings)"


def _longest(config: OrchestratorConfig, name: str, section: Config) -> Iterator[tuple[str, int]]:
    """Longest pair of a service with such a setting, whatever its model takes, and its key."""
    if isinstance(section, RolloutConfig):
        yield "max_length", section.longest(DEFAULT_LENGTH)
    elif isinstance(section, RewardConfig):
        for scorer, hosted in scorers_asked(config, name, section).items():
            yield f"{field_of(scorer)}.max_length" if hosted.scorer.max_length else "max_length", hosted.max_length
