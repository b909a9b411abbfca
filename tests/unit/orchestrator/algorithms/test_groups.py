"""Advantages of responses that are compared with the others to their prompt, by hand."""

import math

import pytest
import torch

from orchestrator.algorithms.contract import Algorithm
from orchestrator.algorithms.groups import compared, described
from orchestrator.algorithms.grpo import GRPO
from orchestrator.algorithms.responses import Responses
from orchestrator.algorithms.rloo import RLOO
from tests.unit.numeric_cases import response_mask
from tests.unit.reference_ppo import close, doubles

NAN = math.nan
# Totals 1, 2, 6 of the first prompt; and thrice 0.5 of the second.
REWARDS = doubles([[0.5, 0.5], [2, NAN], [-1, 7], [0.5, NAN], [1, -0.5], [0.5, NAN]])
MASK = response_mask(torch.tensor([2, 1, 2, 1, 2, 1]), 2)


def credit(algorithm: Algorithm, trained: torch.Tensor = MASK) -> torch.Tensor:
    advantages, returns = algorithm.credit(Responses(REWARDS, MASK, trained, None, torch.arange(6) // 3))
    assert returns is None
    return advantages


@pytest.mark.parametrize("divide", [True, False])
def test_less_the_mean_of_the_group(divide: bool) -> None:
    # Mean 3, variance (4 + 1 + 9) / 2 = 7.
    scale = 1 / (math.sqrt(7) + 1e-6) if divide else 1
    wanted = [[-2 * scale, -2 * scale], [-scale, 0], [3 * scale, 3 * scale], *[[0, 0]] * 3]
    close(credit(GRPO(samples_per_prompt=3, scale="group" if divide else "none")), wanted)


def test_less_the_mean_of_the_others() -> None:
    # 4, 3.5, 1.5 of the first prompt.
    wanted = [[-3.0, -3.0], [-1.5, 0.0], [4.5, 4.5], *[[0.0, 0.0]] * 3]
    algorithm = RLOO(samples_per_prompt=3, scale="none")
    close(credit(algorithm), wanted)
    # A token that is not trained on counts in its response's reward, and has no advantage.
    wanted[0][1] = 0.0
    close(credit(algorithm, MASK & torch.tensor([[True, False]] + [[True, True]] * 5)), wanted)


def test_equal_rewards_have_no_advantage() -> None:
    """Their mean is a rounding away from them, and the deviation it is divided by is 1e-6."""
    equal, group = torch.full((7,), 0.1), torch.zeros(7, dtype=torch.int64)
    assert float((equal - equal.mean()).abs().max()) > 0
    assert compared(equal, group, leave_one_out=False, divide=True).tolist() == [0.0] * 7


def test_groups_are_described_by_the_mean_of_their_spreads_and_one_response_has_none() -> None:
    """Deviations of 1 and 3 of group 4, 2 and 2 of group 1, and one alone: 2 ** 0.5, 0, 0."""
    scores, groups = torch.tensor([1.0, 2.0, 3.0, 9.0, 2.0]), torch.tensor([4, 1, 4, 7, 1])
    metrics = described(scores, groups)
    assert metrics == {"group/zero_variance": pytest.approx(2 / 3), "group/spread": pytest.approx(2**0.5 / 3)}
