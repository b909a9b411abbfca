"""Configuration of a model that is never trained: the reference's, and a reward model's."""

from pydantic import NonNegativeFloat

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
    itself, and a prompt that several responses share is computed once. Without it sequences of similar length are
    padded together. Architectures with windows, chunks, recurrent layers or capped scores are refused."""
    compile_layers: bool = False
    """Have torch compile the layers of the model, so that they need fewer kernels: faster on a GPU, after a minute or
    so at the first passes, and equal up to rounding. Needs a C compiler; not for mixtures of experts."""
    offload: bool = False
    """Keep the weights in host memory, pinned, and on the GPU only while they are used, which leaves its memory to
    other processes meanwhile. Does nothing on a CPU."""
    offload_after_s: NonNegativeFloat = 2.0
    """With offload: seconds without a batch after which the weights leave the GPU. 0: after every batch."""

    @property
    def idle_s(self) -> float | None:
        """Seconds without a batch after which the weights leave the GPU; None: never."""
        return self.offload_after_s if self.offload else None
