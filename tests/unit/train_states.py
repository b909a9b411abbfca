"""Helpers that make states of a run."""

from orchestrator.loop.state import TrainState


def state(step: int) -> TrainState:
    return TrainState(step=step, first_version=1, first_critic_step=100)
