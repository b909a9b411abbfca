"""Padding and batching by length, and the order of minibatches."""

from collections.abc import Callable
from itertools import chain

import numpy as np
import pytest
import torch

from quartet.learner.minibatches import Means, minibatches, weight_of
from quartet.models.sequences import (
    PairTensors,
    concatenate_pairs,
    length_batches,
    packed_batches,
    pad_pairs,
    pad_rows,
)
from tests.unit.rows import ids


def test_pairs_are_padded_left_and_right_of_one_column() -> None:
    # P = 3 and T = 2: all responses start in column 3.
    pairs = pad_pairs([ids(5), ids(6, 7, 8)], [ids(9, 4), ids(3)])
    assert pairs.input_ids.tolist() == [[0, 0, 5, 9, 4], [6, 7, 8, 3, 0]]
    assert pairs.attention_mask is not None
    assert pairs.attention_mask.tolist() == [[0, 0, 1, 1, 1], [1, 1, 1, 1, 0]]
    assert pairs.position_ids.tolist() == [[0, 0, 0, 1, 2], [0, 1, 2, 3, 3]]
    assert pairs.action_mask.tolist() == [[True, True], [True, False]]
    assert pairs.response_ids.tolist() == [[9, 4], [3, 0]]
    assert (pairs.width, pairs.lengths) == (2, (2, 1))
    assert pairs.input_ids.dtype == pairs.position_ids.dtype == torch.int64


def test_a_pad_id_in_a_response_is_a_token_like_any_other() -> None:
    pairs = pad_pairs([ids(0, 5)], [ids(7, 0, 0)])
    assert pairs.attention_mask is not None
    assert pairs.attention_mask.tolist() == [[1, 1, 1, 1, 1]]
    assert pairs.position_ids.tolist() == [[0, 1, 2, 3, 4]]
    assert pairs.action_mask.tolist() == [[True, True, True]]


def test_unpad_gives_each_row_its_own_length_in_float32() -> None:
    pairs = pad_pairs([ids(5), ids(6)], [ids(9), ids(3, 4)])
    rows = pairs.unpad(torch.tensor([[1.5, -1.0], [2.0, 2.5]], dtype=torch.bfloat16, requires_grad=True))
    assert [row.tolist() for row in rows] == [[1.5], [2.0, 2.5]]
    assert rows[0].dtype == np.float32


def test_packed_pairs_lie_in_one_row_and_positions_begin_again() -> None:
    pairs = concatenate_pairs([ids(5), ids(6, 7, 8)], [ids(9, 4), ids(3)])
    assert pairs.input_ids.tolist() == [[5, 9, 4, 6, 7, 8, 3]]
    assert pairs.position_ids.tolist() == [[0, 1, 2, 0, 1, 2, 3]]
    assert pairs.attention_mask is None
    assert pairs.predictors.tolist() == [0, 1, 5]
    assert pairs.response_ids.tolist() == [[9, 4, 3]]
    assert pairs.action_mask.tolist() == [[True, True, True]]
    assert (pairs.width, pairs.lengths) == (3, (2, 1))
    assert [row.tolist() for row in pairs.unpad(torch.tensor([[1.0, 2.0, 3.0]]))] == [[1, 2], [3]]


def test_without_the_last_tokens_the_same_columns_predict_the_same_tokens() -> None:
    prompts, responses = [ids(5), ids(6, 7, 8), ids(4)], [ids(9, 4), ids(3), ids()]
    padded = pad_pairs(prompts, responses, last=False)
    assert padded.input_ids.tolist() == [[0, 0, 5, 9], [6, 7, 8, 0], [0, 0, 4, 0]]
    assert padded.attention_mask is not None
    assert padded.attention_mask.tolist() == [[0, 0, 1, 1], [1, 1, 1, 0], [0, 0, 1, 0]]
    assert padded.position_ids.tolist() == [[0, 0, 0, 1], [0, 1, 2, 2], [0, 0, 0, 0]]
    assert padded.predictors.tolist() == [2, 3]
    assert padded.response_ids.tolist() == [[9, 4], [3, 0], [0, 0]]
    packed = concatenate_pairs(prompts, responses, last=False)
    assert packed.input_ids.tolist() == [[5, 9, 6, 7, 8, 4]]
    assert packed.position_ids.tolist() == [[0, 1, 0, 1, 2, 0]]
    assert packed.predictors.tolist() == [0, 1, 4]
    assert packed.response_ids.tolist() == [[9, 4, 3]]
    assert packed.boundaries is not None
    assert packed.boundaries.tolist() == [0, 2, 5, 6]
    for pairs in (padded, packed):
        whole = (pad_pairs if pairs is padded else concatenate_pairs)(prompts, responses)
        assert (pairs.action_mask == whole.action_mask).all()
        assert (pairs.steps == whole.steps).all()
        assert (pairs.width, pairs.lengths) == (whole.width, whole.lengths)


