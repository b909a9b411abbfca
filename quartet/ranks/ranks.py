"""The ranks of one learner: how they find one another, and their sums over all ranks."""

import gc
import os
import pickle
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import distributed

from quartet.models.device import default_device
from quartet.ranks.rendezvous import reach_store, serve_store
from quartet.seams.deepspeed import without_shared_memory_kernel


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
        if self.world_size == 1 or not metrics:
            return dict(metrics)
        maxima = [name for name in metrics if name.endswith("_max")]
        added = [name for name in metrics if not name.endswith("_max")]
        joined: dict[str, float] = {}
        for names, how in ((added, distributed.ReduceOp.SUM), (maxima, distributed.ReduceOp.MAX)):
            values = torch.tensor([metrics[name] for name in names], dtype=torch.float64, device=device)
            if names:
                distributed.all_reduce(values, how, group=self.group)
            joined |= dict(zip(names, values.tolist(), strict=True))
        return {name: joined[name] for name in metrics}


def start_distributed(ranks: Ranks) -> None:
    """Makes torch's default process group, nccl on GPUs and gloo elsewhere, and sets up DeepSpeed for it."""
    cuda = default_device().type == "cuda"
    # Ray shows each process only its own GPU, so within the process it is always the first.
    os.environ.setdefault("LOCAL_RANK", "0")
    if not cuda:
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


class Rank:
    """The object in each rank's process: it connects to the other ranks, builds its trainer and runs its methods."""

    def __init__(self, rank: int, world_size: int, timeout_s: float) -> None:
        self._rank = rank
        self._world_size = world_size
        self._timeout_s = timeout_s
        self._store: distributed.TCPStore | None = None
        self._parts: dict[str, Any] = {}
        """The objects whose methods a rank runs, found by the names of their classes."""

    def place(self) -> tuple[str, int]:
        """Ray's id of the node that this process is on, and its process id there."""
        import ray

        return ray.get_runtime_context().get_node_id(), os.getpid()

    def open(self, host: str | None = None) -> tuple[str, int] | None:
        """Opens, on rank 0, the store through which all ranks find one another, on `host` or Ray's address of this
        node.

        Returns its address, or None for a single rank, which needs no store.
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
        with _readable_errors():
            trainer = build(*arguments, Ranks(self._rank, self._world_size, store, self._timeout_s))
        parts = getattr(trainer, "parts", (trainer,))
        self._parts = {kind.__qualname__: part for part in parts for kind in type(part).__mro__}
        # Libraries and model stay until the end. DeepSpeed searches for garbage twice with each update of a colocated
        # learner, and looking through them took it 0.3 s each time.
        gc.freeze()

    def run(self, method: str, *arguments: Any, **options: Any) -> Any:
        """Calls a method of the trainer, or of one of its `parts`, by its qualified name: `PolicyTrainer.train`."""
        owner, _, name = method.rpartition(".")
        with _readable_errors():
            return getattr(self._parts[owner], name)(*arguments, **options)

    def run_beside(self, method: str, *arguments: Any, **options: Any) -> Any:
        """Calls a method of the trainer that may overlap others; the rank's process runs it in a separate thread."""
        return self.run(method, *arguments, **options)


@contextmanager
def _readable_errors() -> Iterator[None]:
    """Puts a RuntimeError in the place of errors that another process cannot read, for which a rank would count as
    dead there."""
    try:
        yield
    except Exception as error:
        try:
            pickle.loads(pickle.dumps(error))  # safe: the bytes were made in this line
        except Exception:
            raise RuntimeError(f"{type(error).__name__}: {error}") from error
        raise
