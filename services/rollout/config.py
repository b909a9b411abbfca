"""Configuration of the rollout service: the `args:` of its application in the YAML file."""

import re
from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from quartet.config.base import Config, Count, Dtype, Fraction, ModelPath, Seconds, Seed
from quartet.config.functions import PATH
from quartet.config.learner import LoraConfig
from quartet.config.limits import LimitsConfig, completed_by
from services.rollout.engines import ENGINES

ROOM = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Ranks of adapters for which vLLM can keep room: those of lower ones take as much as the next of these."""
DEFAULT_LENGTH = 2048
"""Default of the longest prompt + response, in tokens."""
_LIMITS = LimitsConfig(max_call_tokens=16 << 20, max_waiting_tokens=256 << 20)


def _known(engine: str) -> str:
    if engine not in ENGINES and not re.fullmatch(PATH, engine):
        raise ValueError(f"should be {' or '.join(ENGINES)}, or package.module:function, got {engine!r}")
    return engine


class RolloutConfig(Config):
    """One engine per replica."""

    engine: Annotated[str, AfterValidator(_known)] = "vllm"
    """Name of the engine (services/rollout/engines.py), or `package.module:function` of one of your own: a coroutine
    function that takes this configuration and returns an Engine (services/rollout/interface.py)."""
    model: ModelPath
    """Folder of the Hugging Face model whose weights are version 0."""
    dtype: Dtype = "float32"
    """Arithmetic of the engine: that of orchestrator.policy.dtype, whose default this is."""
    max_length: Annotated[int, Field(ge=3)] | None = None
    """Longest prompt + response, in tokens; at least 3, as the check after a push needs a prompt of two
    tokens. Null: 2048, or what the model takes if that is less."""
    max_num_seqs: Count = 256
    """Most requests in one engine step."""
    kv_cache_mib: Count | None = None
    """Memory of the KV cache in MiB, for each of the parts into which `tensor_parallel_size` divides the engine;
    required on a CPU. Null: all that gpu_memory_utilization leaves."""
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] = 0.9
    """Share of the GPU's memory for the engine."""
    tensor_parallel_size: Count = 1
    """GPUs over which one replica's engine is divided."""
    worker_process: bool = False
    """Run the model in a process beside the one that schedules, as an engine with several GPUs always does. On a GPU
    one step is then scheduled while the one before is started; in one process both take turns, which for hundreds of
    responses takes longer than the GPU computes. Not measured. The two processes speak through /dev/shm."""
    max_num_batched_tokens: Count | None = None
    """Most tokens in one engine step, prompts and responses together. Null: the default of vLLM's `LLM` on this
    machine, such as 16384 on an H100 or H200."""
    colocate: bool = False
    """Release the memory of the KV cache while the run's learners compute, if the run asks for it (`loop.colocate`)
    and there is a GPU. Weights and graphs stay there."""
    enforce_eager: bool | None = None
    """Skip graph capture and compilation, for a faster start. Null: only without a GPU, where small models run as
    fast without them."""
    tool_parser: str | None = None
    """Name of vLLM's parser that finds calls of tools in the model's answers over HTTP, such as hermes. Null:
    requests with tools are refused, unless they say that the model is to call none."""
    reasoning_parser: str | None = None
    """Name of vLLM's parser that tells the model's reasoning over HTTP from its answer, such as qwen3. Null: all is
    answer."""
    adapters: LoraConfig | None = None
    """The policy's `lora`, where a run pushes its adapters alone (`orchestrator.weights.adapters`): the engine
    computes with them beside the model's own weights, if vLLM has adapters for the model. `rank` and `target_modules`
    count; what is pushed is scaled already. Null: pushes bring all weights."""
    adapter_versions: Count = 1
    """Versions of the adapters that the engine keeps, so that each response is sampled to its end by those with which
    it began (`orchestrator.weights.in_flight: finish`, which needs one more than `loop.max_staleness`). 1: responses
    go on with the newest."""
    limits: Annotated[LimitsConfig, completed_by(_LIMITS)] = _LIMITS
    """Limits on waiting calls, and the shares of callers in them and in the engine. A row is a prompt; its tokens are
    the prompt's plus max_new_tokens. `batch_s` has no effect here: the engine's health is checked while it
    generates."""
    foreign_share: Annotated[Fraction, Field(gt=0)] = 0.05
    """Share of the engine's time that all callers outside of a run have together while the run holds the replica. An
    engine with a GPU of its own is theirs while it has nothing of the run's to do. 1: no such limit."""
    seed: Seed = 0
    """Seed of the engine, for requests without a seed."""
    weight_backend: Literal["auto", "nccl", "gloo", "ipc", "cuda-ipc"] = "auto"
    """Backend by which this replica accepts weights; auto accepts the one that orchestrator.weights.backend names."""
    join_s: Seconds = 600
    """Longest wait, in seconds, of a new replica for the weights of the current training run; then it is
    restarted."""
    max_phase_s: Seconds = 600
    """Longest deadline, in seconds, that a phase of a push may have. A paused replica that gets no further phase
    rolls back after twice the deadline of its last phase."""

    def _problems(self) -> Iterator[str]:
        if self.adapter_versions > 1 and self.adapters is None:
            yield f"adapter_versions: {self.adapter_versions}, but adapters is null; leave it out"
        if self.adapters is not None and self.engine == "vllm" and self.adapters.rank > max(ROOM):
            yield f"adapters.rank: {self.adapters.rank}; vLLM takes {max(ROOM)} at most"

    @property
    def adapter_room(self) -> int:
        """The rank for which vLLM keeps room in each of the adapters' places; 1 without adapters."""
        return min(rank for rank in ROOM if self.adapters is None or rank >= self.adapters.rank)

    @property
    def one_process(self) -> bool:
        """True if model and scheduler are in the same process."""
        return self.tensor_parallel_size == 1 and not self.worker_process

    def longest(self, limit: int) -> int:
        """Longest prompt + response, in tokens, for a model that takes `limit`."""
        return min(DEFAULT_LENGTH, limit) if self.max_length is None else self.max_length
