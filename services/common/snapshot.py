"""A learner's state on its way to disk: copied at once, written while training goes on."""

import copy
import os
import threading
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch

from services.common.errors import InvalidArgument

Write = Callable[[Any, Path], None]


class Snapshot:
    """The checkpoint engine that DeepSpeed is given: what it saves is copied into host memory, for `write` to bring
    to disk.

    One thread may write while another trains on; who copies next waits for the writing to end. The copies' memory
    is kept for the next snapshot: memory that is new to a process is many times slower to fill. Where there is no
    memory for them, a snapshot is written as it is taken.
    """

    def __init__(self) -> None:
        self._files: dict[Path, tuple[Any, Write]] = {}
        self._taken: list[torch.Tensor] = []
        self._spare: dict[tuple[torch.Size, torch.dtype], list[torch.Tensor]] = defaultdict(list)
        self._turn = threading.Lock()
        self._copies = True

    def begin(self, *, copies: bool = True) -> None:
        """Forgets the last snapshot, written or not. Waits while it is being written.

        Args:
            copies: False writes everything at once, from where it is, and leaves nothing for `write`.
        """
        with self._turn:
            self._copies = copies
            self._files.clear()
            for buffer in self._taken:
                self._spare[buffer.shape, buffer.dtype].append(buffer)
            self._taken.clear()

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy in host memory, good until the next `begin`; without copies, only the transport there."""
        if not self._copies:
            return tensor.detach().cpu()
        spare = self._spare[tensor.shape, tensor.dtype]
        buffer = spare.pop() if spare else torch.empty(tensor.shape, dtype=tensor.dtype)
        self._taken.append(buffer)
        return buffer.copy_(tensor.detach())

    def save(self, state_dict: Any, path: str) -> None:
        """Copies what is to be written to the file `path`, which `load` reads."""
        self.hold(self._copied(state_dict, {}) if self._copies else state_dict, Path(path), torch.save)

    def hold(self, state: Any, path: Path, write: Write) -> None:
        """Has `write(state, path)` called when the snapshot is written; `state` was copied before."""
        if self._copies:
            self._files[path] = state, write
            return
        write(state, path)
        _sync(path)

    def write(self) -> None:
        """Writes everything. Returns when it has reached the disk, and not just the system's memory."""
        with self._turn:
            for path, (state, write) in self._files.items():
                write(state, path)
                _sync(path)

    def load(self, path: str, map_location: Any = None) -> Any:
        """What was written to a file. Reads tensors, plain values and DeepSpeed's constants; runs no code of the
        file's choosing.

        Raises:
            InvalidArgument: the file is missing, cut short, or holds anything else.
        """
        try:
            with torch.serialization.safe_globals(_constants()):
                return torch.load(path, map_location=map_location, weights_only=True)
        except (OSError, RuntimeError, EOFError, ValueError, UnpicklingError) as error:
            reason = str(error).partition("\n")[0]
            raise InvalidArgument(f"path: {path} is no whole part of a checkpoint: {reason}") from None

    def _copied(self, state: Any, seen: dict[int, torch.Tensor]) -> Any:
        """The same values in host memory; a tensor that is there twice (tied weights) is copied once."""
        if isinstance(state, torch.Tensor):
            if id(state) not in seen:
                seen[id(state)] = self.copy(state)
            return seen[id(state)]
        if isinstance(state, dict):
            return {key: self._copied(value, seen) for key, value in state.items()}
        if type(state) in (list, tuple):
            return type(state)(self._copied(value, seen) for value in state)
        return copy.deepcopy(state)

    # What else DeepSpeed asks of a checkpoint engine (deepspeed.runtime.checkpoint_engine).

    def create(self, info: Any) -> None:
        """A checkpoint begins: nothing to do."""

    def commit(self, info: Any) -> bool:
        """DeepSpeed has saved everything: nothing to do."""
        return True

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """As os.makedirs."""
        os.makedirs(path, exist_ok=exist_ok)

    def is_data_parallel_writer(self, dp_rank: int) -> bool:
        """Which rank saves what all of them hold."""
        return dp_rank == 0

    def is_decoupled(self) -> bool:
        """Whether DeepSpeed is to wait for the writing at a later step. It need not: whoever calls `write` does."""
        return False

    def preserves_storage_sharing(self) -> bool:
        """Whether tensors that share memory share it in the file too."""
        return True


def _constants() -> list[Any]:
    """What ZeRO's state holds beside tensors and plain values."""
    from deepspeed.runtime.fp16.loss_scaler import LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    return [LossScaler, ZeroStageEnum, fragment_address]


def _sync(path: Path) -> None:
    files = [file for file in path.rglob("*") if file.is_file()] if path.is_dir() else [path]
    for file in files:
        with file.open("rb") as opened:
            os.fsync(opened.fileno())
