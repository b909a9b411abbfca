"""Weights that come to a device for a use and leave it afterwards, with copies counted and time in hand."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from quartet.config.base import ConfigError
from quartet.models.offload import Residence

CPU = torch.device("cpu")


class Bus:
    """Copies weights and counts them; the device has room for so many."""

    def __init__(self, room: int = 100) -> None:
        self.copies = 0
        self._room = room

    def __call__(self, weight: torch.Tensor, device: torch.device) -> torch.Tensor:
        if self.copies >= self._room:
            raise torch.OutOfMemoryError("no room")
        self.copies += 1
        return weight.clone()


class Clock:
    """Timers that go off when told to."""

    def __init__(self) -> None:
        self.set: list[tuple[float, Callable[[], None]]] = []
        self.cancelled = 0

    def __call__(self, seconds: float, action: Callable[[], None]) -> Callable[[], None]:
        self.set.append((seconds, action))
        return self._cancel

    def _cancel(self) -> None:
        self.cancelled += 1


@pytest.fixture
def model() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1)).eval().requires_grad_(False)


def places(model: nn.Module) -> list[int]:
    return [weight.data_ptr() for weight in model.parameters()]


@torch.inference_mode()
def test_weights_are_copied_for_a_use_and_the_host_copy_stays(model: nn.Module) -> None:
    inputs, home, bus = torch.ones(1, 3), places(model), Bus()
    expected = model(inputs)
    residence = Residence(model, CPU, 0, move=bus)
    assert places(model) == home
    for uses in (1, 2):
        with residence.use():
            assert not set(places(model)) & set(home)
            assert model(inputs).equal(expected)
        assert places(model) == home
        assert bus.copies == 4 * uses
    assert model(inputs).equal(expected)


def test_weights_stay_until_they_were_idle_for_long_enough(model: nn.Module) -> None:
    home, bus, clock = places(model), Bus(), Clock()
    residence = Residence(model, CPU, 2.5, move=bus, later=clock)
    for _ in range(3):
        with residence.use():
            pass
    assert (bus.copies, clock.cancelled, [seconds for seconds, _ in clock.set]) == (4, 2, [2.5] * 3)
    # One that went off in the moment in which the next use began has come too late.
    clock.set[0][1]()
    assert places(model) != home
    clock.set[2][1]()
    assert places(model) == home
    with residence.use():
        assert bus.copies == 8


def test_a_real_timer_drops_the_weights(model: nn.Module) -> None:
    home = places(model)
    residence = Residence(model, CPU, 1e-3, move=Bus())
    with residence.use():
        assert places(model) != home
    while places(model) != home:  # the test run's own limit ends a wait in vain
        pass


def test_a_device_that_is_full_holds_no_half_model(model: nn.Module) -> None:
    home, bus = places(model), Bus(room=3)
    residence = Residence(model, CPU, 10, move=bus)
    with pytest.raises(torch.OutOfMemoryError), residence.use():
        raise AssertionError("the weights are not there")
    assert places(model) == home


def test_a_failed_use_leaves_no_weights_behind(model: nn.Module) -> None:
    home = places(model)
    residence = Residence(model, CPU, 0, move=Bus())
    with pytest.raises(ZeroDivisionError), residence.use():
        raise ZeroDivisionError
    assert places(model) == home


def test_without_offload_and_on_a_cpu_nothing_moves(model: nn.Module) -> None:
    home = places(model)
    for after_s in (None, 0):
        with Residence(model, CPU, after_s).use():
            assert places(model) == home


def test_a_health_check_brings_no_weights(model: nn.Module) -> None:
    bus = Bus()
    Residence(model, CPU, 0, move=bus).check()
    assert bus.copies == 0


def test_buffers_and_tied_weights(model: nn.Module) -> None:
    tied = nn.Sequential(nn.Embedding(4, 3), nn.Linear(3, 4, bias=False), nn.BatchNorm1d(4, affine=False))
    tied[1].weight = tied[0].weight
    tied.eval().requires_grad_(False)
    bus = Bus()
    with Residence(tied, CPU, 0, move=bus).use():
        assert tied[0].weight.data_ptr() == tied[1].weight.data_ptr()
    assert bus.copies == 1


def test_a_model_on_several_devices_stays_there(model: nn.Module) -> None:
    with Residence(model.to("meta"), CPU, spread=True).use():
        assert {weight.device.type for weight in model.parameters()} == {"meta"}
    with pytest.raises(ConfigError, match=r"^offload: for a model on one GPU; with several set it to false$"):
        Residence(model, CPU, 0, spread=True)
