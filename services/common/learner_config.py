"""Configuration of a learner: the policy's and the critic's alike."""

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from services.common.config import Config, Dtype, ModelPath

Count = Annotated[int, Field(ge=1)]


class OptimizerConfig(Config):
    """AdamW and its schedule."""

    learning_rate: Annotated[float, Field(gt=0)]
    """Peak learning rate."""
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = (0.9, 0.95)
    """Decay of the running means of the gradient and of its square."""
    eps: Annotated[float, Field(gt=0)] = 1e-8
    """Added to the denominator."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """Decoupled weight decay."""
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """Optimizer steps over which the rate rises linearly from zero."""
    schedule: Literal["constant", "cosine"] = "constant"
    """After the warm-up: stay, or fall along a half cosine to `final_fraction` at `total_steps`."""
    total_steps: Count | None = None
    """Optimizer steps (not PPO steps) at which the cosine ends. Required by it."""
    final_fraction: Annotated[float, Field(ge=0, le=1)] = 0.1
    """Rate at the end of the cosine, as a fraction of the peak."""
    max_grad_norm: Annotated[float, Field(gt=0)] = 1.0
    """Gradients are scaled down to this global norm."""

    @model_validator(mode="after")
    def _cosine_ends(self) -> Self:
        if self.schedule == "cosine" and self.total_steps is None:
            raise ValueError("total_steps is required by schedule: cosine")
        if self.total_steps is not None and self.warmup_steps >= self.total_steps:
            raise ValueError("warmup_steps must be less than total_steps")
        return self


class LearnerConfig(Config):
    """A model that is trained, by DeepSpeed."""

    model: ModelPath
    """Folder of the Hugging Face model to start from."""
    dtype: Dtype = "float32"
    """Arithmetic of the forward and backward pass. bfloat16 keeps fp32 master weights and wants zero_stage >= 1."""
    optimizer: OptimizerConfig
    """AdamW and its schedule."""
    zero_stage: Literal[0, 1] = 0
    """DeepSpeed ZeRO: 0 none, 1 shards the optimizer states. Stages 2 and 3 arrive with more ranks."""
    micro_batch_tokens: Count = 16_384
    """Most tokens, padding included, in one forward and backward pass. A minibatch of more is accumulated."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, about a third more time."""

    @model_validator(mode="after")
    def _bf16_needs_zero(self) -> Self:
        if self.dtype == "bfloat16" and self.zero_stage == 0:
            raise ValueError("dtype bfloat16 with zero_stage 0 drifts from fp32; set zero_stage to 1")
        return self


class PolicyConfig(LearnerConfig):
    """The policy learner: DeepSpeed in a Ray actor of the orchestrator."""

    num_cpus: Annotated[float, Field(ge=0)] = 1
    """Logical CPUs that Ray reserves for it."""
    num_gpus: Annotated[float, Field(ge=0)] = 0
    """GPUs that Ray reserves for it."""
    env_vars: dict[str, str] = Field(default_factory=dict)
    """Environment of its process, for instance OMP_NUM_THREADS."""


def describe(config: LearnerConfig) -> dict[str, Any]:
    """The DeepSpeed configuration that `config` stands for.

    Accumulation is driven by hand, so that a minibatch may hold any number of micro-batches: DeepSpeed is told 1.
    """
    optimizer = config.optimizer
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": optimizer.max_grad_norm,
        "zero_optimization": {"stage": config.zero_stage},
        "bf16": {"enabled": config.dtype == "bfloat16"},
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 10**9,
        "optimizer": {
            "type": "AdamW",
            "params": {
                "lr": optimizer.learning_rate,
                "betas": list(optimizer.betas),
                "eps": optimizer.eps,
                "weight_decay": optimizer.weight_decay,
                # FusedAdam would be compiled for minutes, on machines without a GPU too.
                "torch_adam": True,
            },
        },
    }
