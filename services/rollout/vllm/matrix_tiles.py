"""The kernel's permission to compute with AMX's tiles, which a process has to ask for."""

import torch


def allow_matrix_tiles() -> None:
    """Asks for the permission where the processor has AMX and torch is built for it.

    vLLM's attention in bfloat16 uses the tiles without having asked: its first instruction ended the engine (SIGILL)
    on every such processor. The threads of a process share the permission; a program that it starts does not.
    """
    if torch.cpu._is_amx_tile_supported():
        torch.cpu._init_amx()
