"""The device that this process may compute on."""

import sys

import torch

VISIBLE = "CUDA_VISIBLE_DEVICES"


def default_device() -> torch.device:
    """The GPU that this process was given, its first where there are several, else the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() and may_use_gpus() else "cpu")


def gpu_count() -> int:
    """How many GPUs this process was given."""
    return torch.cuda.device_count() if default_device().type == "cuda" else 0


def may_use_gpus() -> bool:
    """Whether GPUs that this process sees are its own.

    An actor for which no GPU was asked sees all of them, since Ray hides them only from actors that were given
    some. It may use those that CUDA_VISIBLE_DEVICES in its own runtime_env names, and no others.
    """
    ray = sys.modules.get("ray")
    if ray is None or not ray.is_initialized():
        return True
    context = ray.get_runtime_context()
    if context.get_actor_id() is None:
        return True
    return bool(ray.get_gpu_ids()) or bool(context.runtime_env.get("env_vars", {}).get(VISIBLE))
