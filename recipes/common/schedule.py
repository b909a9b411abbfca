"""The learning rate over a training run."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Schedule:
    """A linear warm-up over `warmup` updates to `peak`, times a linear decay over `steps` to no less than `floor`."""

    steps: int
    peak: float
    warmup: int = 10
    floor: float = 0.05

    def rate(self, step: int) -> float:
        """Learning rate of update number `step`, counted from 0."""
        return self.peak * min(1.0, (step + 1) / self.warmup) * max(self.floor, 1 - step / self.steps)
