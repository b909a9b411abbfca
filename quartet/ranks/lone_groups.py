"""Gloo groups of one rank, which share a listener."""

from datetime import timedelta

from torch.distributed import ProcessGroupGloo, Store, distributed_c10d


def share_listener() -> None:
    """Gives all gloo groups of one rank that torch forms from now on the same listener; further calls do nothing.

    Each listener has a thread that looks for messages every 10 ms, although a single rank gets none. vLLM forms 13
    such groups, which took 3 % of a core.
    """
    if distributed_c10d.ProcessGroupGloo is not _OwnOrShared:
        distributed_c10d.ProcessGroupGloo = _OwnOrShared  # type: ignore[misc]


class _OwnOrShared(ProcessGroupGloo):
    """A group of one rank with the shared listener, or a larger one with a listener of its own."""

    _shared = None

    def __init__(self, store: Store, rank: int, size: int, timeout: timedelta) -> None:
        if size > 1:
            super().__init__(store, rank, size, timeout=timeout)
            return
        if _OwnOrShared._shared is None:
            _OwnOrShared._shared = ProcessGroupGloo.create_device(hostname="127.0.0.1")
        options = ProcessGroupGloo._Options()
        options._timeout = timeout
        options._devices = [_OwnOrShared._shared]
        super().__init__(store, rank, size, options)
