"""Prompts that several responses share: computed once, and equal to rows of their own, gradients included."""

import random
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from quartet.learner.shards import Pass, shards
from quartet.models.distribution import Distribution
from quartet.models.loading import load_causal
from quartet.models.scalar import ScalarModel, load_scalar, load_value, outputs_of, scores_of, values_of
from quartet.models.sequences import concatenate_pairs, packed_batches, pad_pairs
from quartet.models.sharing import COPIES, held, shares, sharing
from quartet.models.size import ModelSize
from quartet.models.tiles import TILE_ELEMENTS
from quartet.wire.codec import Ints
from tests.double import Double
from tests.families import FAMILIES
from tests.models import WORDS
from tests.unit.rows import ids

ALWAYS = ("gpt2", "llama3", "qwen3-moe")
NAMES = [
    pytest.param(name, marks=() if name in ALWAYS else pytest.mark.exhaustive)
    for name, family in FAMILIES.items()
    if family.packs
]
DISTRIBUTION = Distribution(0.7, min_new_tokens=2, end_ids=(2,))


def grouped(seed: int, groups: int = 4) -> tuple[list[Ints], list[Ints]]:
    """Groups of one to five responses of 1 to 12 tokens behind a prompt of so many, in any order."""
    draw = np.random.default_rng(seed)

    def tokens() -> Ints:
        return draw.integers(0, len(WORDS), draw.integers(1, 13)).astype(np.int32)

    prompts = [tokens() for _ in range(groups)]
    pairs = [(prompt.copy(), tokens()) for prompt in prompts for _ in range(int(draw.integers(1, 6)))]
    order = draw.permutation(len(pairs))
    return [pairs[i][0] for i in order], [pairs[i][1] for i in order]


def lengths_of(rows: Sequence[Ints], chosen: Sequence[int]) -> list[int]:
    return [len(rows[i]) for i in chosen]


def test_a_prompt_is_shared_where_that_leaves_out_an_eighth_of_the_tokens() -> None:
    # 8 responses of 16 behind 64: 640 tokens in rows of their own; once 64 + 128, and an eighth of 8 x 64 for copies.
    assert shares(64, 8, 128)
    assert held(64, 8, 128) == 64 + 128 + 64
    assert not shares(64, 1, 16)
    assert held(64, 1, 16) == 80
    # Two behind 4 tokens leave out 4 of them: an eighth of 8 + 24 tokens, and less of 8 + 25.
    assert shares(4, 2, 24)
    assert not shares(4, 2, 25)
    assert held(4, 2, 25) == 33
    assert held(4, 2, 24) == 4 + 24 + 1
    assert not shares(1, 100, 1000)  # a token that begins every text


def test_copies_of_keys_take_no_more_than_they_are_counted_for() -> None:
    """In the sums of a layer's bytes, at the sizes of published models with as many key heads as query heads."""
    for hidden, wide in ((768, 3072), (1024, 2816), (4096, 11008), (5120, 13824)):
        size = ModelSize(0, 1, hidden, wide, 32_000, hidden, hidden)
        for compiled in (False, True):
            for width in (2, 4):
                copy = 2 * size.keys * width
                assert COPIES * copy <= size.layer(1, width, compiled=compiled)


def test_pairs_of_one_prompt_are_found_wherever_they_are() -> None:
    a, b, c = ids(5, 6, 7), ids(5, 6), ids(5, 6, 7, 8)
    prompts = [a, b, a.copy(), c, b.copy(), a]
    assert sharing(prompts, [ids(1)] * 6) == [[0, 2, 5], [1, 4], [3]]
    assert sharing(prompts, [ids(*range(8))] * 6) == [[0, 2, 5], [1], [3], [4]]
    assert sharing([], []) == []


