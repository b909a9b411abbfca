"""A rank as a Ray actor."""

import asyncio
import contextlib
import os
from collections.abc import Awaitable, Mapping
from functools import partial
from typing import Any, TypeVar
from uuid import uuid4

import psutil
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from quartet.config.learner import LearnerConfig
from quartet.models.device import VISIBLE, default_device
from quartet.ranks.group import RankDied, RankGroup
from quartet.ranks.nccl_settings import DEFAULTS
from quartet.ranks.rank import Rank
from quartet.ranks.stopped import has_ended, is_stopped
from quartet.threads import in_thread

Value = TypeVar("Value")

CONTROL_GROUP = "beside"
"""The actor's concurrency group for methods that run beside training."""
BESIDE = 3
"""Such methods at the same time: one sends weights, one writes a checkpoint, and a third can abandon the first."""


def own_place(config: LearnerConfig) -> dict[str, Any]:
    """Ray's options for a rank that has CPUs and a GPU of its own, wherever Ray finds them."""
    on_gpu = config.num_gpus or VISIBLE in config.env_vars
    return {
        "num_cpus": config.num_cpus,
        "num_gpus": config.num_gpus,
        "resources": config.resources,
        "runtime_env": {"env_vars": (DEFAULTS if on_gpu else {}) | config.env_vars},
    }


def makers_place() -> dict[str, Any]:
    """Ray's options for a rank that computes in the place of the actor that makes it: on its node, with its CPUs and
    its GPU. Ray reserves nothing for the rank itself, so that another one can always begin where it ended.

    Ray hands on what the actor's own runtime environment holds; what Ray gave the actor's process is added here.
    """
    handed_on = ["OMP_NUM_THREADS", *([VISIBLE] if default_device().type == "cuda" else [])]
    return {
        "num_cpus": 0,
        "num_gpus": 0,
        "scheduling_strategy": NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False),
        "runtime_env": {"env_vars": {name: os.environ[name] for name in handed_on if name in os.environ}},
    }


class RayRank:
    """A RankProcess. It ends with the process that made it."""

    def __init__(self, name: str, config: LearnerConfig, rank: int, place: Mapping[str, Any]) -> None:
        """Asks Ray for the actor and returns; calls wait until Ray has made it and found it a place. An event loop
        runs.

        Args:
            name: the learner's, which the title of the process begins with: `ray::PolicyRank`.
            config: the learner's.
            rank: number of the rank.
            place: Ray's options, as `own_place` or `makers_place` gives them.
        """
        titled = type(f"{name.capitalize()}{Rank.__name__}", (Rank,), {})
        # Ray's GCS knows one with a name when there is a handle of it. To end another, Ray might wait for the GCS.
        options = {"name": f"{name} rank {rank} {uuid4()}", "max_concurrency": 1, **place}
        actor = ray.remote(concurrency_groups={CONTROL_GROUP: BESIDE})(titled).options(**options)
        make = partial(actor.remote, rank, config.ranks, config.rank_timeout_s)
        # In a thread, as the GCS may take long to answer: the loop has leases to renew, or answers for its health.
        self._making = asyncio.ensure_future(in_thread(make, f"{name} rank {rank}"))
        self._placed = asyncio.ensure_future(self._process())
        """The actor's process, once it is known."""
        self._placed.add_done_callback(lambda placed: placed.cancelled() or placed.exception())

    def call(self, method: str, *arguments: Any, **options: Any) -> Awaitable[Any]:
        """Sends the call to the actor, as RankProcess describes."""
        return _answer(self._sent(method, method == "run_beside", *arguments, **options))

    @property
    def death(self) -> str:
        """The way in which the actor's process ended; empty while it lives, and for one on another machine, of whose
        death Ray tells with the next call."""
        process = self._here
        return "its process has ended" if process is not None and has_ended(process) else ""

    @property
    def stopped(self) -> bool:
        """True while a signal has stopped the actor's process; False also for one on another machine, and before the
        actor has begun."""
        process = self._here
        return process is not None and is_stopped(process)

    @property
    def _here(self) -> psutil.Process | None:
        """The actor's process, if it is known and on this machine."""
        placed = self._placed
        if not placed.done() or placed.cancelled() or placed.exception():
            return None
        return placed.result()

    async def _process(self) -> psutil.Process | None:
        """The actor's process; None if it is on another machine."""
        node, pid = await _answer(self._sent("place", True))
        return psutil.Process(pid) if node == ray.get_runtime_context().get_node_id() else None

    def kill(self) -> bool:
        """Kills the actor; does nothing if it has ended."""
        if self.stopped and (process := self._here):
            # Ray first asks a process to end, and gives it seconds, in which its GPU is not free.
            with contextlib.suppress(psutil.Error):
                process.kill()
        # Ray ends an actor that it makes from here on, as nothing holds its handle.
        made = self._making
        if not made.cancel() and not made.cancelled() and not made.exception():
            ray.kill(made.result())
        return True

    async def _sent(self, method: str, beside: bool, /, *arguments: Any, **options: Any) -> Any:
        """The answer of a method, called once the actor is made."""
        if not self._making.done():
            await asyncio.wait([self._making])
        if self._making.cancelled():
            raise RankDied("it was ended before Ray had made it")
        called = getattr(self._making.result(), method)
        if beside:
            called = called.options(concurrency_group=CONTROL_GROUP)
        return await called.remote(*arguments, **options)


async def _answer(reference: Any) -> Any:
    try:
        return await reference
    except ray.exceptions.RayTaskError as error:
        raise error.cause from error
    except ray.exceptions.RayError as error:
        # Its process, its node, or what Ray keeps for it is lost. The first line names the cause; a page of general
        # advice follows.
        raise RankDied(str(error).partition("\n")[0]) from None


def ray_ranks(name: str, config: LearnerConfig, place: Mapping[str, Any] | None = None) -> RankGroup:
    """The ranks of `config` as Ray actors, not yet started, each with the options `place`; None: with `own_place`."""
    options = own_place(config) if place is None else place
    ranks = [RayRank(name, config, rank, options) for rank in range(config.ranks)]
    return RankGroup(name, ranks, store=ray.put)
