"""Gloo as the wire of a push: it sends host memory, on any machine."""

from datetime import timedelta

from torch.distributed import ProcessGroupGloo, Store

from quartet.weight_transfer.groups.group import Wire


def gloo_wire(host: str) -> Wire:
    """A gloo wire whose connections listen on `host`, this member's own address."""

    def form(store: Store, rank: int, world_size: int, timeout: timedelta) -> ProcessGroupGloo:
        options = ProcessGroupGloo._Options()
        options._timeout = timeout
        options._devices = [ProcessGroupGloo.create_device(hostname=host)]
        return ProcessGroupGloo(store, rank, world_size, options)

    return Wire(form)
