"""quartet.models.numerics against hand-computed values, the slow reference, and the laws they must obey."""

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from quartet.models import numerics
from quartet.models.distribution import Distribution
from quartet.models.sequences import pad_pairs
from tests.unit import reference_ppo as ref
from tests.unit.numeric_cases import INF, NAN, SEEDS, M, X
from tests.unit.reference_ppo import close


def test_masked_reductions_by_hand() -> None:
    close(numerics.masked_sum(X, M), 7.0)  # 1 + 2 + 4
    close(numerics.masked_mean(X, M), 7 / 3, 1e-6)
    # squares about 7/3: (16 + 1 + 25) / 9 = 42/9; over n - 1 = 2: 7/3
    close(numerics.masked_var(X, M), 7 / 3, 1e-6)


@pytest.mark.parametrize("seed", SEEDS)
def test_masked_reductions_against_the_reference(seed: int) -> None:
    rows = ref.random_rows(seed, ref.random_lengths(seed), scale=3.0)
    x, mask = ref.pad(rows), ref.mask_of(rows)
    close(numerics.masked_sum(x, mask), math.fsum(ref.flat(rows)))
    close(numerics.masked_mean(x, mask), ref.mean(rows))
    close(numerics.masked_var(x, mask), ref.variance(rows))


@pytest.mark.parametrize("reduction", [numerics.masked_sum, numerics.masked_mean, numerics.masked_var])
def test_nothing_off_the_mask_reaches_the_gradient(reduction: Callable[[Tensor, Tensor], Tensor]) -> None:
    x, dense = X.double().requires_grad_(), X[M].double().requires_grad_()
    (gradient,) = torch.autograd.grad(reduction(x, M), x)
    assert (gradient[~M] == 0).all()
    close(gradient[M], torch.autograd.grad(reduction(dense, torch.ones(3, dtype=torch.bool)), dense)[0])


def test_half_precision_is_summed_in_float32() -> None:
    ones = torch.ones(257, dtype=torch.bfloat16)  # bfloat16 has no 257: it would give 256 or 258
    total = numerics.masked_sum(ones, torch.ones(257, dtype=torch.bool))
    assert total.dtype == torch.float32
    assert total == 257


def test_empty_and_single_masks() -> None:
    nothing, single = torch.zeros_like(M), torch.zeros_like(M)
    single[0, 1] = True
    assert numerics.masked_sum(X, nothing) == 0
    with pytest.raises(ValueError, match="mask is empty"):
        numerics.masked_mean(X, nothing)
    with pytest.raises(ValueError, match="at least two"):
        numerics.masked_var(X, single)
    close(numerics.masked_var(torch.tensor([1.0, 5.0, NAN]), torch.tensor([True, True, False])), 8.0)


def test_nothing_broadcasts_and_masks_are_boolean() -> None:
    with pytest.raises(ValueError, match=r"x is \[2, 1\], should be \[2, 3\]"):
        numerics.masked_sum(torch.ones(2, 1), M)
    with pytest.raises(ValueError, match=r"mask must be a bool tensor, got torch\.float32"):
        numerics.masked_mean(X, M.float())


@pytest.mark.parametrize("denominator", [0, -1.0, NAN, torch.tensor(0)])
def test_partial_mean_needs_a_token_count(denominator: float | Tensor) -> None:
    assert numerics.partial_mean(X, M, 14) == 0.5  # (1 + 2 + 4) / 14
    assert numerics.partial_mean(X, M, torch.tensor(14)) == 0.5
    with pytest.raises(ValueError, match="denominator must be"):
        numerics.partial_mean(X, M, denominator)


# p = 1/4, 3/4, and 1/10, 9/10 at temperature 0.5
LOGITS = torch.tensor([[[0.0, math.log(3)]]], dtype=torch.float64)