def test_a_shared_prompt_lies_before_its_responses() -> None:
    prompts = [ids(5, 6), ids(9), ids(5, 6), ids(5, 6)]
    responses = [ids(11, 12, 13), ids(21), ids(31), ids(41, 42)]
    pairs = concatenate_pairs(prompts, responses)
    # The prompt, the pair alone, then the responses by length.
    assert pairs.input_ids.tolist() == [[5, 6, 9, 21, 31, 41, 42, 11, 12, 13]]
    assert pairs.position_ids.tolist() == [[0, 1, 0, 1, 2, 2, 3, 2, 3, 4]]
    assert pairs.pieces is not None
    assert pairs.pieces.lengths == (2, 2, 1, 2, 3)
    assert pairs.pieces.reaches == (2, 2, 3, 4, 5)
    assert pairs.pieces.behind == (None, None, 0, 0, 0)
    # In the order of the pairs: the first token of each response is predicted at its prompt's last.
    assert pairs.predictors.tolist() == [1, 7, 8, 2, 1, 1, 5]
    assert pairs.tokens is not None
    assert pairs.tokens.tolist() == [7, 8, 9, 3, 4, 5, 6]
    assert pairs.response_ids.tolist() == [[11, 12, 13, 21, 31, 41, 42]]
    assert pairs.steps.tolist() == [[0, 1, 2, 0, 0, 0, 1]]
    assert pairs.ends is not None
    assert pairs.ends.tolist() == [9, 3, 4, 6]
    inputs = pairs.inputs
    assert inputs["cu_seq_lens_q"].tolist() == [0, 2, 4, 5, 7, 10]
    assert inputs["cu_seq_lens_k"].tolist() == [0, 2, 4, 7, 11, 16]
    assert (inputs["max_length_q"], inputs["max_length_k"]) == (3, 5)


def test_without_the_last_tokens_a_response_may_have_no_piece() -> None:
    prompts, responses = [ids(5, 6)] * 3, [ids(11, 12), ids(21), ids()]
    pairs = concatenate_pairs(prompts, responses, last=False)
    assert pairs.input_ids.tolist() == [[5, 6, 11]]
    assert pairs.predictors.tolist() == [1, 2, 1]
    assert pairs.lengths == (2, 1, 0)
    assert (pairs.tokens, pairs.ends) == (None, None)
    whole = concatenate_pairs(prompts, responses)
    assert whole.input_ids.tolist() == [[5, 6, 21, 11, 12]]
    assert whole.ends is not None
    assert whole.ends.tolist() == [4, 2, 1]


def test_rows_of_different_prompts_are_what_they_are_without_sharing() -> None:
    prompts, responses = [ids(5), ids(6, 7, 8), ids(5)], [ids(9, 4), ids(3), ids(*range(20))]
    one, other = (concatenate_pairs(prompts, responses, shared=shared) for shared in (True, False))
    assert one.input_ids.tolist() == other.input_ids.tolist() == [[5, 9, 4, 6, 7, 8, 3, 5, *range(20)]]
    assert one.reaches is not None
    assert one.boundaries is not None
    assert one.reaches.tolist() == one.boundaries.tolist()


def test_a_prompt_is_there_once_or_as_often_as_it_is_asked_for() -> None:
    prompt, responses = ids(*range(16)), [ids(21), ids(22, 23)]
    once, each = (concatenate_pairs([prompt] * 2, responses, shared=shared) for shared in (True, False))
    assert once.input_ids.tolist() == [[*range(16), 21, 22, 23]]
    assert each.input_ids.tolist() == [[*range(16), 21, *range(16), 22, 23]]
    assert (once.predictors.tolist(), each.predictors.tolist()) == ([15, 15, 17], [15, 32, 33])
    assert (once.repeated, each.repeated) == (True, False)


@pytest.mark.parametrize("seed", range(20))
def test_batches_hold_each_pair_once_and_keep_the_limit_with_each_prompt_counted_once(seed: int) -> None:
    prompts, responses = grouped(seed, groups=6)
    limit = random.Random(seed).randint(1, 120)
    batches = list(packed_batches(prompts, responses, limit, shared=True))
    assert sorted(pair for batch in batches for pair in batch) == list(range(len(prompts)))
    for batch in batches:
        pairs = concatenate_pairs([prompts[i] for i in batch], [responses[i] for i in batch])
        assert pairs.pieces is not None
        copies = sum(pairs.pieces.reaches) - sum(pairs.pieces.lengths)
        assert pairs.input_ids.numel() + copies / COPIES <= limit or len(batch) == 1
    together = [group for group in sharing(prompts, responses) if len(group) > 1]
    for group in together:
        total = sum(lengths_of(responses, group))
        if held(len(prompts[group[0]]), len(group), total) <= limit:
            assert any(set(group) <= set(batch) for batch in batches)


