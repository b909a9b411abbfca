"""Following weights through copies, to where a model keeps them."""

from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import nn

from services.rollout.vllm.destinations import Destinations, Watch, near
from tests.fake_device import DEVICE, UP, FakeDevice

Load = Callable[[nn.Module, torch.Tensor], Any]


class Model(nn.Module):
    """One matrix, and a vector of zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(6, 4), requires_grad=False)
        self.register_buffer("scale", torch.zeros(2))


def loaded(load: Load, model: nn.Module, weight: torch.Tensor) -> Destinations | None:
    """Learns while a function loads a weight called `w`."""
    watch = Watch()
    with watch:
        for _, given in watch.named([("w", weight)]):
            load(model, given)
    return watch.destinations(model)


def pieces_of(found: Destinations, **weights: torch.Tensor) -> list[tuple[str, list[torch.Tensor]]]:
    """The pieces of these weights."""
    return [
        (name, [piece.within(weight) for piece in found.pieces.get(name, ())]) for name, weight in weights.items()
    ]


def straight(model: Any, weight: torch.Tensor) -> None:
    model.weight.data[1:3].copy_(weight)


def turned(model: Any, weight: torch.Tensor) -> None:
    model.weight.data.copy_(torch.empty_like(model.weight).copy_(weight.t()))


def through_another(model: Any, weight: torch.Tensor) -> None:
    """A part of another memory, the rest of which is zero, and which is copied as a whole."""
    other = torch.empty_strided((6, 4), (4, 1))
    other[2:4].copy_(weight)
    other[:2].zero_()
    other[4:].fill_(0)
    model.weight.data.copy_(other)


def in_parts(model: Any, weight: torch.Tensor) -> None:
    model.weight.data[:2, :2].copy_(weight[:, :2])
    model.weight.data[4:, 2:].copy_(weight[:, 2:])


def padded(model: Any, weight: torch.Tensor) -> None:
    """Rows that are filled after the weight, as those of a vocabulary are."""
    model.weight.data[:2].copy_(weight)
    model.weight.data[2:].fill_(0)
    model.weight.data[:0].fill_(1)


def reused(model: Any, weight: torch.Tensor) -> None:
    """A memory where another one was, with nothing of the weight in it."""
    for value in (None, 3.0):
        other = torch.empty_strided((6, 4), (4, 1))
        other.fill_(value) if value else other[:2].copy_(weight)
        if value:
            model.weight.data.copy_(other)
        del other
    model.weight.data[2:4].copy_(weight)


@pytest.mark.parametrize(
    ("load", "shape"),
    [
        (straight, (2, 4)),
        (turned, (4, 6)),
        (through_another, (2, 4)),
        (in_parts, (2, 4)),
        (padded, (2, 4)),
        (reused, (2, 4)),
    ],
)
def test_a_weight_is_copied_to_where_a_load_brought_it(load: Load, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    model, expected = Model(), Model()
    found = loaded(load, model, torch.randn(shape))
    assert found is not None
    row = torch.randn(9 + torch.Size(shape).numel())
    second = row[9:].view(shape)  # a bucket holds others as well
    found.fill(pieces_of(found, other=row[:9], w=second))
    load(expected, second)
    assert torch.equal(model.weight, expected.weight)
    assert found.hold(pieces_of(found, w=second))
    assert not found.hold(pieces_of(found, w=second + 1))
    with pytest.raises(RuntimeError, match=r"1 weights were not sent, such as w"):
        found.fill(pieces_of(found, other=second))


def doubled(model: Any, weight: torch.Tensor) -> None:
    model.weight.data[:2].copy_(weight * 2)


def doubled_in_place(model: Any, weight: torch.Tensor) -> None:
    model.weight.data[:2].copy_(weight)
    model.weight.data.mul_(2)


def by_the_host(model: Any, weight: torch.Tensor) -> None:
    model.weight.data[:2].copy_(weight)
    model.scale.fill_(weight[0, 0].item())


def filled(model: Any, weight: torch.Tensor) -> None:
    model.weight.data[:2].copy_(weight)
    model.scale.fill_(weight[0, 0])


def spread(model: Any, weight: torch.Tensor) -> None:
    model.weight.data.copy_(weight[:1])


def replaced(model: Any, weight: torch.Tensor) -> None:
    model.weight.data[:2].copy_(weight)
    model.weight.data[:1].copy_(torch.ones(1, 4))


def a_part_of_another(model: Any, weight: torch.Tensor) -> None:
    other = torch.empty_strided((6, 4), (4, 1))
    other[2:4].copy_(weight)
    model.weight.data[:4].copy_(other[:4])


def kept_elsewhere(model: Any, weight: torch.Tensor) -> None:
    """A part of it, as a kernel may keep it in a form of its own."""
    model.weight.data[:1].copy_(weight[:1])
    torch.empty(1, 4).copy_(weight[1:])


def left_out(model: Any, weight: torch.Tensor) -> None:
    """Zeros in place of a bias that another worker adds."""
    weight.zero_()
    model.weight.data[:2].copy_(weight)


def cleared(model: Any, weight: torch.Tensor) -> None:
    model.weight.data[:2].copy_(weight)
    model.weight.data[1:3].zero_()


def nothing(model: Any, weight: torch.Tensor) -> None:
    model.weight.data.fill_(1)


@pytest.mark.parametrize(
    "load",
    [
        doubled,
        doubled_in_place,
        by_the_host,
        filled,
        spread,
        replaced,
        a_part_of_another,
        kept_elsewhere,
        left_out,
        cleared,
        nothing,
    ],
)
def test_of_what_is_no_plain_copy_nothing_is_learned(load: Load) -> None:
    assert loaded(load, Model(), torch.randn(2, 4)) is None


def test_weights_of_another_dtype_are_converted_as_they_were() -> None:
    model = Model().to(torch.bfloat16)
    found = loaded(straight, model, torch.randn(2, 4))
    assert found is not None
    second = torch.randn(2, 4)
    found.fill(pieces_of(found, w=second))
    assert torch.equal(model.weight[1:3], second.to(torch.bfloat16))
    assert found.hold(pieces_of(found, w=second))


@pytest.mark.parametrize(
    ("piece", "dtype", "copied"),
    [
        (torch.arange(12.0).view(3, 4)[1:], torch.float32, None),
        # Eight of ten numbers from the second one on.
        (torch.arange(12.0).view(2, 6)[:, 1:5], torch.float32, 10),
        (torch.arange(12.0).view(3, 4).t(), torch.float32, 12),
        (torch.arange(12.0).view(3, 4)[1:], torch.bfloat16, 8),
        (torch.zeros(3, 0).t(), torch.bfloat16, None),
    ],
    ids=["in a row", "some columns", "turned", "another dtype", "nothing"],
)
def test_scattered_numbers_come_to_the_device_with_what_lies_between(
    piece: torch.Tensor, dtype: torch.dtype, copied: int | None
) -> None:
    came = near(piece, torch.empty(0, dtype=dtype, device="meta"))
    if copied is None:
        assert came is piece
    else:
        assert (came.device.type, came.untyped_storage().nbytes()) == ("meta", copied * 4)
        assert (came.shape, came.stride(), came.dtype) == (piece.shape, piece.stride(), piece.dtype)
    assert near(piece, torch.empty(0, dtype=dtype)) is piece


def test_what_comes_to_the_device_are_the_same_numbers() -> None:
    with FakeDevice().counting() as device:
        piece, place = torch.arange(12.0).view(2, 6)[:, 1:5], Mock(device=DEVICE, dtype=torch.float32)
        assert near(piece, place).tolist() == [[1, 2, 3, 4], [7, 8, 9, 10]]
        assert device.copied == {("", UP): 10 * 4}
