"""Checks of the tokenizers, weights, engines and scoring functions that a deployment names.

A run has the tokens of its policy in common with all models that it uses. Scorers that other callers ask by their
names may have others.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from transformers import AutoModel, AutoModelForCausalLM

from orchestrator.config.run import OrchestratorConfig
from orchestrator.deployment.file import Deployment, ServicesFile
from quartet.config.base import Config, ConfigError
from quartet.config.frozen import FrozenConfig
from quartet.config.learner import LearnerConfig
from quartet.models.loading import check_whole, load_config, load_tokenizer
from quartet.models.scalar import check_scalar
from quartet.wire.identity import tokenizer_hash, vocabulary_size
from services.critic.config import CriticConfig
from services.reward.config import Hosted, ModelScorerConfig, PartConfig, RewardConfig, field_of, parts_of
from services.rollout.config import RolloutConfig
from services.rollout.engines import problem_of_own

POLICY_FIELD = "orchestrator.policy.model"
_OWN_CODE = {"working_dir", "py_modules", "pip", "uv", "conda", "container", "image_uri"}
"""Keys of a runtime environment that brings its own modules."""
_WEIGHTS = ("model.safetensors", "pytorch_model.bin")
"""Files of a model's weights that transformers looks for, the first one that is there; each may have an index of
several parts instead."""


def other_tokenizers(deployment: Deployment, tokenizer: Any) -> Iterator[str]:
    """Models whose token ids differ in meaning from the policy's."""
    expected, vocabulary = tokenizer_hash(tokenizer), vocabulary_size(tokenizer)
    for field, path in models_of_run(deployment):
        model = load_model_config(path)
        if model is not None and (entries := int(model.get_text_config().vocab_size)) < vocabulary:
            yield (
                f"{field}: {path} has {entries} entries in its vocabulary, but the tokenizer of {POLICY_FIELD} "
                f"gives ids up to {vocabulary - 1}; resize the model's embeddings"
            )
    for field, path in [*models_of_run(deployment), *_tokenizers(deployment, deployment.orchestrator)]:
        try:
            digest = tokenizer_hash(load_tokenizer(path))
        except ConfigError:
            continue  # reported by the check of tokenizers
        if digest != expected:
            yield (
                f"{field}: the tokenizer of {path} is not that of {POLICY_FIELD} "
                f"({deployment.orchestrator.policy.model}), so its token ids mean something else"
            )


def models(deployment: ServicesFile) -> Iterator[tuple[str, str]]:
    """(field, folder) of every model in the file that reads or writes tokens."""
    return ((f"{where}.model", section.model) for where, section in with_models(deployment))


def models_of_run(deployment: Deployment) -> Iterator[tuple[str, str]]:
    """The same without those of scorers that the run does not ask."""
    of_run = with_models(deployment, deployment.orchestrator)
    return ((f"{where}.model", section.model) for where, section in of_run)


def scorers_asked(run: OrchestratorConfig | None, name: str, section: RewardConfig) -> Mapping[str, Hosted]:
    """The scorers of a reward application that the run may ask: that without a name, or that of the run's name. All,
    where no run is given."""
    hosted = section.hosted
    if run is None:
        return hosted
    used = run.services.reward
    ours = used.target in (None, run.target) and name == (used.application or "reward")
    return {
        scorer: each
        for scorer, each in hosted.items()
        if not scorer or (ours and (scorer == used.scorer or (not used.scorer and len(hosted) == 1)))
    }


def with_models(
    deployment: ServicesFile, run: OrchestratorConfig | None = None
) -> Iterator[tuple[str, RolloutConfig | LearnerConfig | FrozenConfig]]:
    """(place, section) of every section with a model; of scorers, those that the run asks if one is given."""
    if isinstance(deployment, Deployment):
        yield "orchestrator.policy", deployment.orchestrator.policy
    for name, section in deployment.services.items():
        where = f"applications.{name}.args"
        if isinstance(section, RolloutConfig | LearnerConfig | FrozenConfig):
            yield where, section
        elif isinstance(section, RewardConfig):
            for field, scorer in scorers(scorers_asked(run, name, section), where):
                if isinstance(scorer, ModelScorerConfig):
                    yield field, scorer


def broken_models(deployment: ServicesFile) -> Iterator[str]:
    """Models whose configuration cannot be read, or whose weights are missing, incomplete, or those of a model for
    something else; each once."""
    seen = set()
    for where, section in with_models(deployment):
        path, check = section.model, _check_of(section)
        if (path, check) in seen:
            continue
        seen.add((path, check))
        try:
            load_config(path)
            problems = list(broken_weights(path))
            if not problems:
                check(path)
        except ConfigError as error:
            problems = [str(error).removeprefix("model: ")]
        yield from (f"{where}.model: {problem}" for problem in problems)


def _check_of(section: Config) -> Callable[[str], object]:
    """The check of the weights that the model of a section needs."""
    if isinstance(section, ModelScorerConfig):
        return check_scalar
    return _check_body if isinstance(section, CriticConfig) else _check_causal