def test_batches_of_a_group_by_hand() -> None:
    prompts, responses = [ids(*range(8))] * 4, [ids(1, 2)] * 4
    # 8 + 2 n, and a token for each response's copies of 8 keys.
    assert list(packed_batches(prompts, responses, 20, shared=True)) == [[0, 1, 2, 3]]
    assert list(packed_batches(prompts, responses, 19, shared=True)) == [[0, 1, 2], [3]]
    assert list(packed_batches(prompts, responses, 14, shared=True)) == [[0, 1], [2, 3]]
    assert list(packed_batches(prompts, responses, 13, shared=True)) == [[0], [1], [2], [3]]
    assert list(packed_batches(prompts, responses, 20)) == [[0, 1], [2, 3]]
    # The first three alone would hold 3 x 100 + 1405 tokens, as no prompt is shared; all eight 100 + 1430 + 100.
    uneven = [ids(*range(n)) for n in (700, 700, 5, 5, 5, 5, 5, 5)]
    assert list(packed_batches([ids(*range(100))] * 8, uneven, 1650, shared=True)) == [[*range(8)]]


def test_groups_are_dealt_out_whole_as_long_as_there_is_one_for_each_rank() -> None:
    prompts = [ids(*range(8), group) for group in (0, 1, 2, 3, 4) for _ in range(4)]
    responses = [ids(1, 2)] * 20
    dealt = shards(prompts, responses, max_tokens=1000, world_size=2, shared=True)
    rows = [[row for one in passes for row in one.rows] for passes in dealt]
    # Four whole groups, and half of the fifth for each.
    assert [sorted(part) for part in rows] == [
        [*range(4), *range(8, 12), 16, 17],
        [*range(4, 8), *range(12, 16), 18, 19],
    ]
    few = shards(prompts[:4], responses[:4], max_tokens=1000, world_size=3, shared=True)
    assert few == [[Pass((0, 1))], [Pass((2, 3))], [Pass((0,), counts=False)]]


@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
def test_sequences_without_a_common_prompt_are_dealt_out_as_ever(world_size: int) -> None:
    draw = np.random.default_rng(0)
    prompts = [draw.integers(4, 64, draw.integers(1, 9)).astype(np.int32) for _ in range(23)]
    responses = [draw.integers(4, 64, draw.integers(1, 24)).astype(np.int32) for _ in range(23)]
    one, other = (
        shards(prompts, responses, packed_batches, max_tokens=60, world_size=world_size, shared=shared)
        for shared in (True, False)
    )
    order = sorted(range(23), key=lambda i: (len(responses[i]), len(prompts[i])))
    counted = [[row for each in passes if each.counts for row in each.rows] for passes in one]
    assert [sorted(rows) for rows in counted] == [sorted(order[rank::world_size]) for rank in range(world_size)]
    assert one == other


def doubled(model: Any) -> Any:
    # Experts one after the other: the kernel for all of them takes no float64.
    getattr(model, "body", model).set_experts_implementation("eager")
    return model.double().eval()


def gradient(model: Any, loss: Tensor) -> Tensor:
    """[number of weights]; zeros for a weight that no sequence needs, such as an expert without tokens."""
    weights = list(model.parameters())
    parts = torch.autograd.grad(loss, weights, allow_unused=True)
    pairs = zip(parts, weights, strict=True)
    return torch.cat([(torch.zeros_like(w) if part is None else part).flatten() for part, w in pairs])


