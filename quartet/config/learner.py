"""Configuration of a learner: the policy's and the critic's alike."""

from collections.abc import Iterator
from typing import Annotated, Any, Literal, Self

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat

from quartet.config.base import Config, Count, Dtype, Fraction, ModelPath, Seconds, Seed

REDUCE_ELEMENTS = 50_000_000
"""Elements in one bucket of gradients between ranks. DeepSpeed keeps one bucket allocated; its own default is ten
times as large, 1 GB in bfloat16 whatever the model's size. With ZeRO 1 or 2 a single copy of the model has none, as
there is nothing to average."""

GROUP_ELEMENTS = 128 << 20
"""Most parameters of one rank whose step DeepSpeed takes at once, of which it copies the gradient; one that is larger
is alone. With ZeRO 3 the rank's share of one weight more."""


class OptimizerConfig(Config):
    """AdamW and its schedule."""

    learning_rate: PositiveFloat
    """Peak learning rate."""
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = (0.9, 0.95)
    """Decay of the running means of the gradient and of its square."""
    eps: PositiveFloat = 1e-8
    """Added to the denominator."""
    weight_decay: NonNegativeFloat = 0.0
    """Decoupled weight decay."""
    warmup_steps: NonNegativeInt = 0
    """Optimizer steps over which the rate rises linearly from zero."""
    schedule: Literal["constant", "cosine"] = "constant"
    """After the warm-up: stay, or fall along a half cosine to `final_fraction` at `total_steps`."""
    total_steps: Count | None = None
    """Optimizer steps (not PPO steps) at which the cosine ends. For the policy it may be left out: then it is
    computed from the run's length, and `quartet check` warns of a value that differs. The critic, which does not know
    the run's length, needs it."""
    final_fraction: Fraction = 0.1
    """Rate at the end of the cosine, as a fraction of the peak."""
    max_grad_norm: PositiveFloat = 1.0
    """Gradients are scaled down to this global norm."""

    def for_steps(self, steps: int) -> Self:
        """The same for a run of so many optimizer steps, with which a schedule without an end ends."""
        if self.schedule == "constant" or self.total_steps is not None:
            return self
        return self.model_copy(update={"total_steps": steps})

    def _problems(self) -> Iterator[str]:
        if self.total_steps is not None and self.warmup_steps >= self.total_steps:
            yield "warmup_steps must be less than total_steps"


class LoraConfig(Config):
    """Low-rank adapters (Hu et al. 2021, arXiv:2106.09685). Only the adapters are trained; saved models have them
    merged in, and pushed ones unless `orchestrator.weights.adapters` is true."""

    rank: Count = 16
    """Rank of each adapter."""
    alpha: PositiveFloat = 32
    """The adapters' product is scaled by alpha / rank."""
    target_modules: tuple[str, ...] | None = None
    """Last part of the names of the layers that get one, such as q_proj. Null: every linear layer but the head."""
    seed: Seed = 0
    """Seed of the adapters' initial weights. Their product begins at zero."""


class TensorParallelConfig(Config):
    """Each layer's heads and weights divided among ranks (Megatron-LM, arXiv:1909.08053), by DeepSpeed's AutoTP."""

    size: Count = 1
    """Ranks that share one copy of the model. They get the same sequences and communicate twice per layer and
    pass."""


