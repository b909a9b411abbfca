"""A user's model, known by its configuration; its weights are not read."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from quartet.config.base import ConfigError, or_of_hub
from quartet.models.attention import packed
from quartet.models.loading import shape_of_causal
from quartet.models.size import BYTES, cached

OTHER_REWARDS = (
    "; or a function as package.module:name, such as my_reward:score; or a reward service as HOST:PORT or "
    "HOST:PORT/SCORER"
)
"""Said of a reward that is none of these."""


@dataclass(frozen=True, slots=True)
class ModelOnDisk:
    """The properties of a model that a file depends on."""

    folder: str
    network: Any
    """The transformers model, without its weights."""

    @classmethod
    def at(cls, folder: str, field: str) -> Self:
        """The model in `folder`. ConfigError, which names the `field` or flag, if the folder holds no model."""
        if not Path(folder).is_dir():
            or_else = or_of_hub(folder) + (OTHER_REWARDS if field in ("reward", "--reward") else "")
            why = "is a file" if Path(folder).exists() else "does not exist"
            raise ConfigError(f"{field}: should be a model's folder, but {folder} {why}{or_else}")
        try:
            return cls(folder, shape_of_causal(folder, "float32"))
        except ConfigError as error:
            raise ConfigError(f"{field}: {error}") from None

    @property
    def config(self) -> Any:
        """The model's config.json as transformers reads it."""
        return self.network.config

    @property
    def parameters(self) -> int:
        """Number of parameters of the language model."""
        return sum(parameter.numel() for parameter in self.network.parameters())

    @property
    def size(self) -> str:
        """Number of parameters in words."""
        count = self.parameters
        for size, unit in ((10**9, "billion"), (10**6, "million")):
            if count >= size:
                return f"{count / size:.3g} {unit}"
        return f"{count:,}"

    @property
    def longest(self) -> int:
        """Longest sequence that it takes, in tokens."""
        return int(getattr(self.config, "max_position_embeddings", 1 << 15))

    @property
    def vocabulary(self) -> int:
        """Entries of its vocabulary, padding included."""
        return int(self.config.get_text_config().vocab_size)

    @property
    def packs(self) -> bool:
        """True if its sequences may be packed, with torch's own attention."""
        return not packed.problem(self.network, self.folder)

    @property
    def normalises(self) -> bool:
        """True if it is a reward model with the mean and deviation of its own scores."""
        return hasattr(self.config, "reward_std")

    def cached(self, dtype: str) -> int:
        """Bytes of a token's keys and values."""
        text = self.config.get_text_config()
        return cached(text, dtype) or int(2 * text.num_hidden_layers * text.hidden_size * BYTES[dtype])
