"""The learning rate over optimizer steps, as a pure function."""

import math

from services.common.config.learner import OptimizerConfig


def rate_factor(step: int, config: OptimizerConfig) -> float:
    """Factor on the peak rate for optimizer step `step` (from 0).

    Linear warm-up that reaches 1 at `warmup_steps` and is above 0 at the first step, which 0 would waste; then
    constant, or SGDR's half cosine (Loshchilov and Hutter 2017, eq. 5) down to `final_fraction` at `total_steps`.
    """
    if step < config.warmup_steps:
        return (step + 1) / (config.warmup_steps + 1)
    if config.schedule == "constant" or config.total_steps is None:
        return 1.0
    progress = min(1.0, (step - config.warmup_steps) / (config.total_steps - config.warmup_steps))
    cosine = 0.5 * (1 + math.cos(math.pi * progress))
    return config.final_fraction + (1 - config.final_fraction) * cosine