class LearnerConfig(Config):
    """A model that is trained, by DeepSpeed, on one rank (process) or several. docs/learner.md compares layouts."""

    model: ModelPath
    """Folder of the Hugging Face model to start from."""
    dtype: Dtype = "float32"
    """Arithmetic of the forward and backward pass. bfloat16 keeps fp32 master weights and requires zero_stage 1
    or higher. All services have the default float32, in which learner and engine agree to rounding and which runs on
    every machine; on a GPU set bfloat16 for all of them."""
    attn_implementation: Literal["sdpa", "eager", "flash_attention_2"] = "sdpa"
    """Attention: torch's fused kernel, transformers' plain one, or FlashAttention 2, which requires a GPU, the
    package flash-attn and dtype bfloat16."""
    optimizer: OptimizerConfig
    """AdamW and its schedule."""
    ranks: Count = 1
    """Processes that train the model together. Each takes whole sequences of every minibatch; with tensor_parallel,
    each group of ranks does. Results are the same for any number, up to rounding."""
    zero_stage: Literal[0, 1, 2, 3] = 0
    """DeepSpeed ZeRO stage: what is divided among the ranks. 0 nothing, 1 the optimizer states, 2 also the gradients,
    3 also the parameters, which are then gathered layer by layer in each pass."""
    zero_persist_below: NonNegativeInt = 10_000
    """ZeRO 3 keeps parameters of fewer elements (norms, biases) whole on every rank: gathering them costs more than
    dividing them saves."""
    adam_offload: bool = False
    """Keep fp32 master weights and Adam's moments in host memory and run AdamW on the CPU. Requires zero_stage 1 or
    higher."""
    param_offload: bool = False
    """Keep the parameters themselves in host memory between uses. Requires zero_stage 3."""
    colocate: bool = False
    """Keep fp32 master weights and Adam's moments in pinned host memory except during an update, so that other
    processes can use the GPU's memory meanwhile. AdamW still runs on the GPU. Requires zero_stage 1 or 2."""
    tensor_parallel: TensorParallelConfig = TensorParallelConfig()
    """Division of the layers. `ranks` is a multiple of its size. The quotient is the number of copies of the model;
    they share each minibatch, and ZeRO divides among them."""
    micro_batch_tokens: Count = 16_384
    """Most tokens, padding included, in one forward and backward pass of a rank. Gradients of larger minibatches are
    accumulated over several passes, sequences of similar length together."""
    packing: bool = False
    """Put the sequences of a micro-batch one after another in a single row, without padding; each attends only to
    itself. With sdpa a prompt that several responses share is computed once. Requires attn_implementation sdpa or
    flash_attention_2. docs/learner.md says when it pays."""
    lora: LoraConfig | None = None
    """Train low-rank adapters instead of the weights. The critic's value head is trained whole. Null: all weights."""
    freeze_attention: bool = False
    """Leave the weights of all attention layers as they are, and train the others: SAO's critic. It saves their
    gradients and optimizer state, which the sums of memory count all the same."""
    ema_decay: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Keep a running mean of the weights, mean = decay * mean + (1 - decay) * weights after each optimizer step, in
    fp32 and in each rank's host memory (with ZeRO 3 the rank's share of it). Saved models hold the mean, and
    `quartet sft` and `quartet reward-model` evaluate it; training and pushes use the weights. Null: no mean."""
    gradient_checkpointing: bool | Literal["auto"] = False
    """Recompute activations in the backward pass: less memory, about a third more time. auto: only where the sums of
    `orchestrator.gpu_gib` do not fit without, or where it is not given; never on a CPU. `quartet check` prints which.
    It is decided by `quartet up` and `quartet train`; a critic deployed in another way recomputes with auto."""
    compile_layers: bool = False
    """Have torch compile the layers of the model, so that they need fewer kernels: faster on a GPU, after a minute or
    so at the first passes, and equal up to rounding. Needs a C compiler, attn_implementation sdpa or eager,
    zero_stage 2 or lower and tensor_parallel.size 1; not for mixtures of experts."""
    num_cpus: NonNegativeFloat = 1
    """Logical CPUs that Ray reserves for each rank."""
    num_gpus: NonNegativeFloat = 0
    """GPUs that Ray reserves for each rank, 1 or less. With several ranks more than 0.5: Ray would put two smaller
    ones on the same GPU, which NCCL refuses. docs/placement.md."""
    resources: dict[str, PositiveFloat] = Field(default_factory=dict)
    """Custom resources that Ray reserves for each rank, to tie it to the nodes that were started with them."""
    env_vars: dict[str, str] = Field(default_factory=dict)
    """Environment of each rank's process, for instance OMP_NUM_THREADS."""
    rank_timeout_s: Seconds = 1800
    """Longest time that a rank waits for the others, in seconds; then it fails."""

    @property
    def place_without_ranks(self) -> list[str]:
        """Given keys that say where ranks run, where a single one runs in the process that makes it."""
        places = {"num_cpus", "num_gpus", "resources", "env_vars"}
        return sorted(places & self.model_fields_set) if self.ranks == 1 else []

    @property
    def copies(self) -> int:
        """Copies of the model, among which ZeRO divides."""
        return self.ranks // self.tensor_parallel.size

    @property
    def recomputes(self) -> bool:
        """True if activations are recomputed; also with auto, as long as it is not decided."""
        return bool(self.gradient_checkpointing)

    @property
    def shares_prompts(self) -> bool:
        """True if a packed row computes a prompt once for several responses. FlashAttention, as transformers calls
        it, knows whole sequences only."""
        return self.packing and self.attn_implementation == "sdpa"

    def _problems(self) -> Iterator[str]:
        if self.dtype == "bfloat16" and self.zero_stage == 0:
            yield "dtype bfloat16 with zero_stage 0 drifts from fp32; set zero_stage to 1"
        if self.adam_offload and self.zero_stage == 0:
            yield "adam_offload is part of ZeRO; set zero_stage to 1, 2 or 3"
        if self.param_offload and self.zero_stage != 3:
            yield "param_offload is part of ZeRO 3; set zero_stage to 3"
        if self.colocate and self.zero_stage not in (1, 2):
            yield f"colocate needs zero_stage 1 or 2; it is {self.zero_stage}"
        if self.colocate and self.adam_offload:
            yield "colocate: adam_offload always keeps the same state in host memory; leave out one of them"
        size = self.tensor_parallel.size
        if self.ranks % size:
            yield f"ranks must be a multiple of tensor_parallel.size {size}, got {self.ranks}"
        if size > 1 and self.lora:
            yield "lora goes with tensor_parallel.size 1 only; adapters are not divided"
        if self.freeze_attention and self.lora:
            yield "freeze_attention: adapters leave all weights as they are; leave out one of the two"
        if self.freeze_attention and size > 1:
            yield "freeze_attention goes with tensor_parallel.size 1 only"
        if self.packing and self.attn_implementation == "eager":
            yield "packing needs attn_implementation sdpa or flash_attention_2; eager mixes the sequences"
        if self.attn_implementation == "flash_attention_2" and self.dtype != "bfloat16":
            yield "attn_implementation flash_attention_2 computes in half precision; set dtype to bfloat16"
        if self.compile_layers and (self.zero_stage == 3 or size > 1):
            yield (
                "compile_layers: layers that are divided among ranks are not compiled; set it to false, or set "
                "zero_stage to 2 or lower and tensor_parallel.size to 1"
            )
        if self.compile_layers and self.attn_implementation == "flash_attention_2":
            yield "compile_layers goes with attn_implementation sdpa or eager; set one of these, or it to false"
        if self.num_gpus > 1:
            yield f"num_gpus ({self.num_gpus:g}) must be 1 or less: a rank computes on one GPU; set ranks"
        if self.ranks > 1 and 0 < self.num_gpus <= 0.5:
            yield (
                f"num_gpus ({self.num_gpus:g}) must be more than 0.5 with several ranks, or Ray puts two of them on "
                "one GPU, which NCCL refuses"
            )


