"""orchestrator.algorithms by hand, against the slow reference, and by its laws: advantages and their whitening."""

import math

import pytest
import torch
from torch import Tensor

from orchestrator.algorithms.advantages import gae, length_lambdas, rewards_to_go, whiten
from tests.unit import reference_ppo as ref
from tests.unit.numeric_cases import response_mask
from tests.unit.reference_ppo import close, doubles

NAN = math.nan
SEEDS = range(5)
LN2 = math.log(2)


def test_gae_by_hand() -> None:
    rewards, values = doubles([[1.0, 0.0, 2.0, NAN]]), doubles([[0.5, 0.4, 0.3, NAN]])
    mask = response_mask(torch.tensor([3]), 4)
    # deltas 1 + 0.9 * 0.4 - 0.5 = 0.86; 0.9 * 0.3 - 0.4 = -0.13; 2 - 0.3 = 1.7; gamma lambda = 0.45
    # A = 1.7; -0.13 + 0.45 * 1.7 = 0.635; 0.86 + 0.45 * 0.635 = 1.14575
    advantages, returns = gae(rewards, values, mask, gamma=0.9, gae_lambda=0.5)
    close(advantages, [[1.14575, 0.635, 1.7, 0.0]])
    close(returns, [[1.64575, 1.035, 2.0, 0.0]])


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 0.95), (0.9, 0.5), (0.99, 0.0), (1.0, 1.0)])
def test_gae_against_the_reference(seed: int, gamma: float, lam: float) -> None:
    rewards, values = (ref.random_rows(seed + k, ref.random_lengths(seed)) for k in (0, 10))
    expected = ref.pad(ref.gae(rewards, values, gamma, lam), fill=0.0)
    args = (ref.pad(rewards), ref.pad(values), ref.mask_of(values))
    advantages, returns = gae(*args, gamma=gamma, gae_lambda=lam)
    close(advantages, expected)
    close(returns, expected + ref.pad(values, fill=0.0))


def by_torch(
    rewards: Tensor, values: Tensor, mask: Tensor, *, gamma: float, gae_lambda: float | Tensor
) -> tuple[Tensor, Tensor]:
    """The recursion of eq. 16 as torch carries it out, operation by operation."""
    advantages = torch.zeros_like(values)
    carry = following = values.new_zeros(len(values))
    for t in reversed(range(mask.shape[1])):
        here = mask[:, t]
        delta = rewards[:, t] + gamma * following - values[:, t]
        carry = torch.where(here, delta + gamma * gae_lambda * carry, carry)
        following = torch.where(here, values[:, t], following)
        advantages[:, t] = torch.where(here, carry, 0.0)
    return advantages, torch.where(mask, advantages + values, 0.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("seed", SEEDS)
def test_gae_has_the_bits_of_the_same_operations_by_torch(seed: int, dtype: torch.dtype) -> None:
    draw = torch.Generator().manual_seed(seed)
    rewards, values = (torch.randn(33, 57, generator=draw, dtype=dtype) * 10 ** (seed - 2) for _ in range(2))
    gaps = torch.rand(33, 57, generator=draw) < 0.8  # and of one response no token
    gaps[seed] = False
    whole = response_mask(torch.randint(0, 58, (33,), generator=draw), 57)
    lambdas = torch.rand(33, generator=draw, dtype=dtype)
    for mask in (gaps, whole, gaps & whole):
        r, v = (torch.where(mask, each, NAN) for each in (rewards, values))
        for gamma, lam in ((0.99, 0.95), (1.0, 1.0), (0.9, 0.0), (0.97, lambdas)):
            expected = by_torch(r, v, mask, gamma=gamma, gae_lambda=lam)
            for ours, theirs in zip(gae(r, v, mask, gamma=gamma, gae_lambda=lam), expected, strict=True):
                assert ours.dtype == theirs.dtype
                assert torch.equal(ours, theirs)
                assert torch.equal(ours.signbit(), theirs.signbit())  # a zero too


@pytest.mark.parametrize("shape", [(1, 3), (3, 1), (2, 3)])
def test_gae_leaves_what_it_is_given(shape: tuple[int, int]) -> None:
    rewards, values, mask = torch.ones(shape), torch.full(shape, 0.5), torch.ones(shape, dtype=torch.bool)
    gae(rewards, values, mask, gamma=0.9, gae_lambda=0.5)
    assert rewards.unique().tolist() == [1.0]
    assert values.unique().tolist() == [0.5]


def test_gae_steps_over_a_gap() -> None:
    gap = torch.tensor([[True, False, True, True, False]])
    rewards, values = doubles([[1.0, NAN, 0.0, 2.0, NAN]]), doubles([[0.5, NAN, 0.4, 0.3, NAN]])
    advantages, returns = gae(rewards, values, gap, gamma=0.9, gae_lambda=0.5)
    close(advantages, [[1.14575, 0.0, 0.635, 1.7, 0.0]])  # as by hand above
    close(returns, [[1.64575, 0.0, 1.035, 2.0, 0.0]])


def test_lambdas_by_length_by_hand() -> None:
    # 1 - 1 / (1.5 * 2) = 2/3; 1 - 1 / 1.5 = 1/3, as only tokens of the mask count; 1 - 1 / (1.5 * 4) = 5/6.
    mask = torch.tensor([[True, True, False, False], [False, True, False, False], [True] * 4])
    close(length_lambdas(mask, alpha=1.5), [2 / 3, 1 / 3, 5 / 6])  # type: ignore[arg-type]
    close(length_lambdas(mask, alpha=0.25), [0, 0, 0])  # type: ignore[arg-type]
    close(length_lambdas(torch.zeros(1, 3, dtype=torch.bool), alpha=1.5), [1 / 3])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="alpha must be > 0, got 0"):
        length_lambdas(mask, alpha=0)


