"""Sums of the GPU memory that a deploy file needs, per process, so that a file that cannot fit is refused early.

Those of learners follow what torch and DeepSpeed allocate within a tenth (quartet/learner/memory.py);
libraries and communicators are estimates, rather high than low.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from orchestrator.config.run import OrchestratorConfig
from orchestrator.deployment.file import POLICY, Deployment
from quartet.config.base import GIB, Config
from quartet.config.frozen import FrozenConfig
from quartet.config.learner import LearnerConfig, LoraConfig
from quartet.learner.memory import learner_bytes, tile_bytes
from quartet.models.size import BYTES, ModelSize
from services.critic.config import CriticConfig
from services.reference.config import ReferenceConfig
from services.reward.config import ModelScorerConfig, RewardConfig, parts_of
from services.rollout.config import RolloutConfig

CONTEXT = GIB * 7 // 10
"""Memory of CUDA itself in each process, with the code of its kernels."""
GRAPHS = GIB
"""Memory of vLLM's captured graphs."""
COMMUNICATOR = GIB * 2 // 5
"""Memory of NCCL's buffers in a group of several ranks."""
COMMUNICATOR_OF_ONE = GIB // 10
"""The same in the group of one rank that DeepSpeed makes."""
SENT_BUCKETS = 2
"""Buckets of a push that the sender has on its GPU: one is packed while the one before is copied."""
LOADED_BUCKETS = 3
"""Buckets of a push that a worker of a replica has on its GPU: of each sender one arrives, one is staged, and as much
may be put together of its pieces. While they are loaded, one is copied there, one is loaded, and as much is kept of a
layer that is not complete."""
DEFAULT_BATCHED_TOKENS = 16_384
"""Tokens in one step of vLLM on a large GPU, by default."""
AUTO_REPLICAS = 100
"""Most replicas of Serve's `num_replicas: auto`."""


@dataclass(frozen=True, slots=True)
class Footprint:
    """One process and the GPU memory that it needs."""

    name: str
    share: float
    """Share of a GPU that Ray reserves for it, more than 0."""
    size: int
    """Memory in bytes."""
    released: int = 0
    """Bytes of it that are free in `released_while`."""
    released_while: str = ""
    """The phase of a step in which the process gives memory to others, see PHASES."""

    def during(self, phase: str) -> int:
        """Memory in a phase."""
        return self.size - self.released if phase == self.released_while else self.size


SAMPLING, TRAINING = PHASES = ("sampling", "training")
"""The phases of a step of which processes with `colocate` need one only."""


def rank_bytes(config: LearnerConfig, shape: ModelSize, *, logits: bool, bucket: int = 0) -> int:
    """Most memory of one rank of a learner. `logits` is True for a language model, False for a value model; `bucket`
    is the size of a bucket of a push, which the policy packs on its GPU between updates."""
    most = learner_bytes(config, shape, logits=logits) + _communicator(config) + CONTEXT
    return max(most, resting_bytes(config, shape, logits=logits, bucket=bucket))


def resting_bytes(config: LearnerConfig, shape: ModelSize, *, logits: bool, bucket: int = 0) -> int:
    """Memory of one rank of a learner between its updates: its weights, a forward pass, and for a policy the buckets
    of a push."""
    shape, width = shape if logits else shape.body, BYTES[config.dtype]
    number = shape.parameters // (config.ranks if config.zero_stage == 3 else config.tensor_parallel.size)
    pushed = shape.passing(config.micro_batch_tokens, width) + SENT_BUCKETS * bucket
    return number * width + pushed + _communicator(config) + CONTEXT


def _communicator(config: LearnerConfig) -> int:
    return COMMUNICATOR if config.ranks > 1 else COMMUNICATOR_OF_ONE


def frozen_bytes(shape: ModelSize, config: FrozenConfig, *, logits: bool, longest: int = 0) -> int:
    """Memory of a reference or reward model; a pass holds one sequence of `longest` tokens at least."""
    shape = shape if logits else shape.body
    width, tokens = BYTES[config.dtype], max(config.batch_tokens, longest)
    head = tile_bytes(shape, tokens, width) if logits else 0
    return shape.parameters * width + max(shape.passing(tokens, width), head) + CONTEXT


