"""The device that this process may compute on."""

import sys

import numpy as np
import torch

VISIBLE = "CUDA_VISIBLE_DEVICES"


def default_device() -> torch.device:
    """The first GPU that this process was given, or the CPU if it was given none."""
    return torch.device("cuda" if torch.cuda.is_available() and may_use_gpus() else "cpu")


def gpu_count() -> int:
    """Number of GPUs that this process was given."""
    return torch.cuda.device_count() if default_device().type == "cuda" else 0


def on_device(array: np.ndarray, device: torch.device | str, dtype: torch.dtype | None = None) -> torch.Tensor:
    """The array as a tensor on the device, where it gets `dtype`: narrow numbers are copied and widened there.

    Neither side waits for the other: from pinned memory a GPU copies in the order of its stream, and torch keeps the
    pinned memory until then. From other memory the host would wait for all that the GPU was given before.
    """
    host = torch.from_numpy(array)
    if torch.device(device).type != "cpu":
        host = host.pin_memory().to(device, non_blocking=True)
    return host if dtype is None else host.to(dtype)


def gpu_uuid(device: torch.device) -> str:
    """The UUID of a GPU, which is the same in every process although the GPU's number may differ; empty for a CPU."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""


def may_use_gpus() -> bool:
    """True if this process may compute on the GPUs that it sees.

    An actor that asked Ray for no GPU still sees all of them, since Ray hides GPUs only from actors that were given
    some. Such an actor may use only those that CUDA_VISIBLE_DEVICES in its own runtime_env names.
    """
    ray = sys.modules.get("ray")
    if ray is None or not ray.is_initialized():
        return True
    context = ray.get_runtime_context()
    if context.get_actor_id() is None:
        return True
    return bool(ray.get_gpu_ids()) or bool(context.runtime_env.get("env_vars", {}).get(VISIBLE))
