"""The permission for AMX's tiles, in a process of its own: it cannot be given back."""

import subprocess
import sys

import pytest
import torch

PROCESS = """
import ctypes
from quartet.seams.torch import allow_matrix_tiles

def permitted():
    \"\"\"True if the kernel lets this process use the tiles' data (arch_prctl, ARCH_GET_XCOMP_PERM).\"\"\"
    mask = ctypes.c_ulong()
    assert ctypes.CDLL(None).syscall(158, 0x1022, ctypes.byref(mask)) == 0
    return bool(mask.value & 1 << 18)

before = permitted()
allow_matrix_tiles()
print(before, permitted())
"""


@pytest.mark.processes
def test_the_process_may_use_the_tiles_where_the_processor_has_them() -> None:
    if not torch.cpu._is_amx_tile_supported():
        from quartet.seams.torch import allow_matrix_tiles

        return allow_matrix_tiles()  # does nothing, and raises nothing
    done = subprocess.run([sys.executable, "-c", PROCESS], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.split() == ["False", "True"]
