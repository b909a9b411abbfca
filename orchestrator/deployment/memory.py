"""Sums of the GPU memory that a deploy file needs, per process, so that a file that cannot fit is refused early.

Weights, gradients, optimizer and KV cache are exact; activations and libraries are estimates, rather high than low.
"""

import functools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from orchestrator.deployment.file import Deployment
from services.common.config.base import GIB, Config, ConfigError
from services.common.config.frozen import FrozenConfig
from services.common.config.learner import LearnerConfig
from services.common.models.reading import reading
from services.critic.config import CriticConfig
from services.reference.config import ReferenceConfig
from services.reward.config import BlendScorerConfig, ModelScorerConfig, RewardConfig, ScorerConfig
from services.rollout.config import RolloutConfig

CONTEXT = GIB * 7 // 10
"""Memory of CUDA itself in each process, with the code of its kernels."""
GRAPHS = GIB
"""Memory of vLLM's captured graphs."""
CHUNKS = 3 * (1 << 29)
"""Memory of the log-probs of a tile of the logits in float32, with the backward pass's copies (models/tiles.py)."""
DEFAULT_BATCHED_TOKENS = 16_384
"""Tokens in one step of vLLM on a large GPU, by default."""
AUTO_REPLICAS = 100
"""Most replicas of Serve's `num_replicas: auto`."""
BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True)
class ModelSize:
    """The sizes of a model that determine its memory."""

    parameters: int
    layers: int
    hidden: int
    intermediate: int
    vocabulary: int

    @classmethod
    def of(cls, config: Any) -> "ModelSize":
        """Sizes from a transformers configuration of a causal language model. Allocates nothing. ConfigError if it
        describes no such model."""
        from transformers import AutoModelForCausalLM

        with reading(f"model: {config.name_or_path} does not describe a language model"), torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
        intermediate = int(getattr(config, "intermediate_size", None) or 4 * config.hidden_size)
        return cls(
            parameters=sum(parameter.numel() for parameter in model.parameters()),
            layers=int(config.num_hidden_layers),
            hidden=int(config.hidden_size),
            intermediate=intermediate,
            vocabulary=int(config.vocab_size),
        )

    def layer(self, tokens: int, width: int) -> int:
        """Bytes that one layer keeps for the backward pass, with numbers of `width` bytes."""
        return tokens * width * (10 * self.hidden + 4 * self.intermediate)

    def adapters(self, rank: int) -> int:
        """Upper bound of the parameters of low-rank adapters on all linear layers."""
        return self.layers * rank * (8 * self.hidden + 3 * (self.hidden + self.intermediate))


@dataclass(frozen=True, slots=True)
class Footprint:
    """One process and the GPU memory that it needs."""

    name: str
    share: float
    """Share of a GPU that Ray reserves for it."""
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


def learner_bytes(config: LearnerConfig, shape: ModelSize, *, logits: bool) -> int:
    """Peak memory of one rank of a learner. `logits` is True for a language model, False for a value model."""
    width, tokens = BYTES[config.dtype], config.micro_batch_tokens
    copies = config.ranks // config.tensor_parallel.size
    number = shape.parameters // config.tensor_parallel.size
    trained = shape.adapters(config.lora.rank) if config.lora else number
    # In half precision the optimizer keeps a second copy of the weights.
    states = trained * (8 if config.dtype == "float32" else 12)
    weights = 0 if config.param_offload else number * width // (copies if config.zero_stage == 3 else 1)
    gradients = trained * width // (copies if config.zero_stage >= 2 else 1)
    optimizer = 0 if config.adam_offload else states // (copies if config.zero_stage >= 1 else 1)
    kept = shape.layer(tokens, width)
    if config.gradient_checkpointing:
        activations = kept + shape.layers * tokens * shape.hidden * width
    else:
        activations = kept * shape.layers
    # A head that is divided among ranks gives logits, which have a gradient.
    whole = 2 * tokens * shape.vocabulary * width if config.tensor_parallel.size > 1 else 0
    head = whole + CHUNKS if logits else 0
    return weights + gradients + optimizer + activations + head + CONTEXT


