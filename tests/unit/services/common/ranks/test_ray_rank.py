"""Errors of a rank that is a Ray actor: those of its method, and those that say that it is lost."""

import asyncio

import pytest
from ray.exceptions import ActorUnavailableError, OwnerDiedError, RayActorError, RayTaskError, RuntimeEnvSetupError

from services.common.ranks.group import RankDied
from services.common.ranks.ray_rank import _answer
from services.common.wire.errors import InvalidArgument


async def raising(error: Exception) -> None:
    await asyncio.sleep(0)
    raise error


@pytest.mark.parametrize(
    "error",
    [
        RayActorError(),
        ActorUnavailableError("away", None),
        RuntimeEnvSetupError("the agent died"),
        OwnerDiedError("00" * 28, None, ""),
    ],
    ids=lambda error: type(error).__name__,
)
async def test_whatever_ray_has_lost_of_a_rank_ends_its_group(error: Exception) -> None:
    with pytest.raises(RankDied) as caught:
        await _answer(raising(error))
    assert str(caught.value) == str(error).partition("\n")[0]


async def test_an_error_of_its_method_is_raised_as_it_is() -> None:
    cause = InvalidArgument("policy.restore: another layout")
    with pytest.raises(InvalidArgument) as caught:
        await _answer(raising(RayTaskError("run", "Traceback", cause)))
    assert caught.value is cause
