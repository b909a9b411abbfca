"""How a learner's checkpoint is laid out, so that one of another layout is refused by name."""

from pathlib import Path
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, ValidationError

from services.common.errors import InvalidArgument
from services.common.learner_config import LearnerConfig

LAYOUT = "layout.json"
"""The file's name in a checkpoint."""


class Layout(BaseModel):
    """What a learner must have in common with a checkpoint to go on from it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: Literal[1] = 1
    """Of the folder; raised when its files change."""
    step: int
    """The last step trained."""
    parameters: int
    """How many numbers the model has, adapters included."""
    dtype: str
    ranks: int
    zero_stage: int
    tensor_parallel: int = 1
    """Ranks that share one copy of the model."""
    lora_rank: int | None
    """Null without adapters."""
    ema: bool
    """Whether there is a running mean."""

    @classmethod
    def of(cls, config: LearnerConfig, parameters: int, step: int) -> Self:
        """Of a learner of this configuration."""
        return cls(
            step=step,
            parameters=parameters,
            dtype=config.dtype,
            ranks=config.ranks,
            zero_stage=config.zero_stage,
            tensor_parallel=config.tensor_parallel.size,
            lora_rank=config.lora.rank if config.lora else None,
            ema=config.ema_decay is not None,
        )

    @classmethod
    def read(cls, path: Path) -> Self:
        """InvalidArgument if there is no such file, or it is none of these."""
        try:
            return cls.model_validate_json(path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidArgument(f"path: {path.parent} holds no checkpoint: {error}") from None
        except ValidationError as error:
            raise InvalidArgument(f"path: {path} is no layout of a checkpoint: {error.errors()[0]['msg']}") from None

    def write(self, path: Path) -> None:
        """As JSON."""
        path.write_text(self.model_dump_json(indent=1) + "\n", encoding="utf-8")

    def check(self, mine: "Layout") -> None:
        """InvalidArgument, naming what differs, unless a learner of layout `mine` can go on from this one."""
        differ = [
            f"{name}: {getattr(self, name)!r} in the checkpoint, {getattr(mine, name)!r} here"
            for name in Layout.model_fields
            if name != "step" and getattr(self, name) != getattr(mine, name)
        ]
        if differ:
            raise InvalidArgument(f"a checkpoint of another layout: {'; '.join(differ)}")
