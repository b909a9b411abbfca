"""The layout of a learner's checkpoint, so that a learner of another layout refuses it and names the difference."""

from pathlib import Path
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, ValidationError

from quartet.config.learner import LearnerConfig
from quartet.wire.errors import InvalidArgument

LAYOUT = "layout.json"
"""The file's name in a checkpoint."""


class Layout(BaseModel):
    """The properties that a learner must share with a checkpoint to resume from it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: Literal[1] = 1
    """Version of the folder's format; raised when its files change."""
    step: int
    """The last step trained."""
    parameters: int
    """Number of the model's parameters, adapters included."""
    dtype: str
    ranks: int
    zero_stage: int
    tensor_parallel: int = 1
    """Ranks that share one copy of the model."""
    lora_rank: int | None
    """Rank of the adapters; null without adapters."""
    freeze_attention: bool
    """True if the attention layers are not trained, so that the optimizer has no state of them."""
    ema: bool
    """True if the learner keeps a running mean of its weights."""
    adam_offload: bool | None = None
    """True if AdamW runs in host memory, which keeps its state in other groups of parameters; null where there are so
    few that they are one group either way."""

    @classmethod
    def of(cls, config: LearnerConfig, parameters: int, step: int, *, grouped: bool = True) -> Self:
        """The layout of a learner with this configuration.

        Args:
            config: the configuration.
            parameters: number of the model's parameters, adapters included.
            step: the last step trained.
            grouped: False if it is known that the trained parameters are one group of the optimizer.
        """
        return cls(
            step=step,
            parameters=parameters,
            dtype=config.dtype,
            ranks=config.ranks,
            zero_stage=config.zero_stage,
            tensor_parallel=config.tensor_parallel.size,
            lora_rank=config.lora.rank if config.lora else None,
            freeze_attention=config.freeze_attention,
            ema=config.ema_decay is not None,
            adam_offload=config.adam_offload if grouped else None,
        )

    @classmethod
    def read(cls, path: Path) -> Self:
        """Reads the file. InvalidArgument if it is missing or does not hold a layout."""
        try:
            return cls.model_validate_json(path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidArgument(f"path: {path.parent} does not hold a checkpoint: {error}") from None
        except ValidationError as error:
            raise InvalidArgument(
                f"path: {path} does not hold a checkpoint's layout: {error.errors()[0]['msg']}"
            ) from None

    def write(self, path: Path) -> None:
        """Writes it as JSON."""
        path.write_text(self.model_dump_json(indent=1) + "\n", encoding="utf-8")

    def check(self, mine: "Layout") -> None:
        """Raises InvalidArgument, naming the differences, unless a learner of layout `mine` can resume from this."""
        names = [name for name in Layout.model_fields if name != "step"]
        if None in (self.adam_offload, mine.adam_offload):
            names.remove("adam_offload")
        differ = [
            f"{name}: {getattr(self, name)!r} in the checkpoint, {getattr(mine, name)!r} here"
            for name in names
            if getattr(self, name) != getattr(mine, name)
        ]
        if differ:
            raise InvalidArgument(f"a checkpoint of another layout: {'; '.join(differ)}")