_check_causal = partial(check_whole, AutoModelForCausalLM)
_check_body = partial(check_whole, AutoModel)


def broken_tokenizers(deployment: ServicesFile) -> Iterator[str]:
    """Tokenizers that do not load, each once; all services tell a run which one they have."""
    every = [*models(deployment), *_tokenizers(deployment)]
    for path, field in {path: field for field, path in reversed(every)}.items():
        try:
            load_tokenizer(path)
        except ConfigError as error:
            yield f"{field}: {error}"


def unlike_tokenizers(deployment: ServicesFile) -> Iterator[str]:
    """Models of named scorers whose tokenizer is not the one that the scorer is given; those of a run's scorer
    without a name are compared with the policy's."""
    for name, section in deployment.services.items():
        for scorer, hosted in section.hosted.items() if isinstance(section, RewardConfig) else ():
            if not scorer:
                continue
            for field, part in scorers({scorer: hosted}, f"applications.{name}.args"):
                if not isinstance(part, ModelScorerConfig) or hosted.tokenizer in (None, part.model):
                    continue
                with suppress(ConfigError):  # reported by the check of tokenizers
                    one, other = (tokenizer_hash(load_tokenizer(path)) for path in (part.model, hosted.tokenizer))
                    if one != other:
                        yield (
                            f"{field}.model: the tokenizer of {part.model} is not {hosted.tokenizer}, which the "
                            f"scorer is given; set {field_of(scorer)}.tokenizer to that of the model"
                        )


def _tokenizers(deployment: ServicesFile, run: OrchestratorConfig | None = None) -> Iterator[tuple[str, str]]:
    """(field, folder) of folders of which scorers use the tokenizer alone: all, or those that the run asks."""
    for name, section in deployment.services.items():
        if not isinstance(section, RewardConfig):
            continue
        where = f"applications.{name}.args"
        for scorer, hosted in scorers_asked(run, name, section).items():
            if hosted.scorer.tokenizer:
                yield f"{where}.{field_of(scorer)}.tokenizer", hosted.scorer.tokenizer
            elif section.tokenizer:
                yield f"{where}.tokenizer", section.tokenizer


def load_model_config(path: str) -> Any:
    """The model's config.json as transformers reads it; None if it cannot be read (`broken_models` says why)."""
    try:
        return load_config(path)
    except ConfigError:
        return None


def missing_functions(deployment: ServicesFile) -> Iterator[str]:
    """Engines of the user's own that are not here, and scorers of functions for which something is missing: the
    function itself, a package, a variable of the environment; except those of services with their own environment."""
    for application in deployment.raw.get("applications") or []:
        name = str(application.get("name"))
        section = deployment.services.get(name)
        if brings_code(application.get("runtime_env")):
            continue
        if isinstance(section, RolloutConfig) and (
            problem := problem_of_own(section, f"applications.{name}.args.engine")
        ):
            yield problem
        if not isinstance(section, RewardConfig):
            continue
        for field, scorer in scorers(section.hosted, f"applications.{name}.args"):
            if not isinstance(scorer, ModelScorerConfig):
                try:
                    scorer.check(field)
                except ConfigError as error:
                    yield str(error)


def brings_code(runtime_env: Any) -> bool:
    """True if the runtime environment may hold modules that do not exist here."""
    if not isinstance(runtime_env, Mapping):
        return runtime_env is not None
    variables = runtime_env.get("env_vars")
    return bool(_OWN_CODE & runtime_env.keys()) or (isinstance(variables, Mapping) and "PYTHONPATH" in variables)


def scorers(hosted: Mapping[str, Hosted], where: str) -> Iterator[tuple[str, PartConfig]]:
    """(field, scorer) of each scorer and, where it is several, of each of these. `where` is the place of the args."""
    for name, each in hosted.items():
        yield from parts_of(each.scorer, f"{where}.{field_of(name)}")


def broken_weights(folder: str) -> Iterator[str]:
    """A line for each file of weights that is missing or incomplete in a model's folder."""
    root = Path(folder)
    for name in _WEIGHTS:
        index = root / f"{name}.index.json"
        if (root / name).exists() or index.exists():
            for part in [name] if (root / name).exists() else _parts(index):
                yield from _broken(root / part)
            return
    yield f"{folder} holds no weights; it should hold {_WEIGHTS[0]}, or its parts and their index"


def _parts(index: Path) -> list[str]:
    """The files that an index names; the index itself if it cannot be read."""
    try:
        found = json.loads(index.read_text())
        return sorted(set(found["weight_map"].values())) if "metadata" in found else [index.name]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return [index.name]


def _broken(file: Path) -> Iterator[str]:
    if file.suffix == ".json":
        yield f"{file} is no index of weights; copy it again"
    elif not file.is_file():
        yield f"{file} is missing"
    elif file.suffix == ".safetensors":
        try:
            # Compares the sizes in the header with the file's, which is not mapped: that may take more memory than
            # there is.
            with safe_open(file, framework="pt", backend="pread"):
                pass
        except (SafetensorError, OSError) as error:
            yield f"{file} is incomplete or no file of weights ({error}); copy it again"
