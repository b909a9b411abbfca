"""Ceilings of the machine, with which the other figures are compared. A minute.

python -m benchmarks.gpu.machine [--device cuda] [--mib 2048] [--out runs/gpu]
"""

import os
from functools import partial
from pathlib import Path
from typing import Annotated

import torch
import typer

from benchmarks.gpu.results import Cell, Results, seconds
from quartet.models.device import gpu_uuid
from quartet.weight_transfer.memory.buckets import digest
from quartet.weight_transfer.memory.pinning import pin
from quartet.weight_transfer.place import has_room, machine


def main(
    device: str = "cuda",
    mib: Annotated[int, typer.Option(help="size of the copies")] = 2048,
    side: Annotated[int, typer.Option(help="of the matrices")] = 8192,
    out: Path = Path("runs/gpu"),
) -> None:
    """Runs the benchmark and prints its results."""
    where = torch.device(device)
    results = Results("machine", out)
    shared = os.statvfs("/dev/shm")
    results.add(
        "host",
        cores=os.cpu_count() or 0,
        memory_gib=round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30),
        shared_gib=round(shared.f_bavail * shared.f_frsize / 2**30, 1),
        place=machine(),
        gpu=gpu_uuid(where),
        room=str(has_room(mib << 20)),
    )
    size, gib = mib << 20, mib / 1024
    data = torch.randint(0, 255, (size,), dtype=torch.uint8, device=where)
    other = torch.empty_like(data)
    for kind in ("pageable", "pinned"):
        host = torch.zeros(size, dtype=torch.uint8)
        if kind == "pinned" and not (where.type == "cuda" and pin(host, host)):
            continue
        results.add(f"{kind}, to the device", gib_s=gib / _copy(host, data, where))
        results.add(f"{kind}, from the device", gib_s=gib / _copy(data, host, where))
    results.add("on the device, read and written", gib_s=2 * gib / _copy(data, other, where))
    host = data.cpu()
    results.add("XXH3, one thread", gib_s=gib / seconds(lambda: digest(host), where))
    for dtype in (torch.bfloat16, torch.float32):
        took = _product(side, dtype, where)
        results.add(f"matrix product, {str(dtype).removeprefix('torch.')}", tflop_s=2 * side**3 / took / 1e12)
    results.attempt("a kernel after a CUDA error that was handled", partial(_after_an_error, where))
    results.show()


def _after_an_error(where: torch.device) -> dict[str, Cell]:
    """Pins the same memory twice, which CUDA refuses, and computes 1 + 1: the kernel should not raise that error."""
    host = torch.zeros(1 << 20, dtype=torch.uint8)
    first, again = pin(host, host), pin(host, host)
    return {"pinned": str(first), "again": str(again), "sum": float(torch.ones(1, device=where) + 1)}


def _copy(source: torch.Tensor, target: torch.Tensor, where: torch.device) -> float:
    return seconds(lambda: target.copy_(source), where)


def _product(side: int, dtype: torch.dtype, where: torch.device) -> float:
    left, right = (torch.randn(side, side, device=where, dtype=dtype) for _ in range(2))
    return seconds(lambda: left @ right, where, rounds=10)


if __name__ == "__main__":
    typer.run(main)
