"""The state that the loop carries from step to step, and the parts of it that older checkpoints hold."""

import pytest
from pydantic import ValidationError

from orchestrator.algorithm.rewards import RunningNormaliser
from orchestrator.loop.state import TrainState

OLD = (
    '{"format": 1, "step": 3, "policy_version": 10, "critic_step": 7, "kl_coef": 0.1, "samples_asked": 13, '
    '"samples_used": 12}'
)


def test_version_and_critic_step_follow_from_the_step() -> None:
    state = TrainState(step=3, first_version=7, first_critic_step=4, kl_coef=0.1, samples_used=12)
    assert (state.policy_version, state.critic_step) == (10, 7)
    state = state.advanced(kl_coef=0.2, normaliser=RunningNormaliser(), asked=5, used=range(12, 16))
    assert (state.step, state.policy_version, state.critic_step, state.samples_used) == (4, 11, 8, 16)
    assert TrainState.model_validate_json(state.model_dump_json()) == state


def test_a_checkpoint_that_kept_the_counters_themselves_is_converted() -> None:
    state = TrainState.model_validate_json(OLD)
    assert (state.format, state.step, state.first_version, state.first_critic_step) == (2, 3, 7, 4)
    assert (state.policy_version, state.critic_step, state.samples_used) == (10, 7, 12)


def test_one_from_before_samples_were_counted_is_refused() -> None:
    with pytest.raises(ValidationError, match="samples_used: missing; the checkpoint is from before samples"):
        TrainState.model_validate_json(OLD.replace('"samples_used": 12', '"samples_used": 0'))
