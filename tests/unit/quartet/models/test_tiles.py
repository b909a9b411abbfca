"""Log-probs and entropy by tiles of the vocabulary against those from whole logits."""

import threading
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from quartet.models.distribution import Distribution
from quartet.models.sequences import PairTensors, concatenate_pairs, pad_pairs
from quartet.models.tiles import ALIGNED, PLAIN, TILE_ELEMENTS, Kernels, Softmax, linear_logprobs, tile_width
from tests import plain

IDS = torch.tensor([[0, 10, 4], [2, 9, 3]])
EARLY = torch.tensor([[True, False, True], [True, False, True]])
WIDTH, VOCABULARY = 5, 11
TILES = [None, 3, 4, 11]
OURS = [
    pytest.param(PLAIN, id="plain"),
    pytest.param(Kernels.compiled("aot_eager"), id="traced"),
    pytest.param(Kernels.compiled("inductor"), id="compiled", marks=pytest.mark.exhaustive),
]
"""The functions of a tile's numbers; the second traces them as torch's own compiler does, but makes no kernels."""


def drawn(*shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64).to(dtype).requires_grad_()


@pytest.mark.parametrize("kernels", OURS)
@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("cap", [None, 2.0])
def test_gradients_are_those_of_finite_differences(
    kernels: Kernels, tile: int | None, entropy: bool, cap: float | None
) -> None:
    """Checks states, weights and bias; with padding (9, 10) and ends that come too early (2, 3, 4) among the ids."""
    torch.manual_seed(0)
    softmax = Softmax(0.7, cap=cap, size=9, ends=(2, 3, 4, 20))

    def computed(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        options: dict[str, Any] = {"entropy": entropy, "tile": tile, "kernels": kernels}
        return linear_logprobs(hidden, weight, IDS, softmax, bias=bias, early=EARLY, **options)

    assert torch.autograd.gradcheck(computed, (drawn(2, 3, WIDTH), drawn(VOCABULARY, WIDTH), drawn(VOCABULARY)))


def test_what_is_frozen_gets_no_gradient_and_changes_that_of_nothing_else() -> None:
    torch.manual_seed(4)
    parts = drawn(2, 3, WIDTH), drawn(VOCABULARY, WIDTH), drawn(VOCABULARY)
    loss = linear_logprobs(*parts[:2], IDS, bias=parts[2], tile=4).sum()
    expected = torch.autograd.grad(loss, parts)
    for trained in ((0,), (1,), (2,), (0, 2)):
        hidden, weight, bias = (part.detach().requires_grad_(index in trained) for index, part in enumerate(parts))
        linear_logprobs(hidden, weight, IDS, bias=bias, tile=4).sum().backward()  # type: ignore[no-untyped-call]
        for index, part in enumerate((hidden, weight, bias)):
            assert part.grad is None if index not in trained else torch.equal(part.grad, expected[index])


@pytest.mark.parametrize("kernels", OURS)
@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_they_are_those_of_whole_logits(kernels: Kernels, tile: int | None, dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    hidden, weight, ids = drawn(2, 9, 64, dtype=dtype), drawn(40, 64, dtype=dtype), torch.randint(40, (2, 9))
    actual = linear_logprobs(hidden, weight, ids, Softmax(0.8), entropy=True, tile=tile, kernels=kernels)
    every = (torch.nn.functional.linear(hidden, weight).float() / 0.8).log_softmax(-1)
    chosen = every.gather(-1, ids.unsqueeze(-1)).squeeze(-1)
    expected = torch.stack([chosen, -(every.exp() * every).sum(-1)], dim=-1)
    assert actual.dtype == torch.float32
    torch.testing.assert_close(actual, expected, atol=2e-5, rtol=1e-6)
    factors = torch.randn_like(actual)
    gradients = zip(
        *(torch.autograd.grad((x * factors).sum(), [hidden, weight]) for x in (actual, expected)), strict=True
    )
    for one, other in gradients:
        torch.testing.assert_close(one, other, atol=1e-5 if dtype == torch.float32 else 0.3, rtol=1e-2)


@pytest.mark.parametrize("make", [pad_pairs, concatenate_pairs])
@pytest.mark.parametrize(
    "distribution",
    [
        Distribution(0.7),
        Distribution(1.3, vocabulary=40),
        Distribution(1.0, vocabulary=40, min_new_tokens=3, end_ids=(0, 2, 39, 50, 90)),
    ],
)
def test_a_distribution_asks_for_what_it_is(make: Any, distribution: Distribution) -> None:
    """The question that it puts to a model, answered by tiles, against its own softmax of logits."""
    torch.manual_seed(2)
    pairs: PairTensors = make(*plain.random_pairs(5, seed=3, longest=9))
    weight, hidden = drawn(96, 16, dtype=torch.float32), drawn(*pairs.response_ids.shape, 16, dtype=torch.float32)

    def model(*, asked: Any, logits_to_keep: torch.Tensor, **inputs: Any) -> torch.Tensor:
        assert torch.equal(logits_to_keep, pairs.predictors)
        return linear_logprobs(
            hidden, weight, asked.ids, asked.softmax, early=asked.early, entropy=asked.entropy, tile=7
        )

    expected = distribution.with_entropy(torch.nn.functional.linear(hidden, weight), pairs)
    torch.testing.assert_close(distribution.asked_of(model, pairs, entropy=True), expected, atol=1e-5, rtol=1e-5)
    logprobs, none = distribution.asked_of(model, pairs)
    torch.testing.assert_close(logprobs, expected[0], atol=1e-5, rtol=1e-5)
    assert none is None


@pytest.mark.parametrize("kernels", OURS)
def test_large_scores_and_tiles_without_a_possible_token(kernels: Kernels) -> None:
    """Scores beyond the exponential's range, and a first tile of which all tokens are forbidden."""
    weight = torch.tensor([[2000.0], [1500.0], [1000.0], [1000.0]])
    actual = linear_logprobs(
        torch.ones(1, 1),
        weight,
        torch.tensor([3]),
        Softmax(ends=(0, 1)),
        early=torch.tensor([True]),
        entropy=True,
        tile=2,
        kernels=kernels,
    )
    torch.testing.assert_close(actual, torch.tensor([[-0.693147, 0.693147]]))


@pytest.mark.parametrize("rows", [1, 77, 4096, 5120, 5376, 10_752, 2**19, 2**30])
def test_rows_of_a_tile_begin_where_a_gpu_multiplies_fast(rows: int) -> None:
    """For 20 responses of 256 tokens a tile would have 26,214 columns, in bfloat16 rows that begin at 4 bytes."""
    width, most = tile_width(rows, torch.device("cuda")), TILE_ELEMENTS["cuda"]
    assert width % ALIGNED == 0
    assert most - rows * ALIGNED < rows * width <= max(most, 256 * rows)


def test_few_graphs_are_compiled_for_any_sizes() -> None:
    """Compiles for tiles with probable tokens and for those without, and at most once more for a width that is
    aligned otherwise; also where the backward pass runs in a thread of its own, as on a GPU."""
    torch._dynamo.reset()
    counters.clear()
    kernels, graphs = Kernels.compiled("aot_eager"), []
    softmax = Softmax(0.7, size=400, ends=(1, 2, 150, 399))
    for count, width in ((256, 128), (100, 90), (77, 133), (311, 200), (5, 70), (7, 81), (8, 120)):
        hidden, weight = drawn(count, WIDTH), drawn(409, WIDTH)
        ids, early = torch.randint(409, (count,)), torch.arange(count) < 3
        chosen = linear_logprobs(hidden, weight, ids, softmax, early=early, tile=width, kernels=kernels)
        backward = threading.Thread(target=chosen.sum().backward)
        backward.start()
        backward.join()
        assert hidden.grad is not None
        graphs.append(counters["stats"]["unique_graphs"])
    assert graphs[0] == 4
    assert graphs[-1] == graphs[2] <= 6
    torch._dynamo.reset()


class Largest(TorchDispatchMode):
    """Notes the most numbers of a tensor that an operator returned."""

    numbers = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        sizes = [
            each.untyped_storage().size() // each.element_size()
            for each in tree_leaves(made)
            if torch.is_tensor(each)
        ]
        self.numbers = max([self.numbers, *sizes])
        return made


@pytest.mark.parametrize("entropy", [False, True])
def test_neither_logits_nor_their_gradient_exist_as_a_whole(entropy: bool) -> None:
    """500 positions by 3000 tokens are 1.5 million; a tile has 50,000, the weights 24,000."""
    hidden, weight = drawn(500, 8, dtype=torch.bfloat16), drawn(3000, 8, dtype=torch.bfloat16)
    ids = torch.randint(3000, (500,))
    with Largest() as seen:
        linear_logprobs(hidden, weight, ids, Softmax(0.9, size=2900), entropy=entropy, tile=100).sum().backward()
    assert seen.numbers == 50_000
    with Largest() as seen:
        (hidden @ weight.t()).log_softmax(-1)
    assert seen.numbers == 1_500_000


def test_weights_that_are_frozen_get_no_gradient() -> None:
    hidden, weight = drawn(4, 8), drawn(6, 8).detach()
    linear_logprobs(hidden, weight, torch.zeros(4, dtype=torch.long), tile=2).sum().backward()
    assert weight.grad is None
    assert hidden.grad is not None
    assert hidden.grad.isfinite().all()


def test_shapes_and_temperatures_that_do_not_fit() -> None:
    hidden, weight, ids = torch.zeros(2, 3), torch.zeros(5, 3), torch.zeros(2, dtype=torch.long)
    with pytest.raises(ValueError, match=r"hidden \[2, 3\], weight \[5, 3\] and ids \[1\] should be"):
        linear_logprobs(hidden, weight, ids[:1])
    with pytest.raises(ValueError, match=r"early is \[1\], should be \[2\]"):
        linear_logprobs(hidden, weight, ids, early=torch.zeros(1, dtype=torch.bool))
    with pytest.raises(ValueError, match="temperature must be > 0"):
        linear_logprobs(hidden, weight, ids, Softmax(0.0))
