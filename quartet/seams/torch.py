"""Private names of torch: options of process groups, the permission to compute with AMX's tiles, how memory of a GPU
is taken, the class of all dropouts, and a look at each operator. None has a public way but before torch's import."""

import logging
import os
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroupGloo, Store
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

VERSIONS = ">=2.11,<2.14"
log = logging.getLogger("quartet")


def gloo_group(store: Store, rank: int, world_size: int, timeout: timedelta, host: str) -> ProcessGroupGloo:
    """A gloo group beside the default one, whose connections listen on `host`."""
    options = ProcessGroupGloo._Options()
    options._timeout = timeout
    options._devices = [ProcessGroupGloo.create_device(hostname=host)]
    return ProcessGroupGloo(store, rank, world_size, options)


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
