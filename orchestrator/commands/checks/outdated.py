"""Services that run otherwise than a run's file, or the user's own code, says by now: both may have changed since the
services were deployed."""

import os
import shlex
from collections.abc import Iterator

from orchestrator.commands.checks.models import brings_code, scorers_asked
from orchestrator.deployment import cluster
from orchestrator.deployment.file import Deployment
from orchestrator.deployment.redeployment import differing
from protos import reward_pb2
from quartet.config.base import ConfigError
from services.reward.config import RewardConfig, field_of


def outdated(deployment: Deployment, scorer: reward_pb2.ScorerIdentity) -> list[str]:
    """A line for the user for each service of the run that is behind the file, and for a reward function that is
    behind its code. `scorer` is the one that scores the run's samples."""
    return [*_behind_the_file(deployment), *behind_its_code(deployment, scorer)]


def _behind_the_file(deployment: Deployment) -> Iterator[str]:
    """The services on this folder's head; nothing without one, or where Serve does not answer."""
    head, config = cluster.running(), deployment.orchestrator
    if head is None or os.environ.get("RAY_ADDRESS"):
        return
    used = config.services
    names = {used[name].application or name for name in used.used if used[name].target in (None, config.target)}
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


def behind_its_code(deployment: Deployment, scorer: reward_pb2.ScorerIdentity) -> Iterator[str]:
    """The function that scores the run's samples, if its module has changed since the reward service has read it."""
    for application in deployment.raw.get("applications") or []:
        name = str(application.get("name"))
        section = deployment.services.get(name)
        if not isinstance(section, RewardConfig) or brings_code(application.get("runtime_env")):
            continue
        for key, hosted in scorers_asked(deployment.orchestrator, name, section).items():
            function, where = hosted.scorer, f"applications.{name}.args.{field_of(key)}"
            if function.kind != "function" or function.title != scorer.name:
                continue
            try:
                here = function.code_hash(where)
            except ConfigError:  # it cannot be imported, such as on another machine than its service
                continue
            if here != scorer.model_hash:
                yield (
                    f"{where}.function: {function.function} has changed since the reward service read it, and scores "
                    "as it was until `quartet down` and `quartet up`"
                )
