"""Sums of the host memory that a deploy file needs, per machine, so that a file that cannot fit is refused early.

Ray knows nothing of this memory: what counts is which processes it may put on one machine. That follows from the
machine's GPUs and from custom resources. Libraries are estimates; the rest follows from what torch, DeepSpeed and a
push allocate.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from orchestrator.config.run import OrchestratorConfig
from orchestrator.deployment.file import Deployment
from orchestrator.deployment.memory import (
    CONTEXT,
    GRAPHS,
    arriving_bytes,
    copy_bytes,
    engine_bytes,
    frozen_models,
    fullest,
    replicas,
    service_bytes,
)
from quartet.config.base import GIB, Config
from quartet.config.learner import LearnerConfig
from quartet.learner import host_memory
from quartet.learner.memory import learner_bytes
from quartet.models.device import VISIBLE
from quartet.models.size import BYTES, ModelSize
from services.critic.config import CriticConfig
from services.reference.config import ReferenceConfig
from services.rollout.config import RolloutConfig

PROCESS, PROCESS_ON_CPU = 2 * GIB, GIB
"""Host memory of a process with torch and CUDA, and of one with torch alone."""
SYSTEM = 4 * GIB
"""Host memory of Ray, Serve and the orchestrator."""
LIBRARIES = "libraries"
STAGED = "weights staged for a push"
WHOLE = "weights staged whole for several workers"
ARRIVING = "buckets of a push that arrive at several workers"
SENT = "weights that are sent"
SAVED = "model that is saved"
SHARED = "weights in /dev/shm"
COMPUTING = "model on the CPU"
ADVICE = {
    STAGED: "set weights.stage to gpu where the GPUs have room",
    host_memory.COPIES: "set checkpoint.background to false",
    host_memory.OPTIMIZER: "leave out adam_offload and colocate, or divide the learner among more hosts",
    host_memory.WEIGHTS: "set param_offload, or a frozen model's offload, to false",
    host_memory.READING: "put fewer ranks on a host",
}
"""Kind of memory -> what makes it less."""


@dataclass(frozen=True, slots=True)
class HostPart:
    """A rank or replica, with all its processes, and the host memory that it needs."""

    name: str
    gpus: float
    """GPUs that Ray reserves for it, all on one host."""
    resources: frozenset[str]
    """Names of the custom resources that it asks for."""
    needs: tuple[tuple[str, int], ...]
    """Kinds of memory and their bytes."""

    @property
    def size(self) -> int:
        """Memory in bytes."""
        return sum(size for _, size in self.needs)


def host_parts(deployment: Deployment, shape_at: Callable[[str], ModelSize]) -> list[HostPart]:
    """Everything in a deploy file that Ray places. `shape_at` returns the sizes of a folder's model."""
    run, parts = deployment.orchestrator, []
    for placed in deployment.placed():
        gpus, by_hand = placed.gpus, VISIBLE in placed.variables
        needs = _service(placed.section, run, shape_at, gpu=bool(gpus) or by_hand, several=gpus > 1)
        if isinstance(placed.section, CriticConfig):
            gpus = 0  # they are its rank's
        part = HostPart(placed.name, gpus, frozenset(placed.actor.get("resources") or {}), _most(*needs))
        parts += [part] * replicas(placed.entry)
    for name, config in deployment.learners().items():
        gpu = bool(config.num_gpus) or VISIBLE in config.env_vars
        for rank in range(config.ranks):
            needs = _learner(config, run, shape_at(config.model), rank, gpu=gpu)
            parts.append(HostPart(name, config.num_gpus, frozenset(config.resources), _most(*needs)))
    return parts


def _most(running: Mapping[str, int], starting: Mapping[str, int]) -> tuple[tuple[str, int], ...]:
    """The needs in the phase that needs more."""
    most = max(running, starting, key=lambda needs: sum(needs.values()))
    return tuple((kind, size) for kind, size in most.items() if size)


def _service(
    section: Config, run: OrchestratorConfig, shape_at: Callable[[str], ModelSize], *, gpu: bool, several: bool
) -> tuple[dict[str, int], dict[str, int]]:
    """Bytes of a replica with all its processes, but for ranks, by kind: while it runs, and while it starts."""
    process = PROCESS if gpu else PROCESS_ON_CPU
    if isinstance(section, RolloutConfig):
        # The replica, the engine's core, and the workers unless one is part of the core.
        own = {LIBRARIES: process * (2 + (0 if section.one_process else section.tensor_parallel_size))}
        if stages_on_host(run, section):
            # Of several workers all together: whole until each knows which part is its own, and in their parts then.
            kind = STAGED if section.tensor_parallel_size == 1 else WHOLE
            own[kind] = copy_bytes(shape_at(section.model), section.dtype, section.adapters)
            if kind == WHOLE and _backend(run, section) != "nccl":
                # Of each sender one arrives at each worker and one is staged, of which all together take one.
                arriving = arriving_bytes(shape_at(run.policy.model), run)
                own[ARRIVING] = (2 * section.tensor_parallel_size + 1) * arriving
        if not gpu and section.kv_cache_mib is not None:
            worker = engine_bytes(section, shape_at(section.model), 0) - CONTEXT - GRAPHS
            own[COMPUTING] = section.tensor_parallel_size * worker
        return own, own
    own = {LIBRARIES: process}
    if isinstance(section, CriticConfig):
        return own, {}
    frozen = frozen_models(section)
    if not gpu:
        context = CONTEXT * len(frozen)
        return own | {COMPUTING: service_bytes(section, shape_at) - context}, own
    logits = isinstance(section, ReferenceConfig)
    whole = [shape_at(model.model) if logits else shape_at(model.model).body for model in frozen]
    sizes = [(shape, BYTES[model.dtype]) for shape, model in zip(whole, frozen, strict=True)]
    offloaded = sum(
        shape.by_weights(width, host_memory.pinned)
        for (shape, width), model in zip(sizes, frozen, strict=True)
        if model.offload
    )
    # With several GPUs its layers are read onto them one by one.
    reading = 0 if several else sum(shape.parameters * width for shape, width in sizes)
    return own | {host_memory.WEIGHTS: offloaded}, own | {host_memory.READING: reading}


