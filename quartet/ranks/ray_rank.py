"""A rank as a Ray actor."""

import asyncio
import contextlib
from collections.abc import Awaitable
from typing import Any

import psutil
import ray

from quartet.config.learner import LearnerConfig
from quartet.models.device import VISIBLE
from quartet.ranks.group import RankDied, RankGroup
from quartet.ranks.nccl_settings import DEFAULTS
from quartet.ranks.ranks import Rank
from quartet.ranks.stopped import is_stopped

CONTROL_GROUP = "beside"
"""The actor's concurrency group for methods that run beside training."""
BESIDE = 3
"""Such methods at the same time: one sends weights, one writes a checkpoint, and a third can abandon the first."""


def variables(config: LearnerConfig) -> dict[str, str]:
    """The environment variables with which a rank's process begins, beside those of its node."""
    on_gpu = config.num_gpus or VISIBLE in config.env_vars
    return (DEFAULTS if on_gpu else {}) | config.env_vars


class RayRank:
    """A RankProcess. It ends with the process that made it."""

    def __init__(self, config: LearnerConfig, rank: int) -> None:
        """Asks Ray for the actor and returns; calls wait until Ray has found it a place."""
        self._actor = (
            ray.remote(concurrency_groups={CONTROL_GROUP: BESIDE})(Rank)
            .options(
                num_cpus=config.num_cpus,
                num_gpus=config.num_gpus,
                resources=config.resources,
                runtime_env={"env_vars": variables(config)},
                max_concurrency=1,
            )
            .remote(rank, config.ranks, config.rank_timeout_s)
        )
        self._placed: asyncio.Task[psutil.Process | None] | None = None
        """The actor's process, once it is known."""

    def call(self, method: str, *arguments: Any, **options: Any) -> Awaitable[Any]:
        """Sends the call to the actor, as RankProcess describes."""
        if self._placed is None:
            self._placed = asyncio.ensure_future(self._process())
            self._placed.add_done_callback(lambda placed: placed.cancelled() or placed.exception())
        called = getattr(self._actor, method)
        if method == "run_beside":
            called = called.options(concurrency_group=CONTROL_GROUP)
        return _answer(called.remote(*arguments, **options))

    @property
    def death(self) -> str:
        """Empty: Ray tells of an actor's death with the next call."""
        return ""

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
        if placed is None or not placed.done() or placed.cancelled() or placed.exception():
            return None
        return placed.result()

    async def _process(self) -> psutil.Process | None:
        """The actor's process; None if it is on another machine."""
        asked = self._actor.place.options(concurrency_group=CONTROL_GROUP).remote()
        node, pid = await _answer(asked)
        return psutil.Process(pid) if node == ray.get_runtime_context().get_node_id() else None

    def kill(self) -> None:
        """Kills the actor; does nothing if it has ended."""
        if self.stopped and (process := self._here):
            # Ray first asks a process to end, and gives it seconds, in which its GPU is not free.
            with contextlib.suppress(psutil.Error):
                process.kill()
        ray.kill(self._actor)


async def _answer(reference: Any) -> Any:
    try:
        return await reference
    except ray.exceptions.RayTaskError as error:
        raise error.cause from error
    except ray.exceptions.RayError as error:
        # Its process, its node, or what Ray keeps for it is lost. The first line names the cause; a page of general
        # advice follows.
        raise RankDied(str(error).partition("\n")[0]) from None


def ray_ranks(name: str, config: LearnerConfig) -> RankGroup:
    """The ranks of `config` as Ray actors, not yet started."""
    return RankGroup(name, [RayRank(config, rank) for rank in range(config.ranks)])
