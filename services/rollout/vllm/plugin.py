"""vLLM's entry point (`vllm.general_plugins`): loaded in every process of an engine."""

import functools
import multiprocessing
import os
import signal
import threading
from multiprocessing import connection

from quartet.ranks.nccl_settings import reserve
from quartet.seams.torch import allow_matrix_tiles


def register() -> None:
    """Registers the weight-transfer engine `quartet`, lets the process end with the one that started it, lets it
    compute in bfloat16 where the processor has AMX, and adds the variables that a push by NCCL changes, before there
    is a group.

    vLLM loads plugins several times in a process; further calls do nothing.
    """
    from quartet.seams.vllm import register_engine

    register_engine("quartet", "services.rollout.vllm.transfer", "QuartetWeightTransferEngine")
    reserve(os.environ)
    end_with_parent()
    allow_matrix_tiles()


@functools.cache
def end_with_parent() -> None:
    """Ends this process by SIGKILL once the process that started it has ended; does nothing in a main process.

    vLLM tells its processes to end when a replica shuts down. A replica that is killed tells them nothing, and they
    would keep the model's memory, and on a GPU the device's, so that the replica's successor could not start.
    """
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_wait, args=(parent.sentinel,), name="end-with-parent", daemon=True).start()


def _wait(sentinel: int) -> None:
    connection.wait([sentinel])
    # Not an exit: nothing is left to hand over, and vLLM's own clean-up waits for its parent's answers.
    os.kill(os.getpid(), signal.SIGKILL)