def _learner(
    config: LearnerConfig, run: OrchestratorConfig, shape: ModelSize, rank: int, *, gpu: bool
) -> tuple[dict[str, int], dict[str, int]]:
    """Bytes of a learner's rank by kind: while it runs, and while it starts."""
    process = PROCESS if gpu else PROCESS_ON_CPU
    policy, own = not isinstance(config, CriticConfig), {LIBRARIES: process}
    shape = shape if policy else shape.body
    whole = shape.parameters * BYTES[config.dtype]
    running = own | host_memory.held_bytes(config, shape)
    if not gpu:
        running[COMPUTING] = learner_bytes(config, shape, logits=policy)
    if run.checkpoint.every and run.checkpoint.background:
        running[host_memory.COPIES] = host_memory.copied_bytes(config, shape, exported=policy, rank=rank)
    elif policy and not rank:
        running[SAVED] = whole
    if policy and rank < run.weights.senders:
        backend = run.weights.backend
        share = copy_bytes(shape, config.dtype, run.pushed_adapters) // run.weights.senders
        if backend != "cuda-ipc" and (backend, run.weights.stage) != ("nccl", "gpu"):
            running[SHARED if backend == "ipc" else SENT] = share
    return running, own | {host_memory.READING: whole}


def stages_on_host(run: OrchestratorConfig, section: RolloutConfig) -> bool:
    """True if a replica may stage a push in host memory, as several workers do at first. `auto` may choose what
    does."""
    backend = _backend(run, section)
    on_gpu = backend in ("nccl", "auto") and run.weights.stage == "gpu" and section.tensor_parallel_size == 1
    return backend not in ("ipc", "cuda-ipc") and not on_gpu


def _backend(run: OrchestratorConfig, section: RolloutConfig) -> str:
    """The backend of pushes to a replica, or `auto`."""
    return section.weight_backend if run.weights.backend == "auto" else run.weights.backend


def most_on_one(parts: Sequence[HostPart], gpus: int | None) -> tuple[HostPart, ...]:
    """The parts that need most host memory, of all that Ray may put on one host.

    Args:
        parts: all parts.
        gpus: GPUs of a host; None: it has as many as are asked for.
    """
    groups = {part.resources for part in parts if part.resources} or {frozenset[str]()}
    together = (
        [part for part in parts if not part.resources or not names or part.resources & names] for names in groups
    )
    return max((_fullest(group, gpus) for group in together), key=_size, default=())


def _fullest(parts: Sequence[HostPart], gpus: int | None) -> tuple[HostPart, ...]:
    """The set that needs most memory, of all whose GPUs a host has. What asks for none may always be there."""
    if gpus is None:
        return tuple(parts)
    on_gpus = [part for part in parts if part.gpus]
    others = (part for part in parts if not part.gpus)
    return (*others, *fullest(on_gpus, gpus, lambda part: part.gpus, lambda part: part.size))


def _size(parts: Iterable[HostPart]) -> int:
    return sum(part.size for part in parts)


def shortage(parts: Sequence[HostPart], memory: int, gpus: int | None) -> str:
    """A message if parts that may be on one host of `memory` bytes do not fit, with the sum and its largest part;
    empty if they fit."""
    worst = most_on_one(parts, gpus)
    total = SYSTEM + _size(worst)
    if total <= memory:
        return ""
    kinds: Counter[tuple[str, str]] = Counter()
    for part in worst:
        for kind, size in part.needs:
            kinds[part.name, kind] += size
    [((name, kind), size)] = kinds.most_common(1)
    return (
        f"one host may have to hold {summed(worst)} = {total / GIB:.0f} GiB, but has {memory / GIB:.0f}; the largest "
        f"part, {size / GIB:.0f}, is {kind} of {name}: {ADVICE.get(kind, 'put less on a host')}"
    )


def summed(parts: Sequence[HostPart]) -> str:
    """The terms of the sum of a host's memory, in GiB."""
    counted = Counter(parts)
    terms = [
        f"{part.name} {f'{count} x ' if count > 1 else ''}{part.size / GIB:.1f}" for part, count in counted.items()
    ]
    return " + ".join([*terms, f"Ray and Serve {SYSTEM / GIB:.1f}"])
