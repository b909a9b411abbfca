"""The wires of a push by the names of their backends: gloo sends host memory, on any machine; NCCL sends from GPU to
GPU, each member on its own GPU."""

import math
import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import Store

from quartet.ranks.nccl_settings import BLOCKING_WAIT, DEFAULTS, ERROR_HANDLING, GIVE_UP
from quartet.seams.torch import GlooGroup, gloo_group, nccl_group
from quartet.weight_transfer.groups.group import Wire

SETTINGS = {
    # A wait then blocks the caller, and at the timeout aborts the communicator and raises. Otherwise torch's watchdog
    # notices the timeout and ends the process.
    BLOCKING_WAIT: "1",
    ERROR_HANDLING: "0",
}
"""Environment variables that torch reads only while it makes a group. The learner's own groups keep torch's
defaults."""

MARGIN_S = 5
"""Seconds by which torch waits longer than the group, whose own deadline says more."""

_making = threading.Lock()


def make_wire(backend: str, host: str, device: torch.device, stall_s: float) -> Wire:
    """The wire of a member with this address and device, whose groups form within `stall_s` seconds.

    Raises:
        ValueError: the backend has no process groups, or it is NCCL without a GPU.
    """
    if backend == "gloo":
        return gloo_wire(host)
    if backend == "nccl" and device.type == "cuda":
        return nccl_wire(device, stall_s)
    if backend == "nccl":
        raise ValueError("weights.backend: nccl, but this process has no GPU")
    raise ValueError(f"weights.backend: {backend!r} is not one of gloo, nccl, ipc and cuda-ipc")


def gloo_wire(host: str) -> Wire:
    """A gloo wire whose connections listen on `host`, this member's own address."""

    def form(store: Store, rank: int, world_size: int, timeout: timedelta) -> GlooGroup:
        return gloo_group(store, rank, world_size, timeout, host)

    return Wire(form)


def nccl_wire(device: torch.device, stall_s: float) -> Wire:
    """An NCCL wire that reads and writes the memory of `device`, a GPU.

    Args:
        device: the GPU.
        stall_s: longest time in seconds that a group takes to form. The first wire of a process sets how long an
            abort may wait for it, unless the environment says something else than torch's default.
    """
    if os.environ.get(GIVE_UP, DEFAULTS[GIVE_UP]) == DEFAULTS[GIVE_UP]:
        os.environ[GIVE_UP] = str(math.ceil(stall_s) + MARGIN_S)
    return Wire(_form_nccl, device)


def _form_nccl(store: Store, rank: int, world_size: int, timeout: timedelta) -> Any:
    with _making, environment(SETTINGS):
        return nccl_group(store, rank, world_size, timeout)


@contextmanager
def environment(settings: Mapping[str, str]) -> Iterator[None]:
    """Context in which these environment variables are set. None is removed afterwards; one that was not there gets
    torch's default."""
    before = {name: os.environ.get(name, DEFAULTS[name]) for name in settings}
    os.environ.update(settings)
    try:
        yield
    finally:
        os.environ.update(before)
