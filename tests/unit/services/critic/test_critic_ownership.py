"""Permission to change a critic, and the place of its files: leases of runs, and names under its root."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from protos import common_pb2
from protos import critic_pb2 as pb
from quartet.security.identity import Caller
from quartet.wire.errors import FailedPrecondition, InvalidArgument, LeaseLost
from tests.unit.contexts import Context
from tests.unit.critic_calls import NEWER, OLDER, OURS, adopt, checkpoint, claim, save, start, train
from tests.unit.waiting import settled, until

pytestmark = pytest.mark.processes


async def test_another_identity_that_repeats_the_runs_lease_changes_nothing(critic: Any, root: Path) -> None:
    stranger = Context(caller=Caller("stranger", "trainer"))
    with pytest.raises(LeaseLost, match=r"run ours of stranger \(lease 4\) does not hold this service: run ours"):
        await critic.Save(pb.SaveRequest(name="saved", lease=OURS), stranger)
    resumed = pb.ClaimRequest(lease=common_pb2.Lease(run_id="ours", number=5), claim=common_pb2.Claim(ttl_s=60))
    with pytest.raises(LeaseLost, match="run ours holds this service and is alive"):
        await critic.Claim(resumed, stranger)
    assert sorted(path.name for path in root.iterdir()) == [".lease-critic.json"]


async def test_a_training_step_that_waits_when_another_run_takes_over_does_not_begin(critic: Any) -> None:
    gate, ask, run_once = asyncio.Event(), critic._critic._ask, critic._critic._once.run
    asked: list[int] = []

    async def gated(*arguments: Any, **options: Any) -> Any:
        await gate.wait()
        return await ask(*arguments, **options)

    async def noted(step: int, *arguments: Any) -> Any:
        asked.append(step)
        return await run_once(step, *arguments)

    critic._critic._ask, critic._critic._once.run = gated, noted
    first = asyncio.create_task(train(critic, 1))
    await until(lambda: asked == [1])
    second = asyncio.create_task(train(critic, 2))
    await until(lambda: asked == [1, 2])
    await settled()
    with pytest.raises(LeaseLost, match="run ours holds this service and is alive"):
        await claim(critic, NEWER)
    await claim(critic, NEWER, take_over=True)
    gate.set()
    with pytest.raises(LeaseLost, match=r"run ours \(lease 4\) no longer"):
        await second
    assert "loss" in await first  # half a step cannot be taken back
    assert critic._critic.last_step == 1
    await adopt(critic, 1, NEWER)
    assert "loss" in await train(critic, 2, 1, lease=NEWER)


async def test_a_save_or_checkpoint_that_waits_when_another_run_takes_over_is_not_written(
    critic: Any, root: Path
) -> None:
    async with critic._critic.turn:
        waiting = [asyncio.create_task(call) for call in (save(critic, "model"), checkpoint(critic, "Take", "kept"))]
        await settled()
        await claim(critic, NEWER, take_over=True)
    for each in waiting:
        with pytest.raises(LeaseLost, match=r"run ours \(lease 4\) no longer"):
            await each
    assert not (root / "model").exists()
    with pytest.raises(FailedPrecondition, match="no checkpoint was taken"):
        await checkpoint(critic, "Write", "kept", lease=NEWER)


async def test_a_checkpoint_is_told_of_the_step_that_it_holds(critic: Any) -> None:
    ask = critic._critic._ask

    async def begun(*arguments: Any, **options: Any) -> Any:
        critic._critic._once.last_step = 1  # as a step does that comes while the state is copied
        return await ask(*arguments, **options)

    critic._critic._ask = begun
    assert await checkpoint(critic, "Take", "critic") == 0


async def test_a_critic_that_is_replaced_lets_no_older_run_restore(
    critic: Any, reward_folder: Path, root: Path
) -> None:
    await checkpoint(critic, "Take", "critic")
    await checkpoint(critic, "Write", "critic")
    again = await start(reward_folder, root)
    try:
        with pytest.raises(LeaseLost, match=r"run older \(lease 3\) no longer"):
            await checkpoint(again, "Restore", lease=OLDER)
        info = await again.Info(common_pb2.InfoRequest(), Context())
        assert info.held.lease == OURS
        assert 0 < info.held.left_s <= 60  # seconds pass while the other critic starts
        assert await checkpoint(again, "Restore") == 0
    finally:
        again._critic.stop()


@pytest.mark.parametrize(
    "name",
    [
        "",
        ".",
        "..",
        "../x",
        "a/../../x",
        "/etc",
        "a//b",
        "a/",
        "a/.",
        "a\\b",
        "a\0b",
        "x" * 256,
        "x/" * 600 + "x",
        "~",
        "caf\u00e9",
        "a b",
    ],
)
async def test_what_is_not_a_name_under_the_root_is_refused(critic: Any, tmp_path: Path, name: str) -> None:
    before = sorted(tmp_path.rglob("*"))
    for call in (
        save(critic, name),
        checkpoint(critic, "Take", name),
        checkpoint(critic, "Restore", name),
    ):
        with pytest.raises(InvalidArgument, match=r"name: .*; must be names of letters, digits") as caught:
            await call
        assert str(tmp_path) not in str(caught.value)
    assert sorted(tmp_path.rglob("*")) == before


async def test_links_that_leave_the_root_are_refused_and_do_not_tell_what_is_there(
    critic: Any, root: Path, tmp_path: Path
) -> None:
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "layout.json").write_text("{}")
    (root / "there").symlink_to(tmp_path / "outside")
    (root / "not-there").symlink_to(tmp_path / "nowhere")
    (root / "itself").symlink_to(root)
    told = set()
    for name in ("there", "not-there", "there/deeper", "itself"):
        for call in (save(critic, name), checkpoint(critic, "Take", name), checkpoint(critic, "Restore", name)):
            with pytest.raises(InvalidArgument, match="leads out of the critic's root") as caught:
                await call
            told.add(str(caught.value).replace(name, "NAME"))
    assert told == {"name: NAME; leads out of the critic's root"}
    assert [path.name for path in (tmp_path / "outside").iterdir()] == ["layout.json"]


async def test_a_saved_critic_is_replaced_by_the_next_and_a_folder_of_anothers_is_not(
    critic: Any, root: Path
) -> None:
    assert await save(critic, "demo/critic") == "demo/critic"
    assert await save(critic, "demo/critic") == "demo/critic"
    assert (root / "demo" / "critic" / "value_head.safetensors").is_file()
    with pytest.raises(InvalidArgument, match=r"^name: demo exists and Quartet did not write it"):
        await save(critic, "demo")
    (root / "file").touch()
    with pytest.raises(InvalidArgument, match=r"^name: file/model cannot be written: Not a directory"):
        await save(critic, "file/model")
    assert (root / "demo" / "critic").is_dir()
