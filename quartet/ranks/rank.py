"""The object in each rank's process.

Its class is read before the process says where it is, from when on it is looked after: without torch, which takes
seconds.
"""

import gc
import os
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.distributed import TCPStore


class Rank:
    """The object in each rank's process: it connects to the other ranks, builds its trainer and runs its methods."""

    def __init__(self, rank: int, world_size: int, timeout_s: float) -> None:
        self._rank = rank
        self._world_size = world_size
        self._timeout_s = timeout_s
        self._store: TCPStore | None = None
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
        from quartet.ranks.rendezvous import node_address, serve_store

        host = host or node_address()
        self._store = serve_store(host, self._timeout_s)
        return host, int(self._store.port)

    def start(self, address: tuple[str, int] | None, build: Callable[..., Any], *arguments: Any) -> None:
        """Builds the trainer, `build(*arguments, ranks)`, in step with the other ranks."""
        from quartet.ranks.ranks import Ranks
        from quartet.ranks.rendezvous import reach_store

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
