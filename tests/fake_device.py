"""A device that is not there: `cpu:0`, whose memory is told apart from the host's, `cpu`, so that copies between the
two are counted."""

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

DEVICE = torch.device("cpu", 0)
"""torch drops the number from a tensor's device, but shows it to a dispatch mode."""
DOWN, UP = "to the host", "to the device"


class FakeDevice:
    """Counts the bytes that torch copies between DEVICE and the host, in all threads that start meanwhile.

    Memory is the device's if it was made there, or computed from such memory, as on a GPU. numpy cannot have it.
    """

    def __init__(self) -> None:
        self.copied: Counter[tuple[str, str]] = Counter()
        """(label, DOWN or UP) -> bytes."""
        self._own: set[int] = set()
        """Addresses of the device's storages."""
        self._labels = threading.local()
        self._lock = threading.Lock()

    def has(self, tensor: torch.Tensor) -> bool:
        """True if the tensor is in the device's memory."""
        return _address(tensor) in self._own

    def take(self, tensor: torch.Tensor) -> torch.Tensor:
        """Counts memory that torch did not make as the device's."""
        self._note(tensor, device=True)
        return tensor

    @contextmanager
    def labelled(self, label: str) -> Iterator[None]:
        """Counts copies of this thread, and of those that it starts, under this label."""
        before, self._labels.name = self.label, label
        try:
            yield
        finally:
            self._labels.name = before

    @property
    def label(self) -> str:
        """The label of this thread."""
        return str(getattr(self._labels, "name", ""))

    @contextmanager
    def counting(self) -> Iterator["FakeDevice"]:
        """Context in which copies are counted."""
        numpy, start, run = torch.Tensor.numpy, threading.Thread.start, threading.Thread.run
        labels: dict[threading.Thread, str] = {}

        def started(thread: threading.Thread) -> None:
            labels[thread] = self.label
            start(thread)

        def ran(thread: threading.Thread) -> None:
            self._labels.name = labels.pop(thread, "")
            with _Mode(self):
                run(thread)

        def to_numpy(tensor: torch.Tensor, **options: Any) -> Any:
            if self.has(tensor):
                raise TypeError("can't convert a device's tensor to numpy")
            return numpy(tensor, **options)

        patched: dict[tuple[Any, str], Any] = {
            (threading.Thread, "start"): started,
            (threading.Thread, "run"): ran,
            (torch.Tensor, "numpy"): to_numpy,
        }
        originals: dict[tuple[Any, str], Any] = {
            (threading.Thread, "start"): start,
            (threading.Thread, "run"): run,
            (torch.Tensor, "numpy"): numpy,
        }
        _replace(patched)
        try:
            with _Mode(self):
                yield self
        finally:
            _replace(originals)

    def carry_out(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Carries out one of torch's operations and counts the bytes that it moves."""
        inputs = [each for each in _tensors(args) if self.has(each)]
        asked = kwargs.get("device")
        on_device = bool(inputs) if asked is None else torch.device(asked) == DEVICE
        if function is torch.ops.aten.copy_.default:
            self._count(args[1], self.has(args[0]))
        if function is torch.ops.aten._to_copy.default:
            if on_device and self.has(args[0]) and kwargs.get("dtype") in (None, args[0].dtype):
                return args[0]
            self._count(args[0], on_device)
        before = {_address(each) for each in _tensors(args)}
        result = function(*args, **kwargs)
        for made in _tensors((result,)):
            if _address(made) not in before:
                self._note(made, device=on_device)
        return result

    def _count(self, source: torch.Tensor, to_device: bool) -> None:
        if source.nbytes and self.has(source) != to_device:
            with self._lock:
                self.copied[self.label, UP if to_device else DOWN] += source.nbytes

    def _note(self, tensor: torch.Tensor, *, device: bool) -> None:
        with self._lock:
            if device and tensor.numel():
                self._own.add(_address(tensor))
            else:
                self._own.discard(_address(tensor))


class _Mode(TorchDispatchMode):
    def __init__(self, device: FakeDevice) -> None:
        super().__init__()
        self._device = device

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._device.carry_out(function, args, kwargs or {})


def _replace(methods: dict[tuple[Any, str], Any]) -> None:
    for (owner, name), method in methods.items():
        setattr(owner, name, method)


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)


def _address(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage().data_ptr())