def engine_bytes(config: RolloutConfig, shape: ModelSize, gpu: int, bucket: int = 0) -> int:
    """Memory of one worker of a rollout replica, on a GPU of `gpu` bytes, with a push in buckets of `bucket` bytes,
    one of each sender together, which are beside the share that vLLM takes."""
    pushed = LOADED_BUCKETS * bucket
    if config.kv_cache_mib is None:
        return int(gpu * config.gpu_memory_utilization) + pushed
    width, size = BYTES[config.dtype], config.tensor_parallel_size
    tokens = config.max_num_batched_tokens or DEFAULT_BATCHED_TOKENS
    step = tokens * width * (4 * shape.hidden + 2 * shape.intermediate // size)
    sampling = 3 * config.max_num_seqs * shape.vocabulary * 4
    cache = config.kv_cache_mib << 20
    adapters = 0
    if config.adapters is not None:  # those that it computes with, of each version, and the last ones as they came
        ranks = config.adapter_versions * config.adapter_room + config.adapters.rank
        adapters = shape.adapters(ranks) * width
    return shape.parameters * width // size + adapters + cache + step + sampling + pushed + GRAPHS + CONTEXT


def footprints(deployment: Deployment, gpu: int, shape_at: Callable[[str], ModelSize]) -> list[Footprint]:
    """All processes of a deploy file on GPUs of `gpu` bytes. `shape_at` returns the sizes of a folder's model."""
    run, weights = deployment.orchestrator, deployment.orchestrator.weights
    longest, _ = run.longest_sequence
    parts = []
    bucket = bucket_bytes(shape_at(run.policy.model), run)
    arriving = arriving_bytes(shape_at(run.policy.model), run)
    for placed in deployment.placed():
        section, share = placed.section, placed.gpus
        if not share or isinstance(section, CriticConfig):
            continue
        freed = 0
        if isinstance(section, RolloutConfig):
            workers = section.tensor_parallel_size
            size = engine_bytes(section, shape_at(section.model), gpu, arriving)
            if weights.stage == "gpu":
                # Of weights received and not committed, of which several workers have a part each.
                size += copy_bytes(shape_at(section.model), section.dtype, section.adapters) // workers
            if section.colocate:
                freed = (section.kv_cache_mib or 0) << 20
        else:
            # A frozen model with several GPUs has its layers divided among them.
            workers = max(1, int(share))
            size = service_bytes(section, _divided(shape_at, workers), longest)
        parts += [Footprint(placed.name, share / workers, size, freed, TRAINING)] * workers * replicas(placed.entry)
    for name, given in deployment.learners().items():
        if given.num_gpus:
            policy, shape = name == POLICY, shape_at(given.model)
            own = bucket if policy else 0
            # A sequence is never divided: a pass holds one at least.
            config = given.model_copy(update={"micro_batch_tokens": max(given.micro_batch_tokens, longest)})
            size = rank_bytes(config, shape, logits=policy, bucket=own)
            freed = size - resting_bytes(config, shape, logits=policy, bucket=own) if config.colocate else 0
            if policy and (weights.backend == "cuda-ipc" or weights.stage == "gpu"):
                # Of the weights that are sent.
                size += copy_bytes(shape, config.dtype, run.pushed_adapters) // weights.senders
            parts += [Footprint(name, config.num_gpus, size, freed, SAMPLING)] * config.ranks
    return parts


def copy_bytes(shape: ModelSize, dtype: str, adapters: LoraConfig | None) -> int:
    """Memory of a push's copy of the weights, or of the adapters if it brings these alone."""
    return (shape.parameters if adapters is None else shape.adapters(adapters.rank)) * BYTES[dtype]


def _divided(shape_at: Callable[[str], ModelSize], count: int) -> Callable[[str], ModelSize]:
    """Sizes of the part of a model that one of `count` GPUs holds."""

    def part(path: str) -> ModelSize:
        shape = shape_at(path)
        return replace(shape, parameters=shape.parameters // count, head=shape.head // count)

    return part


def replicas(entry: Mapping[str, Any]) -> int:
    """Largest number of replicas of a deployment."""
    number = (entry.get("autoscaling_config") or {}).get("max_replicas") or entry.get("num_replicas") or 1
    return int(number) if str(number).isdigit() else AUTO_REPLICAS


def bucket_bytes(shape: ModelSize, config: OrchestratorConfig) -> int:
    """Bytes of the largest bucket of a push: a tensor is never divided, and the embeddings are the largest."""
    if config.pushed_adapters is not None:
        return config.weights.bucket_mib << 20
    return max(config.weights.bucket_mib << 20, shape.vocabulary * shape.hidden * BYTES[config.policy.dtype])


def arriving_bytes(shape: ModelSize, config: OrchestratorConfig) -> int:
    """Bytes of the largest bucket of each sender of a push. The head, unless it is the embeddings, is as large as
    they are, and may be another sender's."""
    others, own = config.weights.senders - 1, config.weights.bucket_mib << 20
    largest = bucket_bytes(shape, config)
    return largest + others * own + (largest - own if others and shape.head else 0)


def service_bytes(section: Config, shape_at: Callable[[str], ModelSize], longest: int = 0) -> int:
    """Memory of one process of a service whose models are never trained, with sequences of `longest` tokens."""
    logits = isinstance(section, ReferenceConfig)
    models = frozen_models(section)
    return sum(frozen_bytes(shape_at(each.model), each, logits=logits, longest=longest) for each in models)


def frozen_models(section: Config) -> Sequence[FrozenConfig]:
    """The models of a service that are never trained."""
    if isinstance(section, ReferenceConfig):
        return [section]
    hosted = section.hosted.values() if isinstance(section, RewardConfig) else []
    parts = (part for each in hosted for _, part in parts_of(each.scorer, ""))
    return [part for part in parts if isinstance(part, ModelScorerConfig)]


def most_on_one(parts: Sequence[Footprint], phase: str = SAMPLING) -> tuple[Footprint, ...]:
    """The processes that need most memory in a phase, of all that Ray may put on one GPU: shares of 1 together."""
    return fullest(parts, 1, lambda part: part.share, lambda part: part.during(phase))


Part = TypeVar("Part")


def fullest(
    parts: Sequence[Part], gpus: int, share: Callable[[Part], float], size: Callable[[Part], int]
) -> tuple[Part, ...]:
    """The parts that need most memory together, of all that so many GPUs have room for. One that asks for more is
    alone, as Ray would wait for it. Parts that are alike are counted, as there may be many replicas.

    Args:
        parts: parts with hashable values.
        gpus: number of GPUs.
        share: GPUs that Ray reserves for a part, more than 0.
        size: memory of a part.
    """
    # The best set for each number of GPUs in use, in ten-thousandths, as finely as Ray counts.
    best: dict[int, tuple[Part, ...]] = {0: ()}
    room = gpus * 10_000

    def total(chosen: Sequence[Part]) -> int:
        return sum(map(size, chosen))

    for part, count in Counter(parts).items():
        one = round(share(part) * 10_000)
        for _ in range(min(count, max(1, room // one))):
            for used, chosen in sorted(best.items(), reverse=True):
                more = (*chosen, part)
                if used + one <= max(room, one) and total(more) > total(best.get(used + one, ())):
                    best[used + one] = more
    return max(best.values(), key=total)


def worst_phase(parts: Sequence[Footprint]) -> tuple[str, tuple[Footprint, ...]]:
    """The phase in which one GPU may have to hold most, and the processes that it holds then."""
    worst = {phase: most_on_one(parts, phase) for phase in PHASES}
    phase = max(PHASES, key=lambda phase: sum(part.during(phase) for part in worst[phase]))
    return phase, worst[phase]


def summed(parts: Sequence[Footprint], phase: str) -> str:
    """The terms of the sum of a GPU's memory in a phase, in GiB."""
    return " + ".join(f"{part.name} {part.during(phase) / GIB:.1f}" for part in parts)


def shortage(parts: Sequence[Footprint], gpu: int) -> str:
    """A message if processes that may share a GPU of `gpu` bytes do not fit, with the sum and the largest; empty if
    they fit."""
    phase, worst = worst_phase(parts)
    total = sum(part.during(phase) for part in worst)
    if total <= gpu:
        return ""
    during = f" during {phase}" if any(part.released for part in parts) else ""
    largest = max(worst, key=lambda part: part.during(phase))
    return (
        f"one GPU may have to hold {summed(worst, phase)} = {total / GIB:.1f} GiB{during}, but has {gpu / GIB:.1f}; "
        f"raise their num_gpus so that fewer share it, or make them need less, {largest.name} first"
    )