@pytest.mark.parametrize("make", [pad_pairs, concatenate_pairs])
def test_values_go_to_their_tokens_and_back(make: Callable[..., PairTensors]) -> None:
    pairs = make([ids(5), ids(6, 7, 8)], [ids(9), ids(3, 4)])
    spread = pairs.spread([np.asarray([1.0]), np.asarray([2.0, 3.0])])
    assert spread.tolist() == ([[1, 0], [2, 3]] if make is pad_pairs else [[1, 2, 3]])
    marks = [np.asarray([True]), np.asarray([False, True])]
    wanted = [[True, False], [False, True]] if make is pad_pairs else [[True, False, True]]
    assert pairs.trained(marks).tolist() == wanted
    assert pairs.trained(None) is pairs.action_mask
    assert not pairs.trained(marks, counts=False).any()
    assert not pairs.trained(None, counts=False).any()
    assert spread.dtype == torch.float32
    assert [row.tolist() for row in pairs.unpad(spread)] == [[1], [2, 3]]


def test_rows_are_padded_with_zeros_on_the_right() -> None:
    padded = pad_rows([np.asarray([1.0]), np.asarray([2.0, 3.0])], 3)
    assert padded.tolist() == [[1, 0, 0], [2, 3, 0]]
    assert padded.dtype == torch.float32


@pytest.mark.parametrize("seed", range(20))
def test_length_batches_cover_all_pairs_once_and_keep_the_limit(seed: int) -> None:
    draw = np.random.default_rng(seed)
    count, limit = int(draw.integers(1, 60)), int(draw.integers(1, 120))
    prompts = [np.zeros(int(length), np.int32) for length in draw.integers(1, 20, count)]
    responses = [np.zeros(int(length), np.int32) for length in draw.integers(1, 20, count)]
    batches = list(length_batches(prompts, responses, limit))
    assert sorted(index for batch in batches for index in batch) == list(range(count))
    for batch in batches:
        padded = pad_pairs([prompts[i] for i in batch], [responses[i] for i in batch])
        assert padded.input_ids.numel() <= limit or len(batch) == 1


def test_length_batches_by_hand() -> None:
    # By response length, then prompt length: (1,1) (2,1) (1,4). The first two pad to 2 x (2 + 1) = 6 tokens;
    # with the third it would be 3 x (2 + 4) = 18.
    prompts, responses = [ids(1), ids(1), ids(1, 1)], [ids(1, 1, 1, 1), ids(1), ids(1)]
    assert list(length_batches(prompts, responses, 6)) == [[1, 2], [0]]
    assert list(length_batches(prompts, responses, 17)) == [[1, 2], [0]]
    assert list(length_batches(prompts, responses, 18)) == [[1, 2, 0]]
    assert list(length_batches(prompts, responses, 1)) == [[1], [2], [0]]
    assert list(length_batches([], [], 6)) == []
    # A long prompt widens its own batch only: 10 + 1, then 2 x (1 + 2).
    assert list(length_batches([ids(*range(10)), ids(1), ids(1)], [ids(1), ids(1, 1), ids(1, 1)], 11)) == [
        [0],
        [1, 2],
    ]