def of_logits(logits: Tensor, ids: Tensor, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """Log-probs of the ids [B, T], and entropies, from logits [B, T, V]."""
    pairs = pad_pairs([np.zeros(1, np.int32)] * len(ids), [row.int().numpy() for row in ids])
    return Distribution(temperature).with_entropy(logits, pairs)


def entropy_of(logits: Tensor, temperature: float = 1.0) -> Tensor:
    return of_logits(logits, torch.zeros(logits.shape[:2], dtype=torch.long), temperature)[1]


def test_logprobs_and_entropy_by_hand() -> None:
    for token, cold, warm in ((0, 0.1, 0.25), (1, 0.9, 0.75)):
        ids = torch.tensor([[token]])
        close(of_logits(LOGITS, ids)[0], [[math.log(warm)]])
        close(of_logits(LOGITS, ids, 0.5)[0], [[math.log(cold)]])
    # 1/4 ln 4 + 3/4 ln 4/3 = 0.346574 + 0.215762; 1/10 ln 10 + 9/10 ln 10/9 = 0.230259 + 0.094824
    close(entropy_of(LOGITS), [[0.562336]], 1e-5)
    close(entropy_of(LOGITS, 0.5), [[0.325083]], 1e-5)
    close(entropy_of(torch.zeros(1, 1, 4), 0.7), [[math.log(4)]], 1e-6)


def test_large_logits_and_half_precision() -> None:
    logits = torch.tensor([[[1000.0, 1000.0]]], dtype=torch.bfloat16)  # e^1000 would overflow
    logprob, entropy = of_logits(logits, torch.tensor([[0]]))
    for result in (logprob, -entropy):
        assert result.dtype == torch.float32
        close(result, [[-math.log(2)]], 1e-6)


def test_logprob_and_entropy_gradients() -> None:
    torch.manual_seed(0)
    logits = torch.randn(2, 3, 5, dtype=torch.float64, requires_grad=True)
    ids = torch.randint(5, (2, 3))
    assert torch.autograd.gradcheck(lambda z: of_logits(z, ids, 0.7), logits)


def test_a_forbidden_token_adds_no_entropy_and_no_nan() -> None:
    logits = torch.tensor([[[0.0, math.log(3), -INF]]], dtype=torch.float64, requires_grad=True)
    entropy = entropy_of(logits)
    close(entropy.detach(), entropy_of(LOGITS))
    (gradient,) = torch.autograd.grad(entropy.sum(), logits)
    # dH/dz_j = -p_j (ln p_j + H): -1/4 (-1.386294 + 0.562336) = 0.205990, the opposite, and zero
    close(gradient, torch.tensor([[[0.205990, -0.205990, 0.0]]]), 1e-5)


def test_a_large_vocabulary_is_worked_on_in_pieces() -> None:
    torch.manual_seed(0)
    logits, ids = torch.randn(2, 9, 1_000_000, requires_grad=True), torch.randint(1_000_000, (2, 9))
    assert logits.numel() > numerics.CHUNK_ELEMENTS["cpu"]
    kept: list[Tensor] = []  # by the forward pass for the backward pass

    def keep(x: Tensor) -> Tensor:
        kept.append(x)
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        logprobs, entropies = of_logits(logits, ids, 2.0)
    own = [x.numel() for x in kept if x.untyped_storage().data_ptr() != logits.untyped_storage().data_ptr()]
    assert sum(own) < 0.01 * logits.numel()
    weights = torch.randn(2, 9)
    (gradient,) = torch.autograd.grad((weights * (logprobs - entropies)).sum(), logits)
    with torch.no_grad():
        assert torch.equal(of_logits(logits, ids, 2.0)[0], logprobs)
    for at in ((0, 0), (1, 8)):  # in the first and in the last piece
        logp = (logits[at].detach().double() / 2).log_softmax(-1)
        p, entropy = logp.exp(), -(logp.exp() * logp).sum()
        close(logprobs[at].detach(), logp[ids[at]], 1e-5)
        close(entropies[at].detach(), entropy, 1e-5)
        # d logp / dz = (onehot - p) / T, dH / dz = -p (ln p + H) / T
        expected = p * (logp + entropy) - p
        expected[ids[at]] += 1
        close(gradient[at], weights[at] * expected / 2, 1e-6)


@pytest.mark.parametrize("temperature", [0.0, -1.0, NAN, INF])
def test_a_temperature_must_be_positive(temperature: float) -> None:
    with pytest.raises(ValueError, match="temperature must be > 0"):
        of_logits(LOGITS, torch.tensor([[0]]), temperature)


def test_logits_must_be_of_batches() -> None:
    with pytest.raises(ValueError, match=r"logits must be \[B, T, V\], got \[1, 2\]"):
        of_logits(LOGITS[0], torch.tensor([[0]]))


def test_value_loss_by_hand() -> None:
    new = torch.tensor([[1.0, 1.0], [1.2, NAN]], dtype=torch.float64)
    old = torch.tensor([[0.0, 0.0], [1.0, NAN]], dtype=torch.float64)
    returns = torch.tensor([[2.0, -1.0], [1.0, NAN]], dtype=torch.float64)
    mask = torch.tensor([[True, True], [True, False]])
    # eps 0.5 clips new to 0.5, 0.5, 1.2. Squares: plain 1, 4, 0.04; clipped 2.25, 2.25, 0.04; the greater of
    # the two 2.25, 4, 0.04. Only at the first token is it the clipped one.
    loss, share = numerics.value_loss(new, old, returns, mask, value_clip_eps=0.5, denominator=4)
    close(loss, 0.5 * 6.29 / 4)
    close(share, 1 / 4)
    loss, share = numerics.value_loss(new, old, returns, mask, value_clip_eps=None, denominator=4)
    close(loss, 0.5 * 5.04 / 4)
    close(share, 0.0)
