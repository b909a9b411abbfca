"""The digest's kernel: the same sums as the reference in Triton's interpreter, and one read of each byte in the code
that Triton's compiler makes for a GPU."""

import json
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(find_spec("triton") is None, reason="Triton has no build for this processor"),
]

INTERPRETED = """
import json, torch
from quartet.weight_transfer.memory.device_digest import torch_sums
from quartet.weight_transfer.memory.digest_kernel import WORDS, kernel_sums

tile, draw = 8 * WORDS, torch.Generator().manual_seed(0)
sums = {}
for size in (1, 7, 8, 9, 1000, tile - 1, tile, tile + 1, 3 * tile + 5):
    data = torch.randint(0, 256, (size,), dtype=torch.uint8, generator=draw)
    sums[size] = kernel_sums(data).tolist(), torch_sums(data).tolist()
refused = ""
try:
    kernel_sums(torch.zeros(9, dtype=torch.uint8)[1:])
except ValueError as error:
    refused = str(error)
print(json.dumps([sums, refused]))
"""
COMPILED = """
import json
from triton import compile
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from quartet.weight_transfer.memory.digest_kernel import WARPS, WORDS, _sum

types = {"whole": "*i64", "odd": "*u8", "parts": "*i64", "words": "i32", "rest": "i32", "tile": "constexpr"}
source = ASTSource(fn=_sum, signature=types, constexprs={"tile": WORDS})
made = compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": WARPS})
print(json.dumps([made.asm["ptx"], len(made.asm["cubin"]), WORDS // (32 * WARPS)]))
"""


def run(program: str, folder: Path, **environment: str) -> Any:
    """The JSON that the program prints; Triton decides at its import whether it interprets."""
    settings = os.environ | {"TRITON_CACHE_DIR": str(folder), "OMP_NUM_THREADS": "1"} | environment
    done = subprocess.run([sys.executable, "-c", program], env=settings, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_the_kernel_sums_as_the_reference_does_at_every_edge_of_a_tile(tmp_path: Path) -> None:
    sums, refused = run(INTERPRETED, tmp_path, TRITON_INTERPRET="1")
    assert len(sums) == 9
    assert len({tuple(ours) for ours, _ in sums.values()}) == 9
    assert all(ours == reference for ours, reference in sums.values())
    assert refused.endswith("must be a multiple of 8")


def test_it_compiles_for_a_gpu_and_reads_each_byte_once(tmp_path: Path) -> None:
    ptx, cubin, words = run(COMPILED, tmp_path, TRITON_INTERPRET="0")
    loads = re.findall(r"ld\.global\.(\w+)", ptx)
    assert loads.count("b64") == words  # one for each word of a thread's share
    assert sorted(set(loads)) == ["b64", "b8"]  # and the odd bytes at the end
    assert cubin > 1000
