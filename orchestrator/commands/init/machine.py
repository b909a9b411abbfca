"""The machine that a new file is for."""

import os
from dataclasses import dataclass
from typing import Self

import psutil
import torch

from quartet.config.base import GIB


@dataclass(frozen=True, slots=True)
class Machine:
    """A machine's CPU and, if it has any, one of its GPUs."""

    cores: int
    """Cores that this process may use."""
    memory_gib: float
    """Memory of the host in GiB."""
    gpus: int = 0
    gpu_gib: float = 0.0
    """Memory of the first GPU in GiB; 0 without one."""

    @classmethod
    def here(cls) -> Self:
        """The machine that this process runs on."""
        gpus = torch.cuda.device_count()
        memory = torch.cuda.get_device_properties(0).total_memory / GIB if gpus else 0.0
        return cls(len(os.sched_getaffinity(0)), psutil.virtual_memory().total / GIB, gpus, memory)
