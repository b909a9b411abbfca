"""Needs of an update, by its configuration, and the examples of the contract's docstring."""

import runpy
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch

from orchestrator.algorithms import contract
from orchestrator.algorithms.registry import parse as parse_algorithm
from orchestrator.algorithms.responses import Responses


@pytest.mark.parametrize(
    ("algorithm", "needed"),
    [
        ({"kl": {"coef": 0}}, False),
        ({"kl": {"placement": "loss", "estimator": "k3"}}, False),
        ({}, True),
        ({"kl": {"coef": 0}, "epochs": 2}, True),
        ({"kl": {"coef": 0}, "minibatch_size": 7}, True),
        ({"kl": {"coef": 0}, "minibatch_size": 9}, False),
        ({"epochs": 2, "minibatch_size": 7, "old_logprobs": "rollout"}, False),
    ],
)
def test_logprobs_are_needed_before_an_update_of_several_steps_or_for_a_penalty(
    algorithm: dict[str, Any], needed: bool
) -> None:
    """A batch has 8 samples here."""
    assert parse_algorithm({"epochs": 1, "minibatch_size": 8} | algorithm).needs_old_logprobs(8) is needed


def test_the_docstrings_examples_compare_responses_by_the_numbers_of_their_groups(tmp_path: Path) -> None:
    """Scores 1, 5, 3 of group 7, two equal ones of group 2 between them, and one alone in its group."""
    lines = [line for line in str(contract.__doc__).splitlines() if not line or line.startswith("    ")]
    file = tmp_path / "estimators.py"
    head = "from typing import Literal\n\nfrom orchestrator.algorithms.contract import *\n"
    file.write_text(head + textwrap.dedent("\n".join(lines)))
    made = runpy.run_path(str(file))
    totals, groups = torch.tensor([[1.0], [4], [5], [4], [9], [3]]), torch.tensor([7, 2, 7, 2, 5, 7])
    one = torch.ones(6, 1, dtype=torch.bool)
    batch = Responses(totals, one, one, None, groups)
    assert made["Centred"]().credit(batch).advantages.flatten().tolist() == [-2, 0, 2, 0, 0, 0]
    assert made["Signs"]().credit(batch).advantages.flatten().tolist() == [-1, 0, 1, 0, 0, 0]


def test_the_batch_as_the_baseline_is_the_mean_over_its_trained_tokens() -> None:
    """Rewards to go of 1 and 3 at two trained tokens, less their mean 2; nothing at the third token, left out."""
    algorithm = parse_algorithm({"kind": "reinforce++", "scale": "none", "kl": {"coef": 0}})
    rewards, sampled = torch.tensor([[0.0, 1], [3, 0]]), torch.tensor([[True, True], [True, False]])
    trained = torch.tensor([[False, True], [True, False]])
    for mask, expected in ((trained, [[0, -1], [1, 0]]), (torch.zeros_like(trained), [[0, 0], [0, 0]])):
        credit = algorithm.credit(Responses(rewards, sampled, mask, None, torch.tensor([0, 1])))
        assert credit.advantages.tolist() == expected
        assert credit.returns is None


def test_a_single_trained_token_has_no_spread_and_no_advantage() -> None:
    algorithm = parse_algorithm({"kind": "reinforce++", "kl": {"coef": 0}})
    sampled, trained = torch.tensor([[True, True]]), torch.tensor([[False, True]])
    batch = Responses(torch.tensor([[0.0, 3]]), sampled, trained, None, torch.tensor([0]))
    assert algorithm.credit(batch).advantages.tolist() == [[0, 0]]
    rewards, rows = torch.tensor([[0.0, 3], [0, 5]]), (sampled.expand(2, 2), trained.expand(2, 2))
    two = Responses(rewards, *rows, None, torch.arange(2))
    # Less the mean 4, over the unbiased deviation 2 ** 0.5.
    assert algorithm.credit(two).advantages.flatten().tolist() == pytest.approx([0, -(0.5**0.5), 0, 0.5**0.5])


def test_what_a_token_earns_that_is_not_trained_on_goes_to_the_one_before_and_counts_in_no_mean() -> None:
    sampled = torch.tensor([[True, True, True]])
    batch = Responses(
        torch.tensor([[1.0, 2, 4]]), sampled, torch.tensor([[True, False, True]]), None, torch.tensor([0])
    )
    # 3 are earned at the first token and 4 at the last, which is the next one that is trained on.
    assert batch.to_go(gamma=0.5).tolist() == [[5, 0, 4]]
    assert batch.centred(torch.tensor([[1.0, 5, 3]])).tolist() == [[-1, 0, 1]]
