"""Configuration of the rollout service: the `args:` of its application in the YAML file."""

from typing import Annotated, Literal

from pydantic import Field

from services.common.config import Config, Dtype, ModelPath, Seconds

Count = Annotated[int, Field(ge=1)]


class RolloutConfig(Config):
    """One vLLM engine per replica."""

    model: ModelPath
    """Folder of the Hugging Face model whose weights are version 0."""
    dtype: Dtype = "bfloat16"
    """Arithmetic of the engine. Use the learner's, so that their log-probs agree."""
    max_length: Count = 2048
    """Longest prompt + response, in tokens."""
    max_num_seqs: Count = 256
    """Most requests in one engine step."""
    kv_cache_mib: Count | None = None
    """Memory of the KV cache in MiB. Null: what gpu_memory_utilization leaves; required on a CPU."""
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] = 0.9
    """Share of the GPU's memory for the engine."""
    tensor_parallel_size: Count = 1
    """GPUs that one replica's engine is spread over."""
    enforce_eager: bool = True
    """Skip graph capture and compilation: a quicker start and, for small models on a CPU, no slower."""
    seed: int = 0
    """Of requests that bring no seed."""
    weight_backend: Literal["auto", "nccl", "gloo", "ipc"] = "auto"
    """How weights arrive: by vLLM's nccl engine; by gloo, which also serves GPUs without NCCL; or ipc, in host memory
    that the learner shares with the replicas of its machine. auto: nccl where there is an NVIDIA GPU, else gloo."""
    host: str = "127.0.0.1"
    """This machine's address as the learner reaches it; gloo connections listen there."""
    join_s: Seconds = 600
    """Longest wait of a new replica for the weights of a training run that goes on, before it gives up and is
    restarted."""
