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

from quartet.wire.errors import InvalidArgument

Write = Callable[[Any, Path], None]


class Snapshot:
    """A checkpoint engine for DeepSpeed that copies what is saved into host memory; `write` brings it to disk later.

    One thread may write while another continues training; the next copy waits until the writing has ended. The
    copies' memory is kept for the next snapshot, because memory that is new to a process is many times slower to
    fill. With `copies=False`, for models that leave no memory for copies, a snapshot is written while it is taken.

    For example: `begin()` and the saving of step 10 block training while the state is copied; `write()` brings it to
    disk during step 11; if it still writes when step 20 is saved, `begin()` waits for it.
    """

    def __init__(self) -> None:
        self._files: dict[Path, tuple[Any, Write]] = {}
        self._taken: list[torch.Tensor] = []
        self._spare: dict[tuple[torch.Size, torch.dtype], list[torch.Tensor]] = defaultdict(list)
        self._turn = threading.Lock()
        self._copies = True

    def begin(self, *, copies: bool = True) -> None:
        """Discards the last snapshot, written or not. Waits while it is being written.

        Args:
            copies: False writes everything at once, without copies, and leaves nothing for `write` to do.
        """
        with self._turn:
            self._copies = copies
            self._files.clear()
            for buffer in self._taken:
                self._spare[buffer.shape, buffer.dtype].append(buffer)
            self._taken.clear()

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy in host memory, valid until the next `begin`; with `copies=False` the tensor in host memory, copied
        only if it is on a GPU."""
        if not self._copies:
            return tensor.detach().cpu()
        spare = self._spare[tensor.shape, tensor.dtype]
        buffer = spare.pop() if spare else torch.empty(tensor.shape, dtype=tensor.dtype)
        self._taken.append(buffer)
        return buffer.copy_(tensor.detach())

    def save(self, state_dict: Any, path: str) -> None:
        """Copies a state that `write` will write to the file `path`; `load` reads it back."""
        self.hold(self._copied(state_dict, {}) if self._copies else state_dict, Path(path), torch.save)

    def hold(self, state: Any, path: Path, write: Write) -> None:
        """Registers `write(state, path)` for when the snapshot is written; `state` is already a copy."""
        if self._copies:
            self._files[path] = state, write
            return
        write(state, path)
        _sync(path)

    def write(self) -> None:
        """Writes everything; it is on disk, not only in the system's cache, when this returns."""
        with self._turn:
            for path, (state, write) in self._files.items():
                write(state, path)
                _sync(path)

    def load(self, path: str, map_location: Any = None) -> Any:
        """Reads a file that was saved: tensors, plain values and DeepSpeed's constants. Never runs code from the
        file.

        Raises:
            InvalidArgument: the file is missing, cut short, or holds anything else.
        """
        try:
            with torch.serialization.safe_globals(_constants()):
                return torch.load(path, map_location=map_location, weights_only=True)
        except (OSError, RuntimeError, EOFError, ValueError, UnpicklingError) as error:
            reason = str(error).partition("\n")[0]
            raise InvalidArgument(f"path: {path} is not a complete part of a checkpoint: {reason}") from None

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

    # The rest of DeepSpeed's interface of a checkpoint engine (deepspeed.runtime.checkpoint_engine).

    def create(self, info: Any) -> None:
        """A checkpoint begins: nothing to do."""

    def commit(self, info: Any) -> bool:
        """DeepSpeed has saved everything: nothing to do."""
        return True

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """Makes the folder, like os.makedirs."""
        os.makedirs(path, exist_ok=exist_ok)

    def is_data_parallel_writer(self, dp_rank: int) -> bool:
        """True on the rank that saves the state that all ranks hold."""
        return dp_rank == 0

    def is_decoupled(self) -> bool:
        """False: DeepSpeed need not wait for the writing at a later step, since the caller of `write` does."""
        return False

    def preserves_storage_sharing(self) -> bool:
        """True if tensors that share memory also share it in the file."""
        return True


def _constants() -> list[Any]:
    """Classes in ZeRO's state that are neither tensors nor plain values."""
    from deepspeed.runtime.fp16.loss_scaler import LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    return [LossScaler, ZeroStageEnum, fragment_address]


def _sync(path: Path) -> None:
    files = [file for file in path.rglob("*") if file.is_file()] if path.is_dir() else [path]
    for file in files:
        with file.open("rb") as opened:
            os.fsync(opened.fileno())