def close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize("tile", [1 << 10, 1 << 30], ids=["tiles", "logits"])
def test_gradients_are_the_same_bits_each_time_in_several_threads(
    tile: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sums of three or more floats depend on their order."""
    monkeypatch.setitem(TILE_ELEMENTS, "cpu", tile)
    config = LlamaConfig(vocab_size=300, hidden_size=128, intermediate_size=64, num_hidden_layers=1)
    model = LlamaForCausalLM(config)
    model.save_pretrained(tmp_path)
    model = load_causal(str(tmp_path), "float32", packing=True)
    prompt = ids(*range(3, 43))
    pairs = concatenate_pairs([prompt] * 400, [ids(n % 300) for n in range(400)], last=False)
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        found = [gradient(model, DISTRIBUTION.asked_of(model, pairs)[0].sum()) for _ in range(4)]
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(each, found[0]) for each in found)


@pytest.mark.parametrize("name", NAMES)
def test_every_family_gives_what_rows_of_their_own_give(name: str, tmp_path: Path) -> None:
    """Log-probs and their gradient, in float64."""
    folder = str(FAMILIES[name].make(tmp_path / "model"))
    prompts, responses = grouped(3)
    packed = doubled(load_causal(folder, "float32", packing=True))
    plain = doubled(load_causal(folder, "float32"))
    pairs = concatenate_pairs(prompts, responses, last=False)
    assert pairs.pieces is not None
    assert pairs.pieces.shared
    with Double():
        logprobs, _ = DISTRIBUTION.asked_of(packed, pairs)
        alone = []
        for prompt, response in zip(prompts, responses, strict=True):
            each = pad_pairs([prompt], [response], last=False)
            alone.append(DISTRIBUTION.asked_of(plain, each)[0][0])
    expected = torch.cat(alone)
    close(logprobs[0], expected)
    weights = torch.randn(len(expected), dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    close(gradient(packed, logprobs[0] @ weights), gradient(plain, expected @ weights))


@pytest.mark.parametrize("name", NAMES)
def test_values_and_scores_are_those_of_rows_of_their_own(name: str, tmp_path: Path) -> None:
    """A critic's values, and a reward model's outputs at each token and at the last, with gradients in float64."""
    prompts, responses = grouped(5)
    value = str(FAMILIES[name].make(tmp_path / "value"))
    reward = str(FAMILIES[name].make_reward(tmp_path / "reward"))
    for load, folder in ((load_value, value), (load_scalar, reward)):
        torch.manual_seed(0)
        packed: ScalarModel = doubled(load(folder, "float32", packing=True))
        torch.manual_seed(0)
        plain: ScalarModel = doubled(load(folder, "float32"))
        joint = concatenate_pairs(prompts, responses)
        assert joint.pieces is not None
        assert joint.pieces.shared
        with Double():
            rows = [pad_pairs([p], [r]) for p, r in zip(prompts, responses, strict=True)]
            for numbers in (values_of, outputs_of):
                actual = numbers(packed, joint)[0]
                expected = torch.cat([numbers(plain, row)[0] for row in rows])
                close(actual, expected)
                weights = torch.randn(len(expected), dtype=torch.float64)
                close(gradient(packed, actual @ weights), gradient(plain, expected @ weights))
            close(scores_of(packed, joint), torch.cat([scores_of(plain, row) for row in rows]))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    """A packed and a padded language model of the same weights, in float64."""
    folder = str(FAMILIES["llama3"].make(tmp_path_factory.mktemp("models") / "policy"))
    return doubled(load_causal(folder, "float32", packing=True)), doubled(load_causal(folder, "float32"))


@pytest.mark.parametrize("seed", range(6))
def test_any_division_has_the_same_gradient(seed: int, models: tuple[Any, Any]) -> None:
    """Among ranks, into micro-batches, into packed rows with shared prompts or padded ones, in any order."""
    draw = random.Random(seed)
    prompts, responses = grouped(seed, groups=draw.randint(1, 5))
    coefficients = [torch.randn(len(response), dtype=torch.float64) for response in responses]

    def of(rows: Sequence[int], packing: bool) -> Tensor:
        model = models[0 if packing else 1]
        own = ([prompts[i] for i in rows], [responses[i] for i in rows])
        pairs = (concatenate_pairs if packing else pad_pairs)(*own, last=False)
        logprobs, entropy = DISTRIBUTION.asked_of(model, pairs, entropy=True)
        assert entropy is not None
        terms = (logprobs.sin() + entropy)[pairs.action_mask]
        return gradient(model, terms @ torch.cat([coefficients[i] for i in rows]))

    with Double():
        whole = of(range(len(prompts)), packing=False)
        for shared in (True, False):
            order = draw.sample(range(len(prompts)), len(prompts))
            dealt = shards(
                [prompts[i] for i in order],
                [responses[i] for i in order],
                partial(packed_batches, shared=shared),
                max_tokens=draw.randint(10, 120),
                world_size=draw.randint(1, 3),
                shared=shared,
            )
            passes = [one for rank in dealt for one in rank if one.counts]
            parts = [of([order[row] for row in one.rows], packing=True) for one in passes]
            close(torch.stack(parts).sum(0), whole)
