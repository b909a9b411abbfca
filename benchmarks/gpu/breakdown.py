"""Kinds of kernels that take a step's time, from torch's profiler."""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu.results import Cell, wait

KINDS = (
    ("elementwise", r"^triton_(?!tem)"),  # first: torch's compiler names all that it fused in one kernel
    ("attention", r"flash|fmha|sdpa|attention|attn"),
    ("optimizer", r"multi_tensor|adam|_foreach"),
    ("copies", r"memcpy|memset|copy_|catarray|aten::cat\b"),
    ("products", r"gemm|gemv|nvjet|xmma|cutlass|cublas|splitk|triton_tem|aten::(add|b|badd)?mm\b"),
    ("communication", r"nccl|gloo"),
    ("elementwise", r"elementwise|reduce|norm|softmax|index|scatter|gather|embedding|aten::"),
)
"""Kinds with the names of their kernels on a GPU, and of their operations on a CPU; the first that fits counts."""
OTHER = "other"
LONGEST = 10
SHOWN = 100
"""Characters of a kernel's name that are shown."""


class Kernel(NamedTuple):
    """One kernel on a GPU, or one operation on a CPU, in seconds of the profiler's clock."""

    name: str
    began: float
    ended: float


def breakdown(kernels: Sequence[Kernel], step_s: float) -> dict[str, Cell]:
    """Per cent of a step of `step_s` seconds in which at least one kernel ran, the seconds of each kind, and the
    kernels that took longest, with all their calls."""
    kinds = dict.fromkeys([*(name for name, _ in KINDS), OTHER], 0.0)
    names: Counter[str] = Counter()
    for name, began, ended in kernels:
        kinds[kind(name)] += ended - began
        names[shortened(name)] += round(1e6 * (ended - began))
    longest = "; ".join(f"{took / 1000:.1f} ms {name}" for name, took in names.most_common(LONGEST))
    seconds = {f"{name}_s": took for name, took in kinds.items()}
    return {"busy_percent": 100 * covered(kernels) / step_s, **seconds, "kernels": len(kernels), "longest": longest}


def kind(name: str) -> str:
    """The kind of a kernel by its name."""
    lower = name.lower()
    return next((found for found, pattern in KINDS if re.search(pattern, lower)), OTHER)


def shortened(name: str) -> str:
    """A kernel's name without what C++ puts around it."""
    return re.sub(r"^void |at::native::|\(anonymous namespace\)::", "", name)[:SHOWN]


def covered(kernels: Iterable[Kernel]) -> float:
    """Seconds in which at least one of the kernels ran."""
    total, until = 0.0, float("-inf")
    for _, began, ended in sorted(kernels, key=lambda each: each.began):
        total += max(0.0, ended - max(began, until))
        until = max(until, ended)
    return total


def recorded(step: Callable[[], object], where: torch.device) -> list[Kernel]:
    """Carries out a step under the profiler: its kernels on a GPU, or its operations on a CPU, each with the time in
    which none that it called ran. RuntimeError if the profiler saw none, as where it may not look at a GPU."""
    gpu = where.type == "cuda"
    with profile(activities=[ProfilerActivity.CUDA if gpu else ProfilerActivity.CPU]) as seen:
        step()
        wait(where)
    kernels = []
    for event in seen.events() or ():
        if event.is_user_annotation or (gpu and event.device_type != DeviceType.CUDA):
            continue
        took = event.time_range.elapsed_us() if gpu else event.self_cpu_time_total
        kernels.append(Kernel(event.name, event.time_range.start / 1e6, (event.time_range.start + took) / 1e6))
    if not kernels:
        raise RuntimeError("torch's profiler saw no kernel")
    return kernels
