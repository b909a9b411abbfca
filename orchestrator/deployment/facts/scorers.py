"""The facts of scorers that are served without a run, and the whole file that is derived from them."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, NonNegativeInt

from orchestrator.deployment.applications import SERVICES, deployments_of
from orchestrator.deployment.facts.derive import (
    FUNCTION,
    PASS,
    SHARE_OF_CORE,
    ModelAt,
    environment_of,
    in_words,
    merged,
    shares,
    whole,
)
from orchestrator.deployment.facts.facts import DEPLOYMENT_KEYS
from quartet.config.base import Config, Count, Dtype, PortNumber
from services.reward.config import INGRESS, ScorerName

TELLING = "scorers"
"""The fact by which a file is known to be of this kind."""
_SERVICE = "reward"

_NAMES = (
    (r"applications\.reward\.args\.", ""),
    (r"applications\.reward\.deployments\b", "scorers"),
    (r"(?<![\w.])grpc_options\.port\b", "port"),
    (r"(?<![\w.])http_options\.port\b", "http_port"),
)


class ScorersFacts(Config):
    """Scorers without a run, for whatever asks for scores: runs, evaluations, programs of others."""

    scorers: Annotated[dict[ScorerName, str | dict[str, Any]], Field(min_length=1)]
    """Name -> scorer: a reward model, as a folder or ORG/NAME@REVISION; a Python function, as
    package.module:function; or a whole scorer (services/reward/config.py), among whose keys may be options of
    Serve's for its deployment, such as `num_replicas`."""
    tokenizer: str | None = None
    """Folder or ORG/NAME@REVISION of the tokenizer of token ids, for scorers that say none. Null: a model's own;
    other scorers take texts and conversations alone."""
    dtype: Dtype | None = None
    """Arithmetic of all models. Null: bfloat16 with GPUs, else float32."""
    gpus: NonNegativeInt = 0
    """GPUs of all machines together, which the scorers that are models share. 0: everything on the CPU."""
    threads: Count | None = None
    """Threads of each process on the CPU. Null: 1 without GPUs, else as many as Ray gives it cores."""
    port: PortNumber = 19000
    """The gRPC port."""
    http_port: PortNumber = 18000
    """Serve's HTTP port, on which nothing answers unless `security.http` is true."""
    security: dict[str, Any] | None = None
    """The gRPC port's address and policy (quartet/security/port.py). Null: only this user, on this machine."""


def derive(facts: ScorersFacts, model_at: ModelAt) -> dict[str, Any]:
    """The whole file. ConfigError if a fact is wrong, or a model cannot be read."""
    gpus = facts.gpus
    made = {name: _scorer(name, given, facts, model_at) for name, given in facts.scorers.items()}
    args: dict[str, Any] = {} if facts.tokenizer is None else {"tokenizer": facts.tokenizer}
    application: dict[str, Any] = {
        "name": _SERVICE,
        "route_prefix": f"/{_SERVICE}",
        "import_path": SERVICES[_SERVICE].import_path,
    }
    if environment := environment_of(gpus, facts.threads):
        application["runtime_env"] = {"env_vars": environment}
    application["args"] = args | {"scorers": {name: scorer for name, (scorer, _) in made.items()}}
    # On each GPU as many replicas as are needed, so that all have a place; in ten-thousandths, as Ray counts.
    models = sum(_replicas(options) for scorer, options in made.values() if _computes(scorer))
    share = 10_000 // -(-models // gpus) / 10_000 if gpus and models else 0
    names = deployments_of(application)
    entries = []
    for name in names:
        # A single scorer takes its calls itself.
        scorer, options = next(iter(made.values())) if len(names) == 1 else made.get(name, ({}, {}))
        entry: dict[str, Any] = {"name": name}
        if "autoscaling_config" not in options:
            # From the start: a file that gains it later would restart every replica.
            count = options.pop("num_replicas", 1)
            entry["autoscaling_config"] = {"min_replicas": count, "max_replicas": count}
        cpus = 0 if name == INGRESS and len(names) > 1 else 1 if gpus else SHARE_OF_CORE
        entry["ray_actor_options"] = shares(cpus, share if _computes(scorer) else 0)
        entries.append(merged(entry, options, f"scorers.{name}"))
    return whole(facts.security, facts.port, facts.http_port, [application | {"deployments": entries}])


def _computes(scorer: Mapping[str, Any]) -> bool:
    """True for a model, and for several scorers of which one is a model."""
    parts = scorer.get("scorers")
    inner = [part for part in parts.values() if isinstance(part, Mapping)] if isinstance(parts, Mapping) else []
    return scorer.get("kind") == "model" or any(map(_computes, inner))


def _replicas(options: Mapping[str, Any]) -> int:
    """Most replicas of a scorer; a wrong number is named where the whole file is checked."""
    scaling = options.get("autoscaling_config", {"max_replicas": options.get("num_replicas")})
    most = scaling.get("max_replicas") if isinstance(scaling, Mapping) else None
    return max(most, 1) if isinstance(most, int) else 1


def stated(text: str) -> str:
    """A message about the whole file in the words of these facts."""
    return in_words(text, _NAMES)


def _scorer(
    name: str, given: str | Mapping[str, Any], facts: ScorersFacts, model_at: ModelAt
) -> tuple[dict[str, Any], dict[str, Any]]:
    """A scorer, and Serve's options of its deployment."""
    if not isinstance(given, str):
        options = {key: value for key, value in given.items() if key in DEPLOYMENT_KEYS}
        own = {key: value for key, value in given.items() if key not in options}
        return _with_derived(own, f"scorers.{name}", facts, model_at), options
    if not Path(given).is_dir() and FUNCTION.fullmatch(given):
        return {"kind": "function", "function": given}, {}
    return _model(given, f"scorers.{name}", facts, model_at), {}


def _with_derived(scorer: Mapping[str, Any], where: str, facts: ScorersFacts, model_at: ModelAt) -> dict[str, Any]:
    """A scorer with the keys of its models that follow from the facts; those that it has stay."""
    parts = scorer.get("scorers")
    if isinstance(parts, Mapping):
        inner = {
            name: _with_derived(part, f"{where}.scorers.{name}", facts, model_at)
            if isinstance(part, Mapping)
            else part
            for name, part in parts.items()
        }
        return {**scorer, "scorers": inner}
    model = scorer.get("model")
    if scorer.get("kind") != "model" or not isinstance(model, str):
        return dict(scorer)
    return {**_model(model, f"{where}.model", facts, model_at), **scorer}


def _model(model: str, where: str, facts: ScorersFacts, model_at: ModelAt) -> dict[str, Any]:
    """The scorer of a model, which stands at a field of the facts."""
    gpus = facts.gpus
    scorer = {"kind": "model", "model": model, "dtype": facts.dtype or ("bfloat16" if gpus else "float32")}
    return scorer | ({} if gpus else {"batch_tokens": PASS}) | {"packing": lambda: model_at(model, where).packs}
