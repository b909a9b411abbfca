"""Everything that decides what the recipe makes."""

from dataclasses import dataclass, field

from recipes.common.shape import Shape


@dataclass(frozen=True, slots=True)
class Settings:
    """The defaults are the recipe; tests make smaller ones."""

    seed: int = 0
    """Seed of the split, the data and the weights."""
    train_problems: int = 4096
    held_out_problems: int = 512
    """Problems that the policy is not trained on."""
    shape: Shape = field(default_factory=Shape)
    """Size of the policy."""
    max_new_tokens: int = 8
    """Longest answer, `<eos>` included."""

    slip: float = 0.5
    """Share of the training answers that are wrong."""
    steps: int = 700
    batch: int = 128
    rate: float = 3e-3
