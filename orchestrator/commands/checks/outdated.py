"""Services that run otherwise than a run's file, or the user's own files, say by now: both may have changed since the
services were deployed."""

import os
import shlex
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from orchestrator.clients import Infos
from orchestrator.commands.checks.models import brings_code
from orchestrator.config.run import OrchestratorConfig
from orchestrator.deployment import cluster
from orchestrator.deployment.file import Deployment, ServicesFile
from orchestrator.deployment.redeployment import differing
from protos import common_pb2, critic_pb2, reference_pb2, reward_pb2
from quartet.config.base import ConfigError
from quartet.config.frozen import FrozenConfig
from quartet.config.learner import LearnerConfig
from quartet.wire.identity import folder_name, model_hash
from services.reward.config import ModelScorerConfig, RewardConfig, ScorerConfig, SeveralScorerConfig, field_of


def outdated(deployment: Deployment, infos: Infos) -> list[str]:
    """A line for the user for each service of the run that is behind the file, and for each model and reward function
    whose files have changed since a service read them."""
    return [*_behind_the_file(deployment), *behind_files_of_run(deployment, infos.by_service)]


def behind_files_of_run(deployment: Deployment, infos: Mapping[str, Any]) -> Iterator[str]:
    """Lines as of `behind_files` for the services of a run, by their Infos."""
    told = {name: infos[service] for service, name in _here(deployment.orchestrator).items() if service in infos}
    scorers = {name: [info] for name, info in told.items() if isinstance(info, reward_pb2.ScorerInfo)}
    # A run pushes its own weights to rollout, and a critic that was trained is no longer what was read.
    kept = {
        name: info.model
        for name, info in told.items()
        if isinstance(info, reference_pb2.ReferenceInfo)
        or (isinstance(info, critic_pb2.CriticInfo) and not info.last_step)
    }
    yield from behind_files(deployment, scorers, kept)


def behind_files(
    deployment: ServicesFile,
    scorers: Mapping[str, Iterable[reward_pb2.ScorerInfo]],
    models: Mapping[str, common_pb2.ModelInfo],
) -> Iterator[str]:
    """A line for each model's folder, and each module of a reward function, that has changed since a service of the
    file read it. Whatever is not on this machine is passed over.

    Args:
        deployment: the file.
        scorers: name of a reward application -> its scorers.
        models: name of another application -> its model.
    """
    for application in deployment.raw.get("applications") or []:
        name = str(application.get("name"))
        section = deployment.services.get(name)
        if brings_code(application.get("runtime_env")):
            continue
        where = f"applications.{name}.args"
        if isinstance(section, RewardConfig):
            for info in scorers.get(name, ()):
                if hosted := section.hosted.get(info.name):
                    yield from _scorer(hosted.scorer, info.identity, f"{where}.{field_of(info.name)}", name)
        elif isinstance(section, LearnerConfig | FrozenConfig) and (model := models.get(name)):
            yield from _model(section.model, model.name, model.model_hash, where, name)


def _scorer(scorer: ScorerConfig, read: reward_pb2.ScorerIdentity, where: str, service: str) -> Iterator[str]:
    """The line for a scorer at `where`, or for each part of several, that is there as the service `read` it."""
    if isinstance(scorer, SeveralScorerConfig):
        for (name, part), its in zip(scorer.scorers.items(), read.parts, strict=False):
            yield from _scorer(part, its, f"{where}.scorers.{name}", service)
    elif isinstance(scorer, ModelScorerConfig):
        yield from _model(scorer.model, read.name.removeprefix("model:"), read.model_hash, where, service)
    elif scorer.kind == "function" and scorer.title == read.name:
        try:
            here = scorer.code_hash(where)
        except ConfigError:  # it cannot be imported, such as on another machine than its service
            return
        if here != read.model_hash:
            yield _changed(f"{where}.function", scorer.function, service)


def _model(folder: str, name: str, digest: str, where: str, service: str) -> Iterator[str]:
    """The line for a model's folder at `where`, of which the service knows the name and the digest."""
    try:
        here = model_hash(folder) if folder_name(folder) == name else digest
    except OSError:  # it is not on this machine
        return
    if here != digest:
        yield _changed(f"{where}.model", folder, service)


def _changed(field: str, what: str, service: str) -> str:
    return (
        f"{field}: {what} has changed since {service} read it, and is as it was until `quartet down` and `quartet up`"
    )


def _here(config: OrchestratorConfig) -> dict[str, str]:
    """Service -> application, of those that the run asks at the target of its own file."""
    used = config.services
    return {name: used[name].application or name for name in used.used if used[name].target in (None, config.target)}


def _behind_the_file(deployment: Deployment) -> Iterator[str]:
    """The services on this folder's head; nothing without one, or where Serve does not answer."""
    head = cluster.running()
    if head is None or os.environ.get("RAY_ADDRESS"):
        return
    names = {*_here(deployment.orchestrator).values()}
    wanted = [section for section in deployment.raw.get("applications") or [] if section.get("name") in names]
    try:
        found = differing(cluster.serve(head)["applications"], wanted)
    except (OSError, ValueError):  # or a section that Serve would refuse, which is not for this to say
        return
    path = shlex.quote(str(deployment.path))
    for name, keys in found.items():
        fields = ", ".join(f"applications.{name}.{key}" for key in keys)
        yield (
            f"{fields}: {name} runs with what was deployed before; `quartet up {path}` deploys what the file says now"
        )