def test_gae_refuses_bad_input() -> None:
    one, mask = torch.ones(2, 1), torch.ones(2, 1, dtype=torch.bool)
    with pytest.raises(ValueError, match=r"gamma must lie in 0\.\.1, got 1\.5"):
        gae(one, one, mask, gamma=1.5, gae_lambda=1.0)
    with pytest.raises(ValueError, match=r"gae_lambda must lie in 0\.\.1, got -0\.1"):
        gae(one, one, mask, gamma=1.0, gae_lambda=-0.1)
    with pytest.raises(ValueError, match=r"gae_lambda must lie in 0\.\.1, got tensor"):
        gae(one, one, mask, gamma=1.0, gae_lambda=torch.tensor([0.5, 1.5]))
    with pytest.raises(ValueError, match=r"gae_lambda is \[1\], should be \[2\]"):
        gae(one, one, mask, gamma=1.0, gae_lambda=torch.ones(1))
    with pytest.raises(ValueError, match=r"values is \[2\], should be \[2, 1\]"):
        gae(one, one[:, 0], mask, gamma=1.0, gae_lambda=1.0)


def test_rewards_to_go_by_hand() -> None:
    rewards, mask = doubles([[1.0, 0.0, 4.0], [3.0, NAN, NAN]]), response_mask(torch.tensor([3, 1]), 3)
    close(rewards_to_go(rewards, mask, gamma=0.5), [[2.0, 2.0, 4.0], [3.0, 0.0, 0.0]])
    close(rewards_to_go(rewards, mask, gamma=1.0), [[5.0, 4.0, 4.0], [3.0, 0.0, 0.0]])
    with pytest.raises(ValueError, match=r"gamma must lie in 0\.\.1, got 2"):
        rewards_to_go(rewards, mask, gamma=2)


def test_whitening_by_hand() -> None:
    advantages, mask = doubles([[2.0, 4.0, NAN], [6.0, NAN, NAN]]), response_mask(torch.tensor([2, 1]), 3)
    # mean 4, unbiased variance (4 + 0 + 4) / 2 = 4
    close(whiten(advantages, mask), [[-1.0, 0.0, 0.0], [1.0, 0.0, 0.0]], 1e-8)
    same = whiten(torch.full((1, 7), 0.1), torch.ones(1, 7, dtype=torch.bool))
    assert float(same.abs().max()) < 1e-3  # nothing to tell apart, and no division by zero
    with pytest.raises(ValueError, match="at least two"):
        whiten(advantages, response_mask(torch.tensor([1, 0]), 3))
