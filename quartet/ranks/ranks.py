"""A rank's place among those of its learner, and sums over all of them."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta

import torch
from torch import distributed

from quartet.models.device import default_device
from quartet.seams.deepspeed import without_shared_memory_kernel
from quartet.seams.torch import grow_segments


@dataclass(frozen=True, slots=True)
class Ranks:
    """This process's place among the learner's ranks."""

    rank: int = 0
    world_size: int = 1
    store: distributed.Store | None = None
    """The store through which the ranks find one another. None for a single rank."""
    timeout_s: float = 1800
    """Longest wait for the others in a collective; RuntimeError after it."""
    group: distributed.ProcessGroup | None = None
    """The ranks whose values are summed, of which this is rank `rank`. None: all ranks."""

    def sums(self, values: torch.Tensor) -> torch.Tensor:
        """Sums `values` over the ranks, in place. Every rank calls it."""
        if self.world_size > 1:
            distributed.all_reduce(values, group=self.group)
        return values

    def joined(self, metrics: Mapping[str, float], device: torch.device) -> dict[str, float]:
        """Metrics over all ranks: sums, or maxima of those named `..._max`. Every rank calls it."""
        joined = dict(metrics)
        for how, largest in ((distributed.ReduceOp.SUM, False), (distributed.ReduceOp.MAX, True)):
            names = [name for name in metrics if name.endswith("_max") is largest]
            if names and self.world_size > 1:
                values = torch.tensor([metrics[name] for name in names], dtype=torch.float64, device=device)
                distributed.all_reduce(values, how, group=self.group)
                joined |= zip(names, values.tolist(), strict=True)
        return joined


def start_distributed(ranks: Ranks) -> None:
    """Makes torch's default process group, nccl on GPUs and gloo elsewhere, and sets up DeepSpeed for it."""
    device = default_device()
    cuda = device.type == "cuda"
    # Ray shows each process only its own GPU, so within the process it is always the first.
    os.environ.setdefault("LOCAL_RANK", "0")
    if cuda:
        grow_segments(device)
    else:
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    import deepspeed

    without_shared_memory_kernel()
    if not distributed.is_initialized():
        distributed.init_process_group(
            "nccl" if cuda else "gloo",
            rank=ranks.rank,
            world_size=ranks.world_size,
            store=ranks.store or distributed.HashStore(),
            timeout=timedelta(seconds=ranks.timeout_s),
        )
    deepspeed.init_distributed(dist_backend="nccl" if cuda else "gloo")
