"""Checkpoints: whole or not there, the last few kept, training going on while they are written."""

import asyncio
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from orchestrator.loop.checkpoint_folder import latest
from quartet.ranks.group import RanksLost
from quartet.wire.errors import Internal, NotFinite, ServiceError, leaves
from services.critic.client import CriticReset
from tests.configuration import REPO
from tests.unit.checkpoint_stage import Stage
from tests.unit.fake_clock import Clock
from tests.unit.train_states import state
from tests.unit.waiting import settled, until


async def test_one_is_taken_before_the_first_step_and_when_due(tmp_path: Path) -> None:
    stage = Stage(tmp_path)
    async with stage.checkpoints as checkpoints:
        await checkpoints.first(state(0))
        assert stage.checkpoint_names() == ["step-000000"]
        for step in range(1, 31):
            await checkpoints.take_if_due(state(step))
    assert stage.policy.taken == [("policy", step) for step in (0, 10, 20, 30)]
    assert stage.critic.taken == [("critic", step) for step in (0, 10, 20, 30)]
    assert stage.checkpoint_names() == ["step-000020", "step-000030"]
    # A run that goes back may go back to the older one.
    assert stage.journal.forgotten == 20
    actual = latest(tmp_path)
    assert actual is not None
    assert (actual.folder, actual.state) == (tmp_path / "step-000030", state(30))


async def test_one_is_taken_after_the_last_step_unless_there_are_none(tmp_path: Path) -> None:
    for every, wanted in [(10, ["step-000000", "step-000003"]), (0, [])]:
        stage = Stage(tmp_path / f"{every}", every=every)
        async with stage.checkpoints as checkpoints:
            await checkpoints.first(state(0))
            for step in (1, 2, 3):
                await checkpoints.take_if_due(state(step), last=step == 3)
        assert stage.checkpoint_names() == wanted


ENDING = """
import asyncio, sys, threading
from pathlib import Path
from tests.unit.checkpoint_stage import Stage
from tests.unit.train_states import state

async def run():
    stage = Stage(Path(sys.argv[1]))
    await asyncio.to_thread(lambda: None)  # begins a pool, as much else of a run does
    async with stage.checkpoints as checkpoints:
        begun.set()
        while threading.main_thread().is_alive():
            await asyncio.sleep(0.01)
        await checkpoints.first(state(0))

begun = threading.Event()
threading.Thread(target=lambda: asyncio.run(run())).start()
begun.wait()
"""