def resting_bytes(config: LearnerConfig, shape: ModelSize) -> int:
    """Memory of one rank of a learner with `colocate` between its updates: its weights, and for a critic a forward
    pass. Such a learner is on ZeRO 1 or 2, where every rank has all weights."""
    width = BYTES[config.dtype]
    number = shape.parameters // config.tensor_parallel.size
    return number * width + shape.layer(config.micro_batch_tokens, width) + CONTEXT


def frozen_bytes(shape: ModelSize, config: FrozenConfig, *, logits: bool) -> int:
    """Memory of a reference or reward model. What it keeps is there twice during a pass that continues it."""
    width, tokens = BYTES[config.dtype], config.batch_tokens
    head = CHUNKS if logits else 0
    kept = 2 * config.kept_tokens * 2 * shape.layers * shape.hidden * width
    return shape.parameters * width + shape.layer(tokens, width) + head + kept + CONTEXT


def engine_bytes(config: RolloutConfig, shape: ModelSize, gpu: int) -> int:
    """Memory of one worker of a rollout replica, on a GPU of `gpu` bytes."""
    if config.kv_cache_mib is None:
        return int(gpu * config.gpu_memory_utilization)
    width, size = BYTES[config.dtype], config.tensor_parallel_size
    tokens = config.max_num_batched_tokens or DEFAULT_BATCHED_TOKENS
    step = tokens * width * (4 * shape.hidden + 2 * shape.intermediate // size)
    sampling = 3 * config.max_num_seqs * shape.vocabulary * 4
    cache = config.kv_cache_mib << 20
    return shape.parameters * width // size + cache + step + sampling + GRAPHS + CONTEXT


def footprints(deployment: Deployment, gpu: int, shape_at: Callable[[str], ModelSize]) -> list[Footprint]:
    """All processes of a deploy file on GPUs of `gpu` bytes. `shape_at` returns the sizes of a folder's model."""
    weights = deployment.orchestrator.weights
    parts = []
    for application in deployment.raw.get("applications") or []:
        name = str(application.get("name"))
        section = deployment.services.get(name)
        for entry in application.get("deployments") or []:
            share = float((entry.get("ray_actor_options") or {}).get("num_gpus") or 0)
            if section is None or not share:
                continue
            workers = section.tensor_parallel_size if isinstance(section, RolloutConfig) else 1
            size = service_bytes(section, gpu, shape_at)
            if isinstance(section, RolloutConfig) and weights.stage == "gpu":
                size += copy_bytes(section, shape_at)  # of weights received and not committed
            one = Footprint(name, share / workers, size, *released(section, shape_at))
            parts += [one] * workers * _replicas(entry)
    learners: dict[str, LearnerConfig] = {"policy": deployment.orchestrator.policy}
    learners |= {name: s for name, s in deployment.services.items() if isinstance(s, CriticConfig) and s.ranks > 1}
    for name, config in learners.items():
        if config.num_gpus:
            size = learner_bytes(config, shape_at(config.model), logits=name == "policy")
            if name == "policy" and (weights.backend == "cuda-ipc" or weights.stage == "gpu"):
                size += copy_bytes(config, shape_at) // weights.senders  # of the weights that are sent
            parts += [Footprint(name, config.num_gpus, size, *released(config, shape_at))] * config.ranks
    return parts


def copy_bytes(config: LearnerConfig | RolloutConfig, shape_at: Callable[[str], ModelSize]) -> int:
    """Memory of a push's copy of the weights."""
    return shape_at(config.model).parameters * BYTES[config.dtype]


def _replicas(entry: Mapping[str, Any]) -> int:
    """Largest number of replicas of a deployment."""
    number = (entry.get("autoscaling_config") or {}).get("max_replicas") or entry.get("num_replicas") or 1
    return int(number) if str(number).isdigit() else AUTO_REPLICAS


def released(section: Config, shape_at: Callable[[str], ModelSize]) -> tuple[int, str]:
    """The memory that a process with `colocate` gives to others, and in which phase; without it none."""
    if isinstance(section, RolloutConfig) and section.colocate:
        return (section.kv_cache_mib or 0) << 20, TRAINING
    if isinstance(section, LearnerConfig) and section.colocate:
        shape, policy = shape_at(section.model), not isinstance(section, CriticConfig)
        return learner_bytes(section, shape, logits=policy) - resting_bytes(section, shape), SAMPLING
    return 0, ""


def service_bytes(section: Config, gpu: int, shape_at: Callable[[str], ModelSize]) -> int:
    """Memory of one process of a service."""
    if isinstance(section, RolloutConfig):
        return engine_bytes(section, shape_at(section.model), gpu)
    if isinstance(section, CriticConfig):
        return learner_bytes(section, shape_at(section.model), logits=False)
    if isinstance(section, ReferenceConfig):
        return frozen_bytes(shape_at(section.model), section, logits=True)
    if isinstance(section, RewardConfig):
        return sum(frozen_bytes(shape_at(m.model), m, logits=False) for m in _models(section.scorer))
    return 0


def _models(scorer: ScorerConfig) -> list[ModelScorerConfig]:
    if isinstance(scorer, BlendScorerConfig):
        return [model for part in scorer.parts for model in _models(part.scorer)]
    return [scorer] if isinstance(scorer, ModelScorerConfig) else []


def problems(deployment: Deployment, configs: Mapping[str, Any]) -> Iterator[str]:
    """Processes that may share a GPU but do not fit into orchestrator.gpu_gib, if that is given. `configs` maps
    folders to transformers' configurations; if one is None, which is reported elsewhere, nothing is checked."""
    gib = deployment.orchestrator.gpu_gib
    if gib is None or None in configs.values():
        return
    shape_at = functools.cache(lambda path: ModelSize.of(configs[path]))
    try:
        parts = list(footprints(deployment, int(gib * GIB), shape_at))
    except ConfigError as error:
        yield str(error)
        return
    for problem in shortage(parts, int(gib * GIB)):
        yield f"orchestrator.gpu_gib: {problem}"


def most_on_one(parts: Sequence[Footprint], phase: str = SAMPLING) -> tuple[Footprint, ...]:
    """The processes that need most memory in a phase, of all that Ray may put on one GPU: shares of 1 together."""
    return max(
        _sets(list(Counter(parts).items()), 1.0), key=lambda chosen: sum(part.during(phase) for part in chosen)
    )


def _sets(parts: list[tuple[Footprint, int]], room: float) -> Iterator[tuple[Footprint, ...]]:
    """Every set of processes, given with their numbers, whose shares fit into `room`; one with a larger share than a
    GPU is alone. Processes that are alike count once, as there may be many replicas."""
    if not parts:
        yield ()
        return
    (part, number), *others = parts
    # Allows for rounding, since shares are decimal fractions.
    most = min(number, int((room + 1e-9) / part.share))
    for count in range(most + 1):
        for rest in _sets(others, room - count * part.share):
            yield (part,) * count + rest
    if part.share > 1 and room == 1:
        yield (part,)


def shortage(parts: Sequence[Footprint], gpu: int) -> Iterator[str]:
    """A message if processes that may share a GPU of `gpu` bytes do not fit, with the sum."""
    shared = [part for part in parts if part.share > 0]
    phase = max(PHASES, key=lambda phase: sum(part.during(phase) for part in most_on_one(shared, phase)))
    worst = most_on_one(shared, phase)
    total = sum(part.during(phase) for part in worst)
    if total > gpu:
        names = " + ".join(f"{part.name} {part.during(phase) / GIB:.1f}" for part in worst)
        during = f" during {phase}" if any(part.released for part in shared) else ""
        yield (
            f"one GPU may have to hold {names} = {total / GIB:.1f} GiB{during}, but has {gpu / GIB:.1f}; raise their "
            "num_gpus so that fewer share it, or make them need less"
        )
