"""Tries where Ray puts processes that ask for GPUs, on a node of its own that is said to have eight.

    python -m tests.placement '{"orders": [[["rollout", 1.0], ["policy", 0.6]]]}'

Prints, for each order, the role and the GPUs of each process, started one after the other. No GPU is needed: Ray
counts what it is told there is. A program, since a process of the tests may be connected to another cluster. Run it
with a HOME of its own: ray.init leaves a token there, and every later `ray start` of that user would ask for it.
"""

import json
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import ray

GPUS = 8
VISIBLE = "CUDA_VISIBLE_DEVICES"


@ray.remote(num_cpus=0)
class Process:
    """Says what it was given."""

    def gpus(self) -> list[int]:
        return [int(gpu) for gpu in ray.get_gpu_ids()]

    def sees(self) -> tuple[str | None, bool]:
        """CUDA_VISIBLE_DEVICES, and whether the services would compute on a GPU here, if there was one."""
        # Here and not above: the others need no torch, and are up seconds sooner.
        from quartet.models.device import may_use_gpus

        # In a thread, as a critic's only rank asks.
        with ThreadPoolExecutor(1) as threads:
            return os.environ.get(VISIBLE), threads.submit(may_use_gpus).result()


def place(order: list[tuple[str, float]]) -> list[tuple[str, list[int]]]:
    """The GPUs of each process; RuntimeError for one that gets none within 20 s."""
    actors, placed = [], []
    for role, gpus in order:
        actor: Any = Process.options(num_gpus=gpus).remote()  # type: ignore[attr-defined]
        actors.append(actor)
        placed.append((role, ray.get(actor.gpus.remote(), timeout=20)))
    for actor in actors:
        ray.kill(actor)
    # What the dead ones had comes back a moment after.
    while ray.available_resources().get("GPU", 0) < GPUS:
        pass
    return placed


def seen() -> dict[str, tuple[str | None, bool]]:
    """GPUs that processes see: with a share of one, without any, and with a CUDA_VISIBLE_DEVICES of their own."""
    pinned = {"env_vars": {VISIBLE: "6"}}
    options: dict[str, dict[str, Any]] = {
        "share": {"num_gpus": 0.3},
        "none": {"num_gpus": 0},
        "pinned": {"num_gpus": 0, "runtime_env": pinned},
    }
    return {
        name: ray.get(Process.options(**option).remote().sees.remote(), timeout=60)  # type: ignore[attr-defined]
        for name, option in options.items()
    }


def main() -> None:
    asked = json.loads(sys.argv[1])
    ray.init(address="local", num_cpus=2, num_gpus=GPUS, include_dashboard=False, log_to_driver=False)
    print(json.dumps({"orders": [place(order) for order in asked["orders"]], "seen": seen()}))


if __name__ == "__main__":
    main()
