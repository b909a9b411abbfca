"""Private names of torch: options of process groups, the permission to compute with AMX's tiles, and the class of all
dropouts. None has a public way."""

from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
from torch import nn
from torch.distributed import ProcessGroupGloo, Store

VERSIONS = ">=2.11,<2.14"


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


def dropouts(model: nn.Module) -> Iterator[nn.Module]:
    """The model's layers of dropout, of any number of dimensions."""
    return (module for module in model.modules() if isinstance(module, nn.modules.dropout._DropoutNd))
