"""Configuration of a model that is never trained: the reference's, and a reward model's."""

from typing import Self

from pydantic import NonNegativeFloat, NonNegativeInt, model_validator

from quartet.config.base import Config, Count, Dtype, ModelPath


class FrozenConfig(Config):
    """A frozen model and the device memory it may use."""

    model: ModelPath
    """Folder of the Hugging Face model."""
    dtype: Dtype = "float32"
    """Arithmetic of the forward pass. The reference's is that of orchestrator.policy.dtype, whose default this is."""
    batch_tokens: Count = 16_384
    """Most tokens, padding included, in one forward pass."""
    packing: bool = False
    """Put the sequences of a forward pass one after another in a single row, without padding; each attends only to
    itself. Without it sequences of similar length are padded together. Architectures with windows, chunks, recurrent
    layers or capped scores are refused."""
    compile_layers: bool = False
    """Have torch compile the layers of the model, so that they need fewer kernels: faster on a GPU, after a minute or
    so at the first passes, and equal up to rounding. Needs a C compiler; not for mixtures of experts."""
    kept_tokens: NonNegativeInt = 0
    """Most tokens of unfinished responses whose keys and values are kept, so that a response's beginning is computed
    while the rest is still sampled. A token takes what it takes in a KV cache, on a CPU in float32. Needs packing,
    and no offload; with several replicas few responses are continued by the one that began them. 0: calls about
    unfinished responses are answered at once and compute nothing."""
    offload: bool = False
    """Keep the weights in host memory, pinned, and on the GPU only while they are used, which leaves its memory to
    other processes meanwhile. Does nothing on a CPU."""
    offload_after_s: NonNegativeFloat = 2.0
    """With offload: seconds without a batch after which the weights leave the GPU. 0: after every batch."""

    @model_validator(mode="after")
    def _fitting_kept_tokens(self) -> Self:
        if self.kept_tokens and not self.packing:
            raise ValueError(
                f"kept_tokens: {self.kept_tokens} needs packing; set packing to true, or kept_tokens to 0"
            )
        if self.kept_tokens and self.offload:
            raise ValueError(
                f"kept_tokens: {self.kept_tokens} would stay on the GPU; set offload to false, or kept_tokens to 0"
            )
        return self

    @property
    def idle_s(self) -> float | None:
        """Seconds without a batch after which the weights leave the GPU; None: never."""
        return self.offload_after_s if self.offload else None
