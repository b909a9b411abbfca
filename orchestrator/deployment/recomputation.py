"""The learners that recompute their activations, where the file leaves it to the sums of memory: as few as fit.

It is decided before anything starts, from the file and the models' sizes alone, so that all ranks and all starts of a
run do the same.
"""

import copy
import functools
import itertools
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from orchestrator.deployment.file import POLICY, Deployment
from orchestrator.deployment.memory import footprints, shortage
from quartet.config.base import GIB
from quartet.config.learner import LearnerConfig
from quartet.models.device import VISIBLE
from quartet.models.size import ModelSize

FIELD = "gradient_checkpointing"
AUTO = "auto"


def decided(deployment: Deployment, configs: Mapping[str, Any]) -> Deployment:
    """The file with true or false in the place of each `gradient_checkpointing: auto`.

    A learner on a CPU does not recompute. Of those on GPUs as few parameters as possible are recomputed for, so that
    what may share a GPU fits into `orchestrator.gpu_gib`; all are if nothing else fits, or where that is not known.

    Args:
        deployment: the file.
        configs: folder -> its model's transformers configuration, None if it cannot be read here.

    Raises:
        ConfigError: a configuration describes no language model.
    """
    places = {name: _share(config) for name, config in deployment.learners().items() if _open(config)}
    if not places:
        return deployment
    fixed = {name: share is None for name, share in places.items() if not share}
    choosing, gib = [name for name, share in places.items() if share], deployment.orchestrator.gpu_gib
    everything = fixed | dict.fromkeys(choosing, True)
    if not choosing or gib is None or None in configs.values():
        return _with(deployment, everything)
    shape_at = functools.cache(lambda path: ModelSize.of(configs[path]))
    for chosen in _by_cost(deployment, choosing, shape_at):
        candidate = _with(deployment, fixed | {name: name in chosen for name in choosing})
        if not shortage(footprints(candidate, int(gib * GIB), shape_at), int(gib * GIB)):
            return candidate
    return _with(deployment, everything)


def choices(before: Deployment, after: Deployment) -> list[str]:
    """A line for each learner of which `decided` has decided."""
    return [
        f"{_where(name)}.{FIELD}: auto is {str(after.learners()[name].recomputes).lower()} here"
        for name, config in before.learners().items()
        if _open(config)
    ]


def _by_cost(deployment: Deployment, names: list[str], shape_at: Callable[[str], ModelSize]) -> list[tuple[str, ...]]:
    """All sets of learners, those first whose recomputation takes the least arithmetic; of equals the critic's."""
    sets = [chosen for count in range(len(names) + 1) for chosen in itertools.combinations(names, count)]
    learners = deployment.learners()
    return sorted(
        sets, key=lambda chosen: (sum(shape_at(learners[name].model).parameters for name in chosen), POLICY in chosen)
    )


def _open(config: LearnerConfig) -> bool:
    return config.gradient_checkpointing == AUTO


def _where(name: str) -> str:
    return "orchestrator.policy" if name == POLICY else f"applications.{name}.args"


def _share(config: LearnerConfig) -> float | None:
    """The share of a GPU that Ray reserves for a learner's rank, 0 if it computes on the CPU; None if its GPU is
    chosen by hand, so that its sums are not known."""
    return None if VISIBLE in config.env_vars and not config.num_gpus else config.num_gpus


def _with(deployment: Deployment, chosen: Mapping[str, bool]) -> Deployment:
    """The file with these choices."""
    raw = copy.deepcopy(deployment.raw)
    for application in raw.get("applications") or []:
        name = str(application.get("name"))
        if name in chosen:
            application["args"][FIELD] = chosen[name]
    run, services = deployment.orchestrator, dict(deployment.services)
    if POLICY in chosen:
        raw["orchestrator"]["policy"][FIELD] = chosen[POLICY]
        run = run.model_copy(update={"policy": run.policy.model_copy(update={FIELD: chosen[POLICY]})})
    for name, value in chosen.items():
        if name in services:
            services[name] = services[name].model_copy(update={FIELD: value})
    return replace(deployment, orchestrator=run, services=services, raw=raw)
