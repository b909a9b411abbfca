"""The choice of the backend of weights by the places of the learner and the replicas."""

from collections.abc import Iterable, Mapping, Sequence

from quartet.config.base import ConfigError
from quartet.weight_transfer.place import Place

AUTO = "auto"
SHARED_BACKENDS = ("ipc", "cuda-ipc")
"""The backends whose receivers read the learner's copy, which therefore has to be complete first."""


def choose(asked: str, senders: Sequence[Place], replicas: Mapping[str, Place]) -> str:
    """The backend for these members: the configured one, or the best that reaches all of them.

    Shared host memory needs the fewest copies; NCCL needs a separate GPU for each member; gloo reaches all members.
    CUDA IPC is taken only if it is asked for, because the GPU's memory has to be planned for its copy.

    Args:
        asked: weights.backend.
        senders: places of the learner's sending ranks.
        replicas: replica -> place.

    Raises:
        ConfigError: the configured backend does not reach a member.
    """
    if asked != AUTO:
        if reason := problem(asked, senders, replicas):
            raise ConfigError(f"orchestrator.weights.backend: {asked}, but {reason}; set it to {AUTO}")
        return asked
    return next(backend for backend in ("ipc", "nccl", "gloo") if not problem(backend, senders, replicas))


def problem(backend: str, senders: Sequence[Place], replicas: Mapping[str, Place]) -> str:
    """Reason for which the backend cannot send weights from these senders to these replicas; empty if it can."""
    if backend == "ipc":
        return _apart(senders, replicas)
    if backend == "cuda-ipc":
        return _without_gpus(senders, replicas) or _on_several(senders, replicas)
    if backend == "nccl":
        return _without_gpus(senders, replicas) or _sharing(senders, replicas)
    return ""


def _apart(senders: Sequence[Place], replicas: Mapping[str, Place]) -> str:
    machines = {place.machine for place in senders}
    if "" in machines or len(machines) > 1:
        return "the learner has no shared memory with room for the weights, or is on several machines"
    apart = sorted(name for name, place in replicas.items() if place.machine not in machines)
    return f"{_list(apart)} not on the learner's machine, or not in its container or of its user" if apart else ""


def _without_gpus(senders: Sequence[Place], replicas: Mapping[str, Place]) -> str:
    if not all(place.gpus for place in senders):
        return "the learner is on a CPU"
    without = sorted(name for name, place in replicas.items() if not place.gpus)
    return f"{_list(without)} on a CPU" if without else ""


def _sharing(senders: Sequence[Place], replicas: Mapping[str, Place]) -> str:
    owners: dict[str, str] = {}
    members = [*(("the learner", place) for place in senders), *sorted(replicas.items())]
    for name, place in members:
        for gpu in place.gpus:
            if gpu in owners:
                return f"{owners[gpu]} and {name} share the GPU {gpu}, which NCCL refuses"
            owners[gpu] = name
    return ""


def _on_several(senders: Sequence[Place], replicas: Mapping[str, Place]) -> str:
    gpus = {gpu for place in senders for gpu in place.gpus}
    if len(gpus) > 1:
        return "the learner's senders are on several GPUs"
    apart = sorted(name for name, place in replicas.items() if set(place.gpus) != gpus)
    return f"{_list(apart)} not on the learner's GPU {gpus.pop()}" if apart else ""


def _list(names: Iterable[str]) -> str:
    names = list(names)
    return f"{', '.join(names)} {'is' if len(names) == 1 else 'are'}"
