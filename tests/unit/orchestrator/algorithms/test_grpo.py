"""Group-relative advantages by hand and by their laws, and the groups that are discarded."""

import math

import numpy as np
import pytest
import torch

from orchestrator.algorithms.contract import Group
from orchestrator.algorithms.grpo import GRPO
from orchestrator.algorithms.responses import Responses
from tests.unit import reference_ppo as ref
from tests.unit.numeric_cases import response_mask
from tests.unit.reference_ppo import close, doubles

NAN = math.nan


def credit(rewards: torch.Tensor, mask: torch.Tensor, group: int, *, divide: bool) -> torch.Tensor:
    algorithm = GRPO(samples_per_prompt=group, scale="group" if divide else "none")
    groups = torch.arange(len(rewards)) // group
    advantages, returns = algorithm.credit(Responses(rewards, mask, mask, None, groups))
    assert returns is None
    return advantages


@pytest.mark.parametrize("divide", [True, False])
def test_advantages_by_hand(divide: bool) -> None:
    # Totals 1, 2, 6 of the first prompt, mean 3, variance (4 + 1 + 9) / 2 = 7; and thrice 0.5 of the second.
    rewards = doubles([[0.5, 0.5], [2, NAN], [-1, 7], [0.5, NAN], [1, -0.5], [0.5, NAN]])
    mask = response_mask(torch.tensor([2, 1, 2, 1, 2, 1]), 2)
    scale = 1 / (math.sqrt(7) + 1e-6) if divide else 1
    wanted = [[-2 * scale, -2 * scale], [-scale, 0], [3 * scale, 3 * scale], *[[0, 0]] * 3]
    close(credit(rewards, mask, 3, divide=divide), wanted)


@pytest.mark.parametrize("seed", range(5))
def test_advantages_add_up_to_nothing_and_have_the_spread_one(seed: int) -> None:
    rewards = ref.random_rows(seed, (ref.random_lengths(seed) * 8)[:8])
    padded, mask = ref.pad(rewards), ref.mask_of(rewards)
    divided, plain = (credit(padded, mask, 4, divide=divide)[:, 0].view(2, 4) for divide in (True, False))
    for each in (divided, plain):
        close(each.sum(dim=1), torch.zeros(2))
    close(divided.std(dim=1), torch.ones(2), 1e-4)
    # Without the division they are those of leave-one-out times (G - 1) / G.
    close(plain, 0.75 * ref.pad(ref.rloo(rewards, 4), fill=0.0)[:, 0].view(2, 4))


def test_groups_of_equal_scores_are_discarded_if_that_is_asked_for() -> None:
    def group(*scores: float) -> Group:
        count = len(scores)
        return Group({"score": np.asarray(scores, np.float32)}, np.ones(count, np.int64), np.zeros(count, bool))

    choosy = GRPO(samples_per_prompt=3, zero_variance="resample", max_discarded=4)
    assert [choosy.admit(group(*scores)) for scores in ((1, 1, 1), (0, 0, 0), (1, 1, 0))] == [False, False, True]
    assert choosy.discard_limit == 4
    plain = GRPO(samples_per_prompt=3)
    assert plain.admit(group(1, 1, 1))
    assert plain.discard_limit == 0