def test_a_batch_with_enough_tokens_ends_before_more_than_an_eighth_is_padding() -> None:
    # Responses of 1, 1, 7, 8, 8 and 9 tokens after prompts of 1: 2, 2, 8, 9, 9 and 10 tokens.
    prompts = [ids(1)] * 6
    responses = [ids(*range(length)) for length in (1, 1, 7, 8, 8, 9)]
    # The first two have 4; with the third 12 of 24 would be padding. The others have 36 of 40.
    assert list(length_batches(prompts, responses, 100, enough=4)) == [[0, 1], [2, 3, 4, 5]]
    # 4 are not enough, so the third joins; with the fourth 15 of 36 would be padding.
    assert list(length_batches(prompts, responses, 100, enough=5)) == [[0, 1, 2], [3, 4, 5]]
    assert list(length_batches(prompts, responses, 100, enough=100)) == [[0, 1, 2, 3, 4, 5]]
    assert list(length_batches(prompts, responses, 100)) == [[0, 1, 2, 3, 4, 5]]
    # The limit still holds.
    assert list(length_batches(prompts, responses, 18, enough=4)) == [[0, 1], [2, 3], [4], [5]]


def test_packed_batches_by_hand() -> None:
    # Lengths 5, 2, 3, in order 2, 3, 5.
    prompts, responses = [ids(1), ids(1), ids(1, 1)], [ids(1, 1, 1, 1), ids(1), ids(1)]
    assert list(packed_batches(prompts, responses, 10)) == [[1, 2, 0]]
    assert list(packed_batches(prompts, responses, 9)) == [[1, 2], [0]]
    assert list(packed_batches(prompts, responses, 4)) == [[1], [2], [0]]
    assert list(packed_batches(prompts, responses, 1)) == [[1], [2], [0]]
    assert list(packed_batches([], [], 6)) == []


def test_every_epoch_is_a_new_permutation_in_minibatches() -> None:
    chosen = list(minibatches(7, epochs=3, size=3, seed=1))
    assert [len(batch) for batch in chosen] == [3, 3, 1] * 3
    epochs = [list(chain.from_iterable(chosen[start : start + 3])) for start in (0, 3, 6)]
    assert all(sorted(epoch) == list(range(7)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]
    assert chosen == list(minibatches(7, epochs=3, size=3, seed=1))
    assert chosen != list(minibatches(7, epochs=3, size=3, seed=2))


def test_means_over_steps() -> None:
    means = Means()
    assert means.result() == {"skipped_steps": 0}
    means.add({"loss": 1.0, "norm": 4.0})
    means.add({"loss": 2.0, "norm": 6.0})
    means.add({})
    assert means.result() == {"loss": 1.5, "norm": 5.0, "skipped_steps": 1}
    assert means.first == {"loss": 1.0, "norm": 4.0}


def test_maxima_stay_maxima_and_steps_count_by_their_weight() -> None:
    means = Means()
    means.add({"loss": 1.0, "ratio_max": 3.0})
    means.add({"loss": 4.0, "ratio_max": 2.0}, weight=0.5)
    assert means.result() == {"loss": 2.0, "ratio_max": 3.0, "skipped_steps": 0}


def test_minibatches_that_were_left_out_are_counted_and_change_no_mean() -> None:
    means = Means()
    means.add({"loss": 2.0})
    means.leave_out()
    assert means.result() == {"loss": 2.0, "skipped_steps": 0, "empty_steps": 1}


def test_a_minibatch_counts_by_its_tokens() -> None:
    lengths = [10] * 33
    assert weight_of(list(range(32)), lengths, 32) == 1
    assert weight_of([32], lengths, 32) == pytest.approx(1 / 32)
    assert weight_of([0], [30, 10, 20], 2) == pytest.approx(30 / 40)
    assert weight_of([0, 2], [30, 10, 20], 2) == pytest.approx(50 / 40)
    assert weight_of([0, 1], [5, 5], 32) == 1  # a batch that is one minibatch
    # Whole, but with a single token of the 769 that are trained on; two minibatches have 384.5 in the mean.
    assert weight_of([0, 1], [1, 0, 384, 384], 2) == pytest.approx(1 / 384.5)


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8])
def test_each_token_of_a_batch_weighs_the_same_however_it_is_divided(size: int) -> None:
    """A token's weight is that of its minibatch over the tokens of its minibatch."""
    lengths = [7, 1, 0, 30, 12, 0, 3, 9]
    for chosen in minibatches(len(lengths), epochs=3, size=size, seed=size):
        if tokens := sum(lengths[index] for index in chosen):
            assert weight_of(chosen, lengths, size) / tokens == pytest.approx(8 / (62 * size))
