"""Where a frozen model's weights are: on its device for good, or in host memory between uses."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from services.common.config import ConfigError

Move = Callable[[torch.Tensor, torch.device], torch.Tensor]
Cancel = Callable[[], None]
Later = Callable[[float, Callable[[], None]], Cancel]
"""Calls a function after so many seconds, from a thread of its own, unless cancelled."""


class Residence:
    """Brings a frozen model's weights to its device, and with offload drops them there once they are idle.

    The weights never change, so one copy stays in host memory, pinned, for good: bringing them is one copy over the
    bus, dropping them copies nothing. On a CPU the two places are one and nothing moves. Buffers are small and stay
    on the device.
    """

    def __init__(
        self,
        model: nn.Module,
        device: torch.device,
        offload_after_s: float | None = None,
        *,
        spread: bool = False,
        move: Move | None = None,
        later: Later | None = None,
    ) -> None:
        """Takes the model over; nothing else may move it.

        Args:
            model: in host memory, frozen.
            device: where it computes.
            offload_after_s: seconds without a use after which the weights leave the device, 0 for at once. None:
                they stay.
            spread: the weights are on several devices already, to stay.
            move: how a weight gets to the device.
            later: the clock.

        Raises:
            ConfigError: offload of a model that is spread.
        """
        self.offloads = offload_after_s is not None
        self._device = device
        self._after_s = offload_after_s or 0
        self._move, self._later = move or _copied, later or _timer
        self._lock = threading.Lock()
        self._cancel: Cancel = _nothing
        self._uses = 0
        self._there = False
        self._host: dict[nn.Parameter, torch.Tensor] = {}
        if not self.offloads:
            if not spread:
                model.to(device)
            return
        if spread:
            raise ConfigError("offload: for a model on one GPU; with several set it to false")
        pin = device.type == "cuda"
        for weight in model.parameters():
            self._host[weight] = weight.data = weight.data.pin_memory() if pin else weight.data
        for buffer in model.buffers():
            buffer.data = buffer.data.to(device)

    @contextmanager
    def use(self) -> Iterator[None]:
        """While this is open the weights are on the device. With offload one use at a time; others wait."""
        if not self.offloads:
            yield
            return
        with self._lock:
            self._cancel()
            self._uses += 1
            use = self._uses
            try:
                self._bring()
                yield
            finally:
                if self._after_s:
                    self._cancel = self._later(self._after_s, lambda: self._drop_after(use))
                else:
                    self._drop()

    def check(self) -> None:
        """Raises if the device no longer computes. Neither brings the weights nor keeps them there."""
        torch.zeros(1, device=self._device).add_(1)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _bring(self) -> None:
        if self._there:
            return
        try:
            # A copy made in inference mode could never leave it.
            with torch.inference_mode(False):
                for weight, host in self._host.items():
                    weight.data = self._move(host, self._device)
        except BaseException:
            # Half a model on a device that had no room for the rest would stand in everybody's way.
            self._drop()
            raise
        self._there = True

    def _drop_after(self, use: int) -> None:
        with self._lock:
            # A timer that fires while the next use begins cannot be cancelled any more.
            if use == self._uses:
                self._drop()

    def _drop(self) -> None:
        self._there = False
        for weight, host in self._host.items():
            weight.data = host
        if self._device.type == "cuda":
            # Torch would keep the memory for itself; it is another process's turn.
            torch.cuda.empty_cache()


def _copied(weight: torch.Tensor, device: torch.device) -> torch.Tensor:
    return weight.to(device, non_blocking=True)


def _timer(seconds: float, action: Callable[[], None]) -> Cancel:
    timer = threading.Timer(seconds, action)
    timer.daemon = True
    timer.start()
    return timer.cancel


def _nothing() -> None:
    pass
