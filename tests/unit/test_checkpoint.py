"""Checkpoints: whole or not there, the last few kept, training going on while they are written."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from orchestrator.checkpoint import Checkpoints, clear, latest
from orchestrator.config import CheckpointConfig
from orchestrator.policy_actor import PolicyError
from orchestrator.run import Restarts, is_loss
from orchestrator.state import TrainState
from services.common.config import ConfigError
from services.common.errors import DeadlineExceeded, Internal, InvalidArgument, ServiceError, Unavailable
from services.critic.client import CriticReset


def state(step: int) -> TrainState:
    return TrainState(step=step, policy_version=step + 1, critic_step=step + 100, kl_coef=0.1)


class FakeLearner:
    """The policy's part and the critic's; writing waits for `gate`."""

    def __init__(self) -> None:
        self.taken: list[tuple[str, int]] = []
        self.folders: list[Path] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.failures: dict[str, Exception] = {}

    async def take(self, folder: str, step: int) -> None:
        self.fail("take")
        self.taken.append((Path(folder).name, step))
        self.folders.append(Path(folder))

    async def write(self) -> None:
        await self.gate.wait()
        self.fail("write")
        self.folders[-1].mkdir()
        (self.folders[-1] / "layout.json").write_text("{}")

    def fail(self, when: str) -> None:
        if when in self.failures:
            raise self.failures.pop(when)


class FakePolicy(FakeLearner):
    async def take_snapshot(self, folder: str, step: int, copies: bool) -> None:
        self.copies = copies
        await self.take(folder, step)

    async def write_snapshot(self) -> None:
        await self.write()


class FakeCritic(FakeLearner):
    async def take_checkpoint(self, path: str, last_step: int, timeout_s: float, *, copies: bool) -> None:
        self.copies = copies
        await self.take(path, last_step)

    async def write_checkpoint(self, path: str, timeout_s: float) -> None:
        assert path == str(self.folders[-1])
        await self.write()


class FakeJournal:
    forgotten = -1

    def forget(self, step: int) -> None:
        self.forgotten = step


class Stage:
    """Checkpoints in a folder, with fakes around them."""

    def __init__(self, folder: Path, **config: Any) -> None:
        self.folder = folder
        self.policy, self.critic, self.journal = FakePolicy(), FakeCritic(), FakeJournal()
        self.notes: list[str] = []
        self.checkpoints = Checkpoints(
            folder,
            CheckpointConfig(**{"every": 10, "keep": 2} | config),
            self.policy,
            self.critic,
            self.journal,  # type: ignore[arg-type]
            self.notes.append,
        )

    def there(self) -> list[str]:
        return sorted(path.name for path in self.folder.iterdir())


async def test_one_is_taken_before_the_first_step_and_when_due(tmp_path: Path) -> None:
    stage = Stage(tmp_path)
    async with stage.checkpoints as checkpoints:
        await checkpoints.first(state(0))
        assert stage.there() == ["step-000000"]
        for step in range(1, 31):
            await checkpoints.after(state(step))
    assert stage.policy.taken == [("policy", step) for step in (0, 10, 20, 30)]
    assert stage.critic.taken == [("critic", step + 100) for step in (0, 10, 20, 30)]
    assert stage.there() == ["step-000020", "step-000030"]
    # Whoever goes back may go back to the older one.
    assert stage.journal.forgotten == 20
    found = latest(tmp_path)
    assert found is not None
    assert (found.folder, found.state) == (tmp_path / "step-000030", state(30))


async def test_training_goes_on_while_one_is_written(tmp_path: Path) -> None:
    stage = Stage(tmp_path, every=1)
    async with stage.checkpoints as checkpoints:
        stage.critic.gate.clear()
        await checkpoints.after(state(1))
        await asyncio.sleep(0.05)
        # Not there until all of it is.
        [aside] = stage.there()
        assert aside.startswith(".step-000001.")
        assert latest(tmp_path) is None
        # The next waits for it: there is one copy of the state.
        second = asyncio.create_task(checkpoints.after(state(2)))
        await asyncio.sleep(0.1)
        assert len(stage.policy.taken) == 1
        stage.critic.gate.set()
        await second
        assert 0.1 <= checkpoints.waited_s() < 1
        assert checkpoints.waited_s() == 0
    assert stage.there() == ["step-000001", "step-000002"]


async def test_in_the_foreground_training_waits(tmp_path: Path) -> None:
    stage = Stage(tmp_path, every=1, background=False)
    async with stage.checkpoints as checkpoints:
        await checkpoints.after(state(1))
        assert stage.there() == ["step-000001"]
        assert not stage.policy.copies
        assert not stage.critic.copies


async def test_never_means_never(tmp_path: Path) -> None:
    stage = Stage(tmp_path, every=0)
    async with stage.checkpoints as checkpoints:
        await checkpoints.first(state(0))
        await checkpoints.after(state(10))
    assert stage.there() == []


@pytest.mark.parametrize(
    ("who", "when", "last", "whole"),
    [("policy", "take", "1", [1, 3]), ("critic", "take", "1", [1, 3]), ("policy", "write", "none", [2, 3])],
)
async def test_one_that_fails_is_told_and_costs_nothing_else(
    tmp_path: Path, who: str, when: str, last: str, whole: list[int]
) -> None:
    stage = Stage(tmp_path, every=1)
    async with stage.checkpoints as checkpoints:
        await checkpoints.after(state(1))
        getattr(stage, who).failures[when] = Internal("No space left on device")
        await checkpoints.after(state(2))
        await checkpoints.after(state(3))
    assert stage.notes == [f"checkpoint failed: No space left on device; the last one is of step {last}"]
    # Nothing of it takes room any more.
    assert stage.there() == [f"step-{n:06d}" for n in whole]


async def test_without_the_first_a_run_does_not_begin(tmp_path: Path) -> None:
    stage = Stage(tmp_path)
    async with stage.checkpoints as checkpoints:
        stage.policy.failures["write"] = Internal("No space left on device")
        with pytest.raises(ExceptionGroup) as caught:
            await checkpoints.first(state(0))
    assert isinstance(caught.value.exceptions[0], Internal)


@pytest.mark.parametrize("loss", [CriticReset("replaced"), PolicyError("rank 0 died")])
async def test_a_lost_learner_is_not_passed_over(tmp_path: Path, loss: Exception) -> None:
    stage = Stage(tmp_path, every=1)
    async with stage.checkpoints as checkpoints:
        stage.critic.failures["take"] = loss
        with pytest.raises(ExceptionGroup) as caught:
            await checkpoints.after(state(1))
    assert caught.value.exceptions[0] is loss


async def test_a_disk_that_is_not_shared_is_told(tmp_path: Path) -> None:
    stage = Stage(tmp_path)

    async def elsewhere(path: str, timeout_s: float) -> None:
        """Writes where nobody else sees it."""

    stage.critic.write_checkpoint = elsewhere  # type: ignore[method-assign]
    async with stage.checkpoints as checkpoints:
        with pytest.raises(ExceptionGroup) as caught:
            await checkpoints.first(state(0))
    [error] = caught.value.exceptions
    assert isinstance(error, ServiceError)
    assert "checkpoint.folder must be on a disk that all nodes share" in str(error)


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
            await checkpoints.after(state(1))
            raise RuntimeError("lost")

    with pytest.raises(RuntimeError, match="lost"):
        await run()
    assert latest(tmp_path) is None


def test_the_state_survives_to_the_bit(tmp_path: Path) -> None:
    from orchestrator.ppo import RunningNormaliser

    kept = state(3).model_copy(update={"kl_coef": 0.1 / 3, "normaliser": RunningNormaliser(7, 1e-17 / 3, 2 / 7)})
    folder = tmp_path / "step-000003"
    folder.mkdir()
    (folder / "state.json").write_text(kept.model_dump_json(indent=1))
    found = latest(tmp_path)
    assert found is not None
    assert found.state == kept


@pytest.mark.parametrize("text", ["", "{}", '{"format": 2}', "[1]"])
def test_a_broken_state_names_its_file(tmp_path: Path, text: str) -> None:
    (tmp_path / "step-000003").mkdir()
    (tmp_path / "step-000003" / "state.json").write_text(text)
    with pytest.raises(ConfigError, match=r"step-000003/state.json: not what a checkpoint holds"):
        latest(tmp_path)


def test_a_users_copy_of_a_checkpoint_is_left_alone(tmp_path: Path) -> None:
    for name in ("step-000003", "step-000009.bak"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "state.json").write_text(state(3).model_dump_json())
    found = latest(tmp_path)
    assert found is not None
    assert found.folder.name == "step-000003"
    clear(tmp_path, overwrite=True)
    assert [path.name for path in tmp_path.iterdir()] == ["step-000009.bak"]


def test_an_earlier_runs_checkpoints_are_not_a_new_ones(tmp_path: Path) -> None:
    clear(tmp_path / "none", overwrite=False)
    (tmp_path / "step-000003").mkdir()
    (tmp_path / "step-000003" / "state.json").write_text(state(3).model_dump_json())
    with pytest.raises(ConfigError, match="already holds checkpoints; choose another name, --resume"):
        clear(tmp_path, overwrite=False)
    clear(tmp_path, overwrite=True)
    assert latest(tmp_path) is None


def test_a_run_that_gets_further_may_go_back_again() -> None:
    restarts = Restarts(2)
    assert [restarts.spend(step) for step in (10, 10, 20, 20, 20)] == [True, True, True, True, False]
    assert not Restarts(0).spend(5)


@pytest.mark.parametrize(
    ("error", "mended"),
    [
        (PolicyError("rank 0 died"), True),
        (CriticReset("replaced"), True),
        (ExceptionGroup("", [ExceptionGroup("", [DeadlineExceeded("critic.Values: no answer within 60 s")])]), True),
        (Unavailable("no rollout replica answers"), True),
        (InvalidArgument("prompts[3]: too long"), False),
        (ConfigError("orchestrator.steps"), False),
        (Internal("Score: internal error"), False),
    ],
)
def test_a_run_goes_back_for_what_may_mend_itself_only(error: Exception, mended: bool) -> None:
    assert is_loss(error) is mended
