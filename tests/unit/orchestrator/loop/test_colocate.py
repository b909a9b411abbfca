"""A run whose replicas release their memory while the learners compute."""

from pathlib import Path

import pytest

from orchestrator.commands.checks.fitting import misfits_of_rollout
from quartet.config.base import ConfigError
from quartet.wire.errors import LeaseLost
from services.rollout.config import RolloutConfig
from tests.unit.fake_fleet import FakeSource, Fleet, make_pusher
from tests.unit.fake_run import Stage
from tests.unit.fakes import make_config


@pytest.mark.parametrize("colocate", [True, False])
async def test_replicas_rest_from_the_batch_to_the_push(policy_folder: Path, colocate: bool) -> None:
    stage = Stage(policy_folder, steps=2, evaluation={"every": 0}, loop={"colocate": colocate})
    await stage.run()
    longest = stage.config.timeouts.longest_update_s
    assert longest >= 2 * stage.config.timeouts.train_s
    order = [event for event in stage.journal.events if event == "train policy" or event[0] in ("rest", "push")]
    step = [("rest", longest)] if colocate else []
    assert order == [("push", 1), *step, "train policy", ("push", 2), *step, "train policy", ("push", 3)]


async def test_all_replicas_rest_until_the_next_push_and_one_that_fails_keeps_its_memory() -> None:
    fleet = Fleet(FakeSource(), a=1, b=1)
    pusher = make_pusher(fleet)
    await pusher.push(1)
    await pusher.rest(60)
    fleet.mute = {("b", "rest")}
    await pusher.rest(61)  # the same call again would count as one that Serve repeats
    fleet.down = ["rest"]
    await pusher.rest(62)
    assert [engine.calls.count("rest") for engine in fleet.engines.values()] == [2, 1]
    assert (await pusher.push(2)).attempts == 1
    assert fleet.versions == {"a": 2, "b": 2}


async def test_a_run_that_has_lost_its_replicas_hears_of_it() -> None:
    fleet = Fleet(FakeSource(), a=1)

    async def fenced(*_: object, **__: object) -> list[object]:
        raise LeaseLost("another run holds the replicas")

    fleet.update_weights = fenced  # type: ignore[assignment, method-assign]
    with pytest.raises(LeaseLost):
        await make_pusher(fleet).rest(60)


def test_sampling_ahead_and_colocate_exclude_each_other(policy_folder: Path) -> None:
    with pytest.raises(ConfigError, match="colocate: replicas would pause as they sample ahead"):
        make_config(policy_folder, loop={"colocate": True, "max_staleness": 1})


def test_run_and_replicas_agree(policy_folder: Path) -> None:
    for ours, theirs in ((True, False), (False, True), (True, True), (False, False)):
        config = make_config(policy_folder, loop={"colocate": ours})
        section = RolloutConfig.parse(
            {"model": str(policy_folder), "dtype": "float32", "colocate": theirs}, "rollout"
        )
        lines = [line for line in misfits_of_rollout(config, section, "rollout") if "colocate" in line]
        assert len(lines) == (ours != theirs)
        if lines:
            assert lines[0].startswith(f"applications.rollout.args.colocate: {str(theirs).lower()}, but")
