"""Leave-one-out by hand, and against the slow reference."""

import math

import pytest
import torch

from orchestrator.algorithms.responses import Responses
from orchestrator.algorithms.rloo import RLOO
from tests.unit import reference_ppo as ref
from tests.unit.numeric_cases import response_mask
from tests.unit.reference_ppo import close, doubles

NAN = math.nan


def credit(
    rewards: torch.Tensor, mask: torch.Tensor, group: int, trained: torch.Tensor | None = None
) -> torch.Tensor:
    algorithm = RLOO(samples_per_prompt=group, scale="none")
    groups, trained = torch.arange(len(rewards)) // group, mask if trained is None else trained
    advantages, returns = algorithm.credit(Responses(rewards, mask, trained, None, groups))
    assert returns is None
    return advantages


def test_leave_one_out_by_hand() -> None:
    # Totals 1, 2, 6 of the first prompt and 4, 0, 0.5 of the second. Means of the others: 4, 3.5, 1.5; 0.25, 2.25, 2.
    rewards = doubles([[0.5, 0.5], [2, NAN], [-1, 7], [4, NAN], [1, -1], [0.5, NAN]])
    mask = response_mask(torch.tensor([2, 1, 2, 1, 2, 1]), 2)
    wanted = [[-3.0, -3.0], [-1.5, 0.0], [4.5, 4.5], [3.75, 0.0], [-2.25, -2.25], [-1.5, 0.0]]
    close(credit(rewards, mask, 3), wanted)
    # A token that is not trained on counts in its response's reward, and has no advantage.
    trained = mask & torch.tensor([[True, False], [True, True]] + [[True, True]] * 4)
    wanted[0][1] = 0.0
    close(credit(rewards, mask, 3, trained), wanted)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("group", [2, 4])
def test_leave_one_out_against_the_reference(seed: int, group: int) -> None:
    lengths = (ref.random_lengths(seed) * 8)[: 2 * group]
    rewards = ref.random_rows(seed, lengths)
    actual = credit(ref.pad(rewards), ref.mask_of(rewards), group)
    close(actual, ref.pad(ref.rloo(rewards, group), fill=0.0))
    # What one response gains the others of its prompt lose.
    close(actual[:, 0].view(-1, group).sum(dim=1), torch.zeros(2))
