"""Private names of torch: options of process groups, the permission to compute with AMX's tiles, how memory of a GPU
is taken, the class of all dropouts, and a look at each operator. None has a public way but before torch's import."""

import logging
import os
import threading
import time
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import BroadcastOptions, ProcessGroupGloo, Store, Work
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

VERSIONS = ">=2.11,<2.15"
log = logging.getLogger("quartet")

FREEING = "free gloo group"
"""Name of the threads that free groups which were aborted."""
MOMENT = timedelta(milliseconds=1)
"""The shortest wait that gloo knows."""
LOOK = timedelta(milliseconds=100)
"""Time between two looks of a waiting operation whether its group has been aborted."""


class GlooGroup:
    """A gloo group whose operations end when it is aborted, by this member or another.

    Torch's own has no abort, and a broadcast whose first bytes have come or gone waits until its timeout even when
    gloo has found its connection broken.
    """

    def __init__(self, group: ProcessGroupGloo) -> None:
        """`group` has no other user."""
        self._group: ProcessGroupGloo | None = group
        self._aborted = threading.Event()

    def broadcast(self, tensors: list[Tensor], options: BroadcastOptions) -> "GlooWork":
        """Begins to send or receive the tensors. RuntimeError if the group was aborted."""
        group = self._group
        if group is None:
            raise RuntimeError("the group was aborted")
        return GlooWork(group.broadcast(tensors, options), self._aborted)

    def abort(self) -> None:
        """Closes the connections to all members, after which no memory is written, and ends all waits."""
        group, self._group = self._group, None
        if group is None:
            return
        # Gloo closes all connections of a group when a wait in it times out: here, a wait for bytes that nobody
        # sends. For a member whose connection is closed it fails without having closed the others.
        for member in range(group.size()):
            if member != group.rank():
                with suppress(RuntimeError):
                    group.recv([torch.empty(1, dtype=torch.uint8)], member, 0).wait(MOMENT)
        self._aborted.set()
        # Freeing the group waits for what is left of its operations, at most until their timeout. The process waits
        # for this thread: one that comes back from torch while the interpreter ends would end it by SIGABRT.
        freeing = threading.Thread(target=[group].clear, daemon=False, name=FREEING)
        del group
        freeing.start()


class GlooWork:
    """An operation of a gloo group that has begun."""

    def __init__(self, work: Work, aborted: threading.Event) -> None:
        """`aborted` is set when the group is aborted."""
        self._work, self._aborted = work, aborted

    def wait(self, timeout: timedelta) -> None:
        """Returns when the operation is done; RuntimeError if it fails or takes longer, or if the group is
        aborted."""
        until = time.monotonic() + timeout.total_seconds()
        while not self._work.is_completed() and time.monotonic() < until:
            if self._aborted.is_set():
                raise RuntimeError("the group was aborted")
            with suppress(RuntimeError):  # this wait's end ends nothing else
                self._work.wait(LOOK)
        self._work.wait(MOMENT)


def gloo_group(store: Store, rank: int, world_size: int, timeout: timedelta, host: str) -> GlooGroup:
    """A gloo group beside the default one, whose connections listen on `host`."""
    options = ProcessGroupGloo._Options()
    options._timeout = timeout
    options._devices = [ProcessGroupGloo.create_device(hostname=host)]
    return GlooGroup(ProcessGroupGloo(store, rank, world_size, options))


def nccl_group(store: Store, rank: int, world_size: int, timeout: timedelta) -> Any:
    """An NCCL group beside the default one, whose forming can be aborted too. Not in torch's builds for CPUs."""
    from torch.distributed import ProcessGroupNCCL

    options = ProcessGroupNCCL.Options()
    options._timeout = timeout
    options.config.blocking = 0
    return ProcessGroupNCCL(store, rank, world_size, options)


def allow_matrix_tiles() -> None:
    """Asks the kernel for the permission to compute with AMX's tiles, where the processor has AMX and torch is built
    for it.

    vLLM's attention in bfloat16 uses the tiles without having asked: its first instruction ended the engine (SIGILL)
    on every such processor. The threads of a process share the permission; a program that it starts does not.
    """
    if torch.cpu._is_amx_tile_supported():
        torch.cpu._init_amx()


def grow_segments(device: torch.device) -> None:
    """Has torch take a GPU's memory in segments that grow, unless PYTORCH_ALLOC_CONF says how. By itself it takes
    pieces of the size that is asked for, and keeps them: those freed by a pass are too small for a step's, so that
    it holds the sum of both where other processes of the GPU need the rest. A machine that has no such segments, as
    some virtual ones, refuses the first tensor: pieces are taken there.

    Call it before the first tensor on the GPU. Neither vLLM's memory that sleeps nor torch's own handles for other
    processes go with it: engines do without, and a push has memory of its own (weight_transfer/memory)."""
    if {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & os.environ.keys():
        return
    torch._C._accelerator_setAllocatorSettings("expandable_segments:True")
    try:
        torch.empty(1, device=device)
    except RuntimeError as error:
        torch._C._accelerator_setAllocatorSettings("expandable_segments:False")
        log.warning("%s has no memory that grows, and may be held longer than it is used: %s", device, error)


def dropouts(model: nn.Module) -> Iterator[nn.Module]:
    """The model's layers of dropout, of any number of dimensions."""
    return (module for module in model.modules() if isinstance(module, nn.modules.dropout._DropoutNd))


class Operators(TorchDispatchMode):
    """Looks at each operator of this thread after torch has carried it out, while it is entered. Operators that only
    make a view are left out."""

    @abstractmethod
    def look(self, name: str, given: Sequence[Tensor], made: Sequence[Tensor]) -> None:
        """Looks at one operator: the tensors that it was given, in order, and those that it returned."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if not any(given.alias_info is not None and not given.alias_info.is_write for given in func._schema.returns):
            self.look(func.overloadpacket.__name__, _tensors((args, kwargs)), _tensors(result))
        return result


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def storage_of(tensor: Tensor) -> int:
    """A number of the memory that a tensor is a view of, no other memory's as long as that exists."""
    return int(tensor.untyped_storage()._cdata)