class PolicyConfig(LearnerConfig):
    """The policy learner: DeepSpeed in Ray actors of the orchestrator, one for each rank."""


def describe(config: LearnerConfig) -> dict[str, Any]:
    """The DeepSpeed configuration that `config` stands for.

    Accumulation is driven by hand, so that a minibatch may hold any number of micro-batches: DeepSpeed is told 1.
    """
    optimizer = config.optimizer
    size = config.tensor_parallel.size
    return {
        **({"tensor_parallel": {"autotp_size": size, "vocab_parallel_lm_head": False}} if size > 1 else {}),
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": optimizer.max_grad_norm,
        "zero_optimization": _zero(config),
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
                # torch's fused AdamW, on GPU and CPU alike: DeepSpeed's own are compiled on first use, for minutes.
                "torch_adam": True,
                "fused": True,
            },
        },
    }


def _zero(config: LearnerConfig) -> dict[str, Any]:
    # A model of which there is one copy has no gradients to average. What does not fit into the bucket is not copied
    # into it; with adam_offload it is copied once all the same.
    alone = config.copies == 1 and config.zero_stage in (1, 2)
    zero: dict[str, Any] = {"stage": config.zero_stage, "reduce_bucket_size": 1 if alone else REDUCE_ELEMENTS}
    if config.adam_offload:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
    if config.param_offload:
        zero["offload_param"] = {"device": "cpu", "pin_memory": True}
    if config.zero_stage == 3:
        zero["stage3_param_persistence_threshold"] = config.zero_persist_below
        if not config.adam_offload:
            zero["sub_group_size"] = GROUP_ELEMENTS
    return zero
