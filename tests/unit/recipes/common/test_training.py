"""The numerics that the recipes share."""

import math
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from quartet.wire.pairs import Pair
from recipes.common.batch import pad_right
from recipes.common.llama import tiny_policy
from recipes.common.sampling import EncodedPair, sample
from recipes.common.schedule import Schedule
from recipes.common.shape import Shape
from recipes.common.supervised import labels_of
from recipes.common.tokenizer import EOS_ID, word_tokenizer
from recipes.common.training import fit

pytestmark = pytest.mark.processes

TINY = Shape(hidden=16, layers=1, heads=2)


def test_the_rate_rises_falls_and_stays_above_the_floor() -> None:
    schedule = Schedule(steps=100, peak=2.0, warmup=10, floor=0.1)
    assert schedule.rate(0) == pytest.approx(0.2)  # 2 x 1/10 x 100/100
    assert schedule.rate(4) == pytest.approx(0.96)  # 2 x 5/10 x 96/100
    assert schedule.rate(50) == pytest.approx(1.0)  # 2 x 50/100
    assert schedule.rate(99) == pytest.approx(0.2)  # 2 x 0.1


def test_padding_goes_right_and_the_mask_comes_from_the_lengths() -> None:
    ids, mask = pad_right([[5, 0], [7, 8, 0, 9]])
    assert ids.tolist() == [[5, 0, 0, 0], [7, 8, 0, 9]]
    assert mask.tolist() == [[1, 1, 0, 0], [1, 1, 1, 1]]  # a padding token that was given counts


def test_training_labels_are_the_response_and_its_end() -> None:
    samples = [
        EncodedPair(Pair("", ""), prompt_ids=[1, 10, 11], response_ids=[12, EOS_ID]),
        EncodedPair(Pair("", ""), prompt_ids=[1, 10], response_ids=[0, 13, 14, 15]),
    ]
    ids, mask = pad_right([one.ids for one in samples])
    assert labels_of(samples, ids, mask).tolist() == [
        [-100, -100, -100, 12, 2, -100],
        [-100, -100, 0, 13, 14, 15],
    ]


class Slope(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))


def test_fit_trains_for_the_steps_of_the_schedule() -> None:
    model = Slope()
    seen: list[float] = []

    def loss_of(target: float) -> Tensor:
        seen.append(target)
        return (model.weight - target).square().sum()

    def targets() -> Iterator[float]:
        while True:
            yield 1.0

    last = fit(model, targets(), loss_of, Schedule(steps=200, peak=0.1))
    assert len(seen) == 200
    assert last < 1e-3
    assert model.weight.item() == pytest.approx(1.0, abs=0.03)
    assert not model.training


def test_fit_needs_a_batch_and_stops_at_a_loss_that_is_not_finite() -> None:
    model = Slope()
    with pytest.raises(ValueError, match="batches: at least one"):
        fit(model, [], lambda batch: model.weight.sum(), Schedule(steps=5, peak=0.1))
    with pytest.raises(FloatingPointError, match="loss at step 0 is nan"):
        fit(model, [0.0], lambda batch: model.weight.sum() * math.nan, Schedule(steps=5, peak=0.1))


def test_samples_differ_and_stop_at_the_first_end_or_at_the_limit() -> None:
    torch.manual_seed(0)
    tokenizer = word_tokenizer(["a", "b"], max_length=128)
    policy = tiny_policy(len(tokenizer), TINY).eval()
    prompts = ["a b", "a", "b b b"] * 40  # different lengths: the batch is padded
    samples = sample(policy, tokenizer, prompts, max_new_tokens=5, batch_size=50)
    assert [one.pair.prompt for one in samples] == prompts
    assert [len(one.prompt_ids) for one in samples] == [3, 2, 4] * 40
    for one in samples:
        assert one.pair.ended == (one.response_ids[-1] == EOS_ID)
        assert EOS_ID not in one.response_ids[:-1]
        assert one.pair.ended or len(one.response_ids) == 5
        assert one.pair.response.split() == [("a", "b")[i - 4] for i in one.response_ids if i > 3]
    assert {one.pair.ended for one in samples} == {True, False}
