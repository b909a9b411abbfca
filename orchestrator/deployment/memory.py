"""Sums of the GPU memory that a deploy file needs, per process, so that a file that cannot fit is refused early.

Weights, gradients, optimizer and KV cache are exact; activations and libraries are estimates, rather high than low.
"""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import torch

from orchestrator.deployment.file import Deployment
from services.common.config.base import Config
from services.common.config.learner import LearnerConfig
from services.critic.config import CriticConfig
from services.reference.config import ReferenceConfig
from services.reward.config import BlendScorerConfig, ModelScorerConfig, RewardConfig, ScorerConfig
from services.rollout.config import RolloutConfig

GIB = 1 << 30
CONTEXT = GIB * 7 // 10
"""Memory of CUDA itself in each process, with the code of its kernels."""
GRAPHS = GIB
"""Memory of vLLM's captured graphs."""
CHUNKS = 3 * (1 << 29)
"""Memory of the log-probs of a piece of the logits in float32, with the backward pass's copies
(models/numerics.py)."""
DEFAULT_BATCHED_TOKENS = 16_384
"""Tokens in one step of vLLM on a large GPU, by default."""
BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes of a model that determine its memory."""

    parameters: int
    layers: int
    hidden: int
    intermediate: int
    vocabulary: int

    @classmethod
    def of(cls, config: Any) -> "Shape":
        """Sizes from a transformers configuration of a causal language model. Allocates nothing."""
        from transformers import AutoModelForCausalLM

        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
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
class Part:
    """One process and the GPU memory that it needs."""

    name: str
    share: float
    """Share of a GPU that Ray reserves for it."""
    size: int
    """Memory in bytes."""

    def __str__(self) -> str:
        return f"{self.name} {self.size / GIB:.1f}"


def learner_bytes(config: LearnerConfig, shape: Shape, *, logits: bool) -> int:
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
    # Memory of the logits and of their gradient.
    head = 2 * tokens * shape.vocabulary * width + CHUNKS if logits else 0
    return weights + gradients + optimizer + activations + head + CONTEXT


def frozen_bytes(shape: Shape, dtype: str, tokens: int, *, logits: bool) -> int:
    """Memory of a reference or reward model with passes of `tokens` tokens."""
    width = BYTES[dtype]
    head = tokens * shape.vocabulary * width + CHUNKS if logits else 0
    return shape.parameters * width + shape.layer(tokens, width) + head + CONTEXT


def engine_bytes(config: RolloutConfig, shape: Shape, gpu: int) -> int:
    """Memory of one worker of a rollout replica, on a GPU of `gpu` bytes."""
    if config.kv_cache_mib is None:
        return int(gpu * config.gpu_memory_utilization)
    width, size = BYTES[config.dtype], config.tensor_parallel_size
    tokens = config.max_num_batched_tokens or DEFAULT_BATCHED_TOKENS
    step = tokens * width * (4 * shape.hidden + 2 * shape.intermediate // size)
    sampling = 3 * config.max_num_seqs * shape.vocabulary * 4
    cache = config.kv_cache_mib << 20
    return shape.parameters * width // size + cache + step + sampling + GRAPHS + CONTEXT


def parts_of(deployment: Deployment, gpu: int, shape_at: Callable[[str], Shape]) -> list[Part]:
    """All processes of a deploy file on GPUs of `gpu` bytes. `shape_at` returns the sizes of the model in a
    folder."""
    parts = []
    for application in deployment.raw.get("applications") or []:
        name = str(application.get("name"))
        section = deployment.services.get(name)
        for entry in application.get("deployments") or []:
            share = float((entry.get("ray_actor_options") or {}).get("num_gpus") or 0)
            if section is None or not share:
                continue
            workers = section.tensor_parallel_size if isinstance(section, RolloutConfig) else 1
            one = Part(name, share / workers, service_bytes(section, gpu, shape_at))
            parts += [one] * workers * int(entry.get("num_replicas") or 1)
    learners: dict[str, LearnerConfig] = {"policy": deployment.orchestrator.policy}
    learners |= {name: s for name, s in deployment.services.items() if isinstance(s, CriticConfig) and s.ranks > 1}
    for name, config in learners.items():
        size = learner_bytes(config, shape_at(config.model), logits=name == "policy") if config.num_gpus else 0
        parts += [Part(name, config.num_gpus, size)] * config.ranks
    return [part for part in parts if part.share]


def service_bytes(section: Config, gpu: int, shape_at: Callable[[str], Shape]) -> int:
    """Memory of one process of a service."""
    if isinstance(section, RolloutConfig):
        return engine_bytes(section, shape_at(section.model), gpu)
    if isinstance(section, CriticConfig):
        return learner_bytes(section, shape_at(section.model), logits=False)
    if isinstance(section, ReferenceConfig):
        return frozen_bytes(shape_at(section.model), section.dtype, section.batch_tokens, logits=True)
    if isinstance(section, RewardConfig):
        models = _models(section.scorer)
        return sum(frozen_bytes(shape_at(m.model), m.dtype, m.batch_tokens, logits=False) for m in models)
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
    shape_at = functools.cache(lambda path: Shape.of(configs[path]))
    for problem in shortage(parts_of(deployment, int(gib * GIB), shape_at), int(gib * GIB)):
        yield f"orchestrator.gpu_gib: {problem}"


def most_on_one(parts: Sequence[Part]) -> tuple[Part, ...]:
    """The processes that need most memory among all that Ray may put on one GPU (shares that add up to 1 or less)."""
    able = [
        chosen
        for count in range(1, len(parts) + 1)
        for chosen in combinations(parts, count)
        # Allows for rounding, since shares are decimal fractions.
        if count == 1 or sum(part.share for part in chosen) <= 1 + 1e-9
    ]
    return max(able, key=lambda chosen: sum(part.size for part in chosen), default=())


def shortage(parts: Sequence[Part], gpu: int) -> Iterator[str]:
    """A message if processes that may share a GPU of `gpu` bytes do not fit, with the sum."""
    worst = most_on_one([part for part in parts if part.share > 0])
    total = sum(part.size for part in worst)
    if total > gpu:
        names = " + ".join(str(part) for part in worst)
        yield f"one GPU may have to hold {names} = {total / GIB:.1f} GiB, and has {gpu / GIB:.1f}"
