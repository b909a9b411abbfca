"""A rank as a Ray actor."""

from collections.abc import Awaitable
from typing import Any

import ray

from services.common.learner_config import LearnerConfig
from services.common.rank_group import RankDied, RankGroup
from services.common.ranks import Rank

BESIDE = "beside"
"""The actor's other threads: one may admit newcomers to the push while one writes a checkpoint."""


class RayRank:
    """A RankProcess. It ends with the process that made it."""

    def __init__(self, config: LearnerConfig, rank: int) -> None:
        """Asks Ray for the actor and returns; calls wait until Ray has found it a place."""
        self._actor = (
            ray.remote(concurrency_groups={BESIDE: 2})(Rank)
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
        """See RankProcess."""
        called = getattr(self._actor, method)
        if method == "run_beside":
            called = called.options(concurrency_group=BESIDE)
        return _answer(called.remote(*arguments, **options))

    def kill(self) -> None:
        """See RankProcess."""
        ray.kill(self._actor)


async def _answer(reference: Any) -> Any:
    try:
        return await reference
    except ray.exceptions.RayActorError as error:
        # The rest is Ray's advice, a page of it.
        raise RankDied(str(error).partition("\n")[0]) from None
    except ray.exceptions.RayTaskError as error:
        raise error.cause from error


def ray_ranks(name: str, config: LearnerConfig) -> RankGroup:
    """The ranks of `config` as Ray actors, not yet started."""
    return RankGroup(name, [RayRank(config, rank) for rank in range(config.ranks)])
