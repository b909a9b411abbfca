"""The ranks of one learner: how they find one another, and what they add up together."""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import distributed

from services.common.device import default_device
from services.common.weight_transfer.gloo import reach_store, serve_store


@dataclass(frozen=True, slots=True)
class Ranks:
    """This process's place among the learner's ranks."""

    rank: int = 0
    world_size: int = 1
    store: distributed.Store | None = None
    """Where the ranks meet. None: a single rank, which needs nobody."""
    timeout_s: float = 1800
    """Longest wait for the others in a collective; RuntimeError after it."""
    group: distributed.ProcessGroup | None = None
    """Those that add up together, of which this is rank `rank`. None: all there are."""

    def sums(self, values: torch.Tensor) -> torch.Tensor:
        """The sum over the ranks, in place. Every rank calls it."""
        if self.world_size > 1:
            distributed.all_reduce(values, group=self.group)
        return values

    def joined(self, metrics: Mapping[str, float], device: torch.device) -> dict[str, float]:
        """Sums over the ranks of equally named metrics, maxima of those named `..._max`. Every rank calls it."""
        if self.world_size == 1 or not metrics:
            return dict(metrics)
        maxima = [name for name in metrics if name.endswith("_max")]
        added = [name for name in metrics if not name.endswith("_max")]
        found: dict[str, float] = {}
        for names, how in ((added, distributed.ReduceOp.SUM), (maxima, distributed.ReduceOp.MAX)):
            values = torch.tensor([metrics[name] for name in names], dtype=torch.float64, device=device)
            if names:
                distributed.all_reduce(values, how, group=self.group)
            found |= dict(zip(names, values.tolist(), strict=True))
        return {name: found[name] for name in metrics}


def start_distributed(ranks: Ranks) -> None:
    """Makes torch's default process group, nccl on GPUs and gloo elsewhere, and readies DeepSpeed for it."""
    cuda = default_device().type == "cuda"
    # Ray shows each process only its own GPU, so within the process it is always the first.
    os.environ.setdefault("LOCAL_RANK", "0")
    if not cuda:
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    import deepspeed

    # Otherwise DeepSpeed compiles a shared-memory kernel for half a minute on the first start on a CPU.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    if not distributed.is_initialized():
        distributed.init_process_group(
            "nccl" if cuda else "gloo",
            rank=ranks.rank,
            world_size=ranks.world_size,
            store=ranks.store or distributed.HashStore(),
            timeout=timedelta(seconds=ranks.timeout_s),
        )
    deepspeed.init_distributed(dist_backend="nccl" if cuda else "gloo")


class Rank:
    """What runs in each rank's process: it meets the other ranks, builds its trainer and runs what it is told."""

    def __init__(self, rank: int, world_size: int, timeout_s: float) -> None:
        self._rank = rank
        self._world_size = world_size
        self._timeout_s = timeout_s
        self._store: distributed.TCPStore | None = None
        self._trainer: Any = None

    def open(self, host: str | None = None) -> tuple[str, int] | None:
        """On rank 0: opens the store at which all ranks meet, on `host` or Ray's address of this node.

        Its address, or None for a single rank, which meets nobody.
        """
        if self._world_size == 1:
            return None
        if host is None:
            import ray

            host = ray.util.get_node_ip_address()
        self._store = serve_store(host, self._timeout_s)
        return host, int(self._store.port)

    def start(self, address: tuple[str, int] | None, build: Callable[..., Any], *arguments: Any) -> None:
        """Builds the trainer, `build(*arguments, ranks)`, in step with the other ranks."""
        store = self._store or (reach_store(*address, self._timeout_s) if address else None)
        self._trainer = build(*arguments, Ranks(self._rank, self._world_size, store, self._timeout_s))

    def run(self, method: str, *arguments: Any, **options: Any) -> Any:
        """Calls a method of the trainer."""
        return getattr(self._trainer, method)(*arguments, **options)

    def run_beside(self, method: str, *arguments: Any, **options: Any) -> Any:
        """The same for a method that may overlap the others; whoever hosts the rank gives it a thread of its own."""
        return self.run(method, *arguments, **options)
