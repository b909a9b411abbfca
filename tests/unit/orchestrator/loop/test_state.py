"""The state that the loop carries from step to step."""

import math
from itertools import islice

from orchestrator.algorithms.rewards import RunningNormaliser
from orchestrator.experience.experience import Scored
from orchestrator.loop.state import TrainState


def test_version_and_critic_step_follow_from_the_step() -> None:
    state = TrainState(step=3, first_version=7, first_critic_step=4, kl_coef=0.1, samples_used=12)
    assert (state.policy_version, state.critic_step) == (10, 7)
    state = state.advanced(
        kl_coef=0.2,
        normalisers={"score": RunningNormaliser(7, 1e-17 / 3, 2 / 7)},
        asked=5,
        used=[*(Scored(number, number % 3, 0.25 * number) for number in range(12, 15)), Scored(15, 7, math.nan)],
    )
    assert (state.step, state.policy_version, state.critic_step, state.samples_used) == (4, 11, 8, 16)
    assert state.prompts_seen == {0, 1, 2}
    assert TrainState.model_validate_json(state.model_dump_json()) == state


def test_a_checkpoint_holds_which_samples_were_used_though_they_came_in_no_order() -> None:
    """Neither is one of them sampled again after a restart, nor one that was passed by left out."""
    state = TrainState(step=0, first_version=1, first_critic_step=None)
    taken: set[int] = set()
    for numbers, discarded in (([1, 2, 5, 9], 1), ([0, 3, 8], 0), ([4, 12, 13], 2)):
        used = [Scored(number, number, 1.0) for number in numbers]
        state = state.advanced(kl_coef=None, normalisers={}, asked=len(numbers), used=used, discarded=discarded)
        taken |= set(numbers)
        state = TrainState.model_validate_json(state.model_dump_json())
        assert {number for number in range(20) if number in state.used} == taken
        left = [number for number in range(20) if number not in taken | {6}]
        assert list(islice(state.used.others({6}), len(left))) == left
    assert (state.samples_used, state.samples_discarded, state.used_beyond) == (7, 3, (8, 9, 12, 13))
