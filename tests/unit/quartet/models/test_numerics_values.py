"""Value loss and explained variance: by hand, against the reference, gradients, bad input."""

import math

import pytest
import torch
from torch import Tensor

from quartet.models import numerics
from tests.unit import reference_ppo as ref
from tests.unit.numeric_cases import NAN, SEEDS, M, X, response_mask
from tests.unit.reference_ppo import close


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("eps", [None, 0.2, 1.0])
def test_value_loss_against_the_reference(seed: int, eps: float | None) -> None:
    lengths = ref.random_lengths(seed)
    new, old, returns = (ref.random_rows(10 * seed + k, lengths) for k in range(3))
    args = (ref.pad(new), ref.pad(old), ref.pad(returns), ref.mask_of(new))
    loss, share = numerics.value_loss(*args, value_clip_eps=eps, denominator=17.0)
    expected_loss, expected_share = ref.value_loss(new, old, returns, eps, 17.0)
    close(loss, expected_loss)
    close(share, expected_share, 1e-6)


def test_value_loss_gradient_is_zero_where_clipped_and_off_the_mask() -> None:
    lengths = ref.random_lengths(3)
    new, old, returns = (ref.random_rows(k, lengths) for k in range(3))
    mask = ref.mask_of(new)
    leaf, data = ref.pad(new).requires_grad_(), (ref.pad(old), ref.pad(returns), mask)

    def loss(new_values: Tensor) -> Tensor:
        return numerics.value_loss(new_values, *data, value_clip_eps=0.3, denominator=9)[0]

    (gradient,) = torch.autograd.grad(loss(leaf), leaf)
    assert (gradient[~mask] == 0).all()
    expected = []
    for n, o, r in zip(ref.flat(new), ref.flat(old), ref.flat(returns), strict=True):
        clipped = (ref.clip(n, o - 0.3, o + 0.3) - r) ** 2 > (n - r) ** 2
        expected.append(0.0 if clipped else (n - r) / 9)
    assert 0 < expected.count(0.0) < len(expected)
    close(gradient[mask], torch.tensor(expected, dtype=torch.float64))
    tokens = torch.tensor(ref.flat(new), dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: loss(ref.pad(new).masked_scatter(mask, x)), tokens)


def test_value_loss_adds_up_over_micro_batches() -> None:
    torch.manual_seed(0)
    new, old, returns = torch.randn(3, 8, 6, dtype=torch.float64)
    mask = response_mask(torch.tensor([6, 1, 0, 3, 2, 5, 4, 6]), 6)
    leaf = new.requires_grad_()

    def part(rows: slice) -> Tensor:
        args = (leaf[rows], old[rows], returns[rows], mask[rows])
        return torch.stack(numerics.value_loss(*args, value_clip_eps=0.2, denominator=mask.sum()))

    whole = part(slice(None))
    parts = part(slice(0, 3)) + part(slice(3, 4)) + part(slice(4, 8))
    assert whole[1] > 0.1  # some are clipped
    close(parts, whole, 1e-6)
    close(torch.autograd.grad(parts[0], leaf)[0], torch.autograd.grad(whole[0], leaf)[0])


def test_rounding_alone_clips_no_value() -> None:
    torch.manual_seed(0)
    new, old, returns = torch.empty(3, 1, 10_000).uniform_(-0.09, 0.09)  # float32, and all within the clip
    mask = torch.ones(1, 10_000, dtype=torch.bool)
    assert numerics.value_loss(new, old, returns, mask, value_clip_eps=0.2, denominator=1)[1] == 0


@pytest.mark.parametrize("eps", [0.0, -0.2, NAN])
def test_value_clip_must_be_positive(eps: float) -> None:
    with pytest.raises(ValueError, match="value_clip_eps must be > 0"):
        numerics.value_loss(X, X, X, M, value_clip_eps=eps, denominator=1)
    with pytest.raises(ValueError, match=r"returns is \[2\], should be \[2, 3\]"):
        numerics.value_loss(X, X, torch.ones(2), M, value_clip_eps=None, denominator=1)


def test_explained_variance_by_hand() -> None:
    returns = torch.tensor([[1.0, 2.0, 3.0, NAN]])
    mask = torch.tensor([[True, True, True, False]])
    # residuals 0, 0, 1: variance 2/9; returns: variance 6/9; 1 - 1/3
    close(numerics.explained_variance(torch.tensor([[1.0, 2.0, 2.0, NAN]]), returns, mask), 2 / 3, 1e-6)
    assert numerics.explained_variance(returns, returns, mask) == 1
    assert numerics.explained_variance(torch.full((1, 4), 5.0), returns, mask) == 0
    # residuals 2, 4, 6: four times the variance
    assert numerics.explained_variance(-returns, returns, mask) == -3


@pytest.mark.parametrize("seed", SEEDS)
def test_explained_variance_against_the_reference(seed: int) -> None:
    values, returns = (ref.random_rows(10 * seed + k, ref.random_lengths(seed)) for k in range(2))
    got = numerics.explained_variance(ref.pad(values), ref.pad(returns), ref.mask_of(values))
    close(got, ref.explained_variance(values, returns))


@pytest.mark.parametrize("share", [0.9, 1.0])
def test_explained_variance_is_that_of_whole_copies_bit_for_bit(share: float) -> None:
    draw = torch.Generator().manual_seed(0)
    values, returns = torch.randn(2, 70, 90, generator=draw)
    mask = torch.rand(70, 90, generator=draw) < share
    unchanged = values.clone(), returns.clone()
    of_residuals, of_returns = (
        (x - numerics.masked_mean(x, mask)).masked_fill(~mask, 0.0).square().sum()
        for x in (returns.double() - values.double(), returns.double())
    )
    assert numerics.explained_variance(values, returns, mask) == float(1 - of_residuals / of_returns)
    assert torch.equal(values, unchanged[0])
    assert torch.equal(returns, unchanged[1])
    with pytest.raises(ValueError, match="mask is empty"):
        numerics.explained_variance(values, returns, mask & False)


def test_explained_variance_of_constant_returns_is_nan() -> None:
    mask = torch.ones(1, 3, dtype=torch.bool)
    for constant in (0.0, 0.1, 1e6 + 0.3):  # (0.1 + 0.1 + 0.1) / 3 is not 0.1
        returns = torch.full((1, 3), constant, dtype=torch.float64)
        assert math.isnan(numerics.explained_variance(torch.randn(1, 3), returns, mask))
        for other in (-2e6, 2e6, NAN):  # off the mask
            beside, whole = torch.tensor([[*[constant] * 3, other]], dtype=torch.float64), torch.ones(1, 4) > 0
            whole[0, 3] = False
            assert math.isnan(numerics.explained_variance(torch.randn(1, 4), beside, whole))
