"""Environment variables of torch's NCCL that a push changes for the groups that it makes (weight_transfer/groups).

A variable that is added or removed moves all others, while native threads may be reading them, which has crashed
processes; a new value for one that is there does not. So processes that may have NCCL begin with all of them.
"""

from collections.abc import MutableMapping

BLOCKING_WAIT, ERROR_HANDLING = "TORCH_NCCL_BLOCKING_WAIT", "TORCH_NCCL_ASYNC_ERROR_HANDLING"
GIVE_UP = "TORCH_NCCL_NONBLOCKING_TIMEOUT"
"""Seconds after which torch gives up a communicator that is forming. Until then its abort waits. Torch reads it once
in a process, at the first operation of a group like a push's; the groups of learners and engines form theirs in
another way, and do not read it."""
DEFAULTS = {BLOCKING_WAIT: "0", ERROR_HANDLING: "3", GIVE_UP: "1800"}
"""The values that torch has without them."""


def reserve(environment: MutableMapping[str, str]) -> None:
    """Adds the variables that are not set, with the values that torch has without them."""
    for name, value in DEFAULTS.items():
        environment.setdefault(name, value)