def test_one_is_written_while_a_program_ends_that_did_not_close_its_run(tmp_path: Path) -> None:
    command = [sys.executable, "-c", ENDING, str(tmp_path)]
    ended = subprocess.run(command, cwd=REPO, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 0, ended.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["step-000000"], ended.stderr


async def test_none_is_taken_while_steps_are_skipped_and_none_evicts_the_last_good_one(tmp_path: Path) -> None:
    stage = Stage(tmp_path)
    async with stage.checkpoints as checkpoints:
        await checkpoints.first(state(0))
        for step in range(1, 65):
            skipped = 3 if 15 <= step < 62 else 0
            await checkpoints.take_if_due(state(step).model_copy(update={"skipped_in_a_row": skipped}))
    # The one that was due at 20 is taken with the first step that is good.
    assert [step for _, step in stage.policy.taken] == [0, 10, 62]
    assert stage.checkpoint_names() == ["step-000010", "step-000062"]
    assert stage.checkpoints.last_step() == 62
    assert stage.journal.forgotten == 10


async def test_a_run_that_ends_waits_for_the_checkpoint_that_is_being_completed(tmp_path: Path) -> None:
    """A thread cannot be cancelled: what it renames and removes must not be removed from beside it."""
    stage = Stage(tmp_path, keep=1)
    completing, go_on = threading.Event(), threading.Event()

    def forget(step: int) -> None:
        completing.set()
        assert go_on.wait(60)

    async def run() -> None:
        async with stage.checkpoints as checkpoints:
            await checkpoints.first(state(0))
            stage.journal.forget = forget  # type: ignore[method-assign]
            await checkpoints.take_if_due(state(10))
            await until(completing.is_set)
            asyncio.get_running_loop().call_later(0.05, go_on.set)
            raise RanksLost("rank 0 died")

    with pytest.raises(RanksLost):
        await run()
    assert go_on.is_set()
    assert stage.checkpoint_names() == ["step-000010"]
    assert sorted(path.name for path in (tmp_path / "step-000010").iterdir()) == ["critic", "policy", "state.json"]


async def test_weights_that_are_not_finite_make_no_checkpoint(tmp_path: Path) -> None:
    stage = Stage(tmp_path)
    async with stage.checkpoints as checkpoints:
        await checkpoints.first(state(0))
        for step in range(10, 60, 10):
            stage.critic.failures["take"] = NotFinite("weights are not finite")
            await checkpoints.take_if_due(state(step))
    assert stage.checkpoint_names() == ["step-000000"]
    assert stage.notes == ["checkpoint failed: weights are not finite; the last one is of step 0"] * 5


async def test_a_run_without_a_critic_checkpoints_its_policy_alone(tmp_path: Path) -> None:
    stage = Stage(tmp_path, with_critic=False)
    async with stage.checkpoints as checkpoints:
        await checkpoints.first(state(0))
    assert sorted(path.name for path in (tmp_path / "step-000000").iterdir()) == ["policy", "state.json"]
    assert stage.critic.taken == []


async def test_training_goes_on_while_one_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stage, clock = Stage(tmp_path, every=1), Clock()
    monkeypatch.setattr("orchestrator.loop.checkpoint.time", SimpleNamespace(monotonic=clock))
    async with stage.checkpoints as checkpoints:
        stage.critic.gate.clear()
        await checkpoints.take_if_due(state(1))
        await until(stage.policy.folders[0].is_dir)
        await settled()
        # Not there until all of it is.
        [aside] = stage.checkpoint_names()
        assert aside.startswith(".step-000001.")
        assert latest(tmp_path) is None
        # The next waits for it: there is one copy of the state.
        second = asyncio.create_task(checkpoints.take_if_due(state(2)))
        await settled()
        assert len(stage.policy.taken) == 1
        clock.now = 2.5
        stage.critic.gate.set()
        await second
        assert [checkpoints.waited_s() for _ in range(2)] == [2.5, 0]
    assert stage.checkpoint_names() == ["step-000001", "step-000002"]


async def test_in_the_foreground_training_waits(tmp_path: Path) -> None:
    stage = Stage(tmp_path, every=1, background=False)
    async with stage.checkpoints as checkpoints:
        await checkpoints.take_if_due(state(1))
        assert stage.checkpoint_names() == ["step-000001"]
        assert (stage.policy.copies, stage.critic.copies) == (False, False)


@pytest.mark.parametrize(
    ("who", "when", "kept", "whole"),
    [
        ("policy", "take", "the last one is of step 1", [1, 3]),
        ("critic", "take", "the last one is of step 1", [1, 3]),
        ("policy", "write", "there is none yet", [2, 3]),
    ],
)
async def test_one_that_fails_is_told_and_costs_nothing_else(
    tmp_path: Path, who: str, when: str, kept: str, whole: list[int]
) -> None:
    stage = Stage(tmp_path, every=1)
    async with stage.checkpoints as checkpoints:
        await checkpoints.take_if_due(state(1))
        getattr(stage, who).failures[when] = Internal("No space left on device")
        await checkpoints.take_if_due(state(2))
        await checkpoints.take_if_due(state(3))
    assert stage.notes == [f"checkpoint failed: No space left on device; {kept}"]
    # Nothing of it takes room any more.
    assert stage.checkpoint_names() == [f"step-{n:06d}" for n in whole]


async def test_without_the_first_a_run_does_not_begin(tmp_path: Path) -> None:
    stage = Stage(tmp_path)
    async with stage.checkpoints as checkpoints:
        stage.policy.failures["write"] = Internal("No space left on device")
        with pytest.raises(ExceptionGroup) as caught:
            await checkpoints.first(state(0))
    assert isinstance(caught.value.exceptions[0], Internal)


@pytest.mark.parametrize("loss", [CriticReset("replaced"), RanksLost("rank 0 died")])
async def test_a_lost_learner_is_not_passed_over(tmp_path: Path, loss: Exception) -> None:
    stage = Stage(tmp_path, every=1)
    async with stage.checkpoints as checkpoints:
        stage.critic.failures["take"] = loss
        with pytest.raises(ExceptionGroup) as caught:
            await checkpoints.take_if_due(state(1))
    assert caught.value.exceptions[0] is loss


async def test_a_disk_that_is_not_shared_is_told(tmp_path: Path) -> None:
    stage = Stage(tmp_path)

    async def elsewhere(checkpoint: Path) -> None:
        """Writes to a disk that no other node sees."""

    stage.critic.write_snapshot = elsewhere  # type: ignore[method-assign]
    async with stage.checkpoints as checkpoints:
        with pytest.raises(ExceptionGroup) as caught:
            await checkpoints.first(state(0))
    [error] = caught.value.exceptions
    assert isinstance(error, ServiceError)
    assert "checkpoint.root, and the root of a critic, must be one folder, on a disk that all nodes" in str(error)


async def test_what_a_killed_run_left_half_done_is_cleared_away(tmp_path: Path) -> None:
    for name in (".step-000004.writing", ".step-000001.removing", "step-000002"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "policy").mkdir()
    (tmp_path / "step-000002" / "state.json").write_text(state(2).model_dump_json())
    async with Stage(tmp_path).checkpoints:
        pass
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000002"]


async def test_a_run_that_fails_does_not_wait_for_the_writing(tmp_path: Path) -> None:
    stage = Stage(tmp_path, every=1)
    stage.policy.gate.clear()

    async def run() -> None:
        async with asyncio.timeout(5), stage.checkpoints as checkpoints:
            await checkpoints.take_if_due(state(1))
            raise RuntimeError("lost")

    with pytest.raises(RuntimeError, match="lost"):
        await run()
    assert latest(tmp_path) is None


@pytest.mark.parametrize("free", [0, 1 << 30])
async def test_a_full_disk_is_named_as_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free: int) -> None:
    """torch tells of a position in its file alone."""
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=free))
    stage = Stage(tmp_path)
    told = "policy.write_snapshot: rank 0 of 1: RuntimeError: unexpected pos 287424 vs 287312"
    async with stage.checkpoints as checkpoints:
        await checkpoints.first(state(0))
        stage.policy.failures["write"] = Internal(told)
        await checkpoints.take_if_due(state(10))
    reason = f"no space is left on the disk of {tmp_path}: {told}" if not free else told
    assert stage.notes[0].startswith(f"checkpoint failed: {reason}")
    assert stage.checkpoint_names() == ["step-000000"]
    # A learner that is lost is more than that, also where the other has no room.
    for loss in (RanksLost("rank 0 died"), CriticReset("replaced")):
        stage.policy.failures["take"], stage.critic.failures["take"] = Internal(told), loss
        with pytest.raises(ExceptionGroup) as caught:
            async with stage.checkpoints as checkpoints:
                await checkpoints.take_if_due(state(20))
        assert loss in leaves(caught.value)
