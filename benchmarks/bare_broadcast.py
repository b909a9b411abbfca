"""A gloo broadcast of bytes that are in memory already: the least that a push between processes can take."""

import multiprocessing
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch

from quartet.config.base import MIB
from quartet.ranks.rendezvous import reach_store, serve_store
from quartet.weight_transfer.groups.group import Group
from quartet.weight_transfer.groups.wires import gloo_wire
from tests.sources import HOST

STALL_S = 60.0


@dataclass
class _Receiver:
    pipe: Connection
    process: Any


class Bare:
    """A gloo group and one buffer in each process, both made once."""

    def __init__(self, mib: int, replicas: int) -> None:
        self._store = serve_store(HOST, STALL_S)
        spawn = multiprocessing.get_context("spawn")
        self._receivers: list[_Receiver] = []
        for rank in range(1, 1 + replicas):
            mine, theirs = spawn.Pipe()
            process = spawn.Process(
                target=_receive, args=(theirs, self._store.port, rank, 1 + replicas, mib), daemon=True
            )
            process.start()
            self._receivers.append(_Receiver(mine, process))
        self._group = Group(
            self._store, gloo_wire(HOST), rank=0, world_size=1 + replicas, membership=0, timeout_s=STALL_S
        )
        self._data = torch.ones(mib * MIB, dtype=torch.uint8)

    async def broadcast(self) -> float:
        """Seconds until every receiver has everything."""
        for receiver in self._receivers:
            receiver.pipe.send("receive")
        began = time.perf_counter()
        self._group.broadcast(self._data)
        for receiver in self._receivers:
            receiver.pipe.recv()
        return time.perf_counter() - began

    def end(self) -> None:
        for receiver in self._receivers:
            receiver.pipe.send("end")
            receiver.process.join()
        self._group.close()


def _receive(pipe: Connection, port: int, rank: int, world_size: int, mib: int) -> None:
    torch.set_num_threads(1)
    data = torch.ones(mib * MIB, dtype=torch.uint8)
    store = reach_store(HOST, port, STALL_S)
    group = Group(store, gloo_wire(HOST), rank=rank, world_size=world_size, membership=0, timeout_s=STALL_S)
    while pipe.recv() == "receive":
        group.broadcast(data)
        pipe.send("received")
