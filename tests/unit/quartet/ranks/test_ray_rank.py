"""Errors of a rank that is a Ray actor: those of its method, and those that say that it is lost."""

import asyncio
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import ray
from ray.exceptions import ActorUnavailableError, OwnerDiedError, RayActorError, RayTaskError, RuntimeEnvSetupError

from quartet.config.learner import LearnerConfig
from quartet.ranks.group import RankDied
from quartet.ranks.nccl_settings import DEFAULTS, GIVE_UP
from quartet.ranks.ray_rank import RayRank, _answer, variables
from quartet.ranks.stopped import is_stopped
from quartet.wire.errors import InvalidArgument
from tests.unit.waiting import until


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


@pytest.mark.processes
@pytest.mark.parametrize(("node", "seen"), [("here", True), ("elsewhere", False)])
async def test_a_process_that_is_stopped_or_has_ended_is_seen_on_this_machine_only(
    monkeypatch: pytest.MonkeyPatch, node: str, seen: bool
) -> None:
    """A process id says nothing about another machine's processes."""
    monkeypatch.setattr(ray, "get_runtime_context", lambda: SimpleNamespace(get_node_id=lambda: "here"))
    killed: list[object] = []
    monkeypatch.setattr(ray, "kill", killed.append)
    process = await asyncio.create_subprocess_exec("sleep", "600")

    async def place() -> tuple[str, int]:
        return node, process.pid

    async def run() -> int:
        return 7

    rank = object.__new__(RayRank)
    remote = SimpleNamespace(remote=place)
    rank._actor = SimpleNamespace(place=SimpleNamespace(options=lambda **_: remote), run=SimpleNamespace(remote=run))
    rank._placed = None
    try:
        assert not rank.stopped  # it has not begun
        assert await rank.call("run") == 7
        await until(lambda: rank._placed and rank._placed.done())
        assert not rank.stopped
        process.send_signal(signal.SIGSTOP)
        if seen:
            await until(lambda: rank.stopped)
            assert not rank.death
            rank.kill()
            assert await process.wait() == -signal.SIGKILL
        else:
            await until(lambda: is_stopped(psutil.Process(process.pid)))
            assert not rank.stopped
            rank.kill()
            assert process.returncode is None
            process.kill()
            await process.wait()
        assert rank.death == ("its process has ended" if seen else "")
        assert killed == [rank._actor]
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


def test_a_rank_on_a_gpu_begins_with_the_variables_that_a_push_changes(policy_folder: Path) -> None:
    def variables_of(**fields: Any) -> dict[str, str]:
        given: dict[str, Any] = {"optimizer": {"learning_rate": 1e-5}, "model": str(policy_folder)}
        return variables(LearnerConfig.parse(given | fields, "policy"))

    assert variables_of() == {}
    assert variables_of(num_gpus=1, env_vars={"OMP_NUM_THREADS": "8"}) == DEFAULTS | {"OMP_NUM_THREADS": "8"}
    own = {"CUDA_VISIBLE_DEVICES": "3", GIVE_UP: "9"}
    assert variables_of(env_vars=own) == DEFAULTS | own
