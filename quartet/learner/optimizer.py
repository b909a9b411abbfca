"""The optimizer's learning rate over its steps, and the place of its state: the device, or the device during updates
only."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from quartet.config.learner import OptimizerConfig


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


class OptimizerState:
    """The fp32 weights and Adam's moments of a DeepSpeed engine (ZeRO 1 or 2). With `leaves` they are in host memory
    between updates, and the device's memory is free for other processes."""

    def __init__(self, engine: Any, *, leaves: bool) -> None:
        self._engine = engine
        self._leaves = leaves
        self._leave()

    @contextmanager
    def resident(self) -> Iterator[None]:
        """Context in which the state is on the device. Waits for the copies there, and back at the end."""
        if self._leaves:
            self._engine.reload_states()
        try:
            yield
        finally:
            self._leave()

    def _leave(self) -> None:
        if not self._leaves:
            return
        from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum as State

        # Gives back torch's cached memory too. The pinned host memory is kept from update to update.
        self._engine.offload_states(include=[State.hp_params, State.optim_states])
