"""A rank as a Ray actor."""

from collections.abc import Awaitable
from typing import Any

import ray

from services.common.config.learner import LearnerConfig
from services.common.ranks.group import RankDied, RankGroup
from services.common.ranks.ranks import Rank

CONTROL_GROUP = "beside"
"""The actor's concurrency group for methods that run beside training."""
BESIDE = 3
"""Such methods at the same time: one sends weights, one writes a checkpoint, and a third can abandon the first."""


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
                runtime_env={"env_vars": config.env_vars},
                max_concurrency=1,
            )
            .remote(rank, config.ranks, config.rank_timeout_s)
        )

    def call(self, method: str, *arguments: Any, **options: Any) -> Awaitable[Any]:
        """Sends the call to the actor, as RankProcess describes."""
        called = getattr(self._actor, method)
        if method == "run_beside":
            called = called.options(concurrency_group=CONTROL_GROUP)
        return _answer(called.remote(*arguments, **options))

    @property
    def death(self) -> str:
        """Empty: Ray tells of an actor's death with the next call."""
        return ""

    def kill(self) -> None:
        """Kills the actor; does nothing if it has ended."""
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
