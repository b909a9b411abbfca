"""Placement of a frozen model's weights: always on its device, or in host memory between uses."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from quartet.config.base import ConfigError
from quartet.seams.torch import grow_segments

Move = Callable[[torch.Tensor, torch.device], torch.Tensor]
Cancel = Callable[[], None]
Later = Callable[[float, Callable[[], None]], Cancel]
"""Calls a function after that many seconds, in another thread, unless cancelled."""


class Residence:
    """Copies a frozen model's weights to its device; with offload, drops them from there once they are idle.

    The weights never change, so one pinned copy always stays in host memory: bringing them to the device is one copy
    over the bus, and dropping them copies nothing. On a CPU nothing moves. Buffers are small and stay on the device.
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
        """Takes over the model; nothing else may move it.

        Args:
            model: in host memory, frozen.
            device: the device it computes on.
            offload_after_s: seconds without a use after which the weights leave the device; 0: at once, None: never.
            spread: the weights are on several devices already and stay there.
            move: copies one weight to the device.
            later: the timer.

        Raises:
            ConfigError: offload was asked for a spread model.
        """
        self.offloads = offload_after_s is not None
        self._device = device
        self._after_s = offload_after_s or 0
        self._move, self._later = move or _copied, later or _timer
        self._lock = threading.Lock()
        self._cancel: Cancel = _nothing
        self._uses = 0
        self._on_device = False
        if device.type == "cuda":
            grow_segments(device)
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
        """Context in which the weights are on the device. With offload one use at a time; others wait."""
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
        """Raises if the device no longer computes. Does not move the weights, nor delay their leaving."""
        torch.zeros(1, device=self._device).add_(1)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _bring(self) -> None:
        if self._on_device:
            return
        try:
            # A tensor made in inference mode could not be used outside of it later.
            with torch.inference_mode(False):
                for weight, host in self._host.items():
                    weight.data = self._move(host, self._device)
        except BaseException:
            # Free what was copied: a half-loaded model only holds device memory.
            self._drop()
            raise
        self._on_device = True

    def _drop_after(self, use: int) -> None:
        with self._lock:
            # The timer may fire just as the next use begins, when it can no longer be cancelled.
            if use == self._uses:
                self._drop()

    def _drop(self) -> None:
        self._on_device = False
        for weight, host in self._host.items():
            weight.data = host
        if self._device.type == "cuda":
            # Torch would cache the memory; give it back for other processes.
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
