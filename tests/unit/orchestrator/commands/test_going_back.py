"""Losses of a run: those before the first checkpoint begin it again, later ones go back, and bad input ends it."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from orchestrator.commands.restarts import is_loss
from orchestrator.commands.train import Run
from orchestrator.deployment.file import Deployment
from orchestrator.policy.ranks import Policy
from orchestrator.push.pusher import PushFailed
from quartet.config.base import ConfigError
from quartet.ranks.group import RanksLost
from quartet.wire.errors import DeadlineExceeded, LeaseLost, ResourceExhausted, Unavailable
from services.critic.client import CriticReset


class Losing(Run):
    """A run whose attempts end with these errors, and then well."""

    __slots__ = ("attempts", "errors")
    attempts: list[tuple[Any, int, bool]]
    errors: list[Exception]

    async def _train(
        self, checkpoint: Any, hold: Any, registry: Any, attempt: int, *, overwrite: bool, resume: bool
    ) -> None:
        self.attempts.append((checkpoint, attempt, resume))
        if attempt < len(self.errors):
            raise self.errors[attempt]


def losing(folder: Path, policy: Path, errors: list[Exception], **checkpoint: Any) -> tuple[Losing, list[str]]:
    path = folder / "a.yaml"
    section = {
        "name": "run",
        "data": {"path": str(folder / "prompts.jsonl")},
        "policy": {"model": str(policy), "optimizer": {"learning_rate": 1e-4}},
        "checkpoint": {"root": str(folder)} | checkpoint,
    }
    path.write_text(yaml.safe_dump({"applications": [], "orchestrator": section}))
    notes: list[str] = []
    inputs = SimpleNamespace(notes=(), distribution=None)
    progress, services = SimpleNamespace(note=notes.append), SimpleNamespace()
    run = Losing(Deployment.load(path), inputs, services, None, progress, folder / "run", False)  # type: ignore[arg-type]
    object.__setattr__(run, "attempts", [])
    object.__setattr__(run, "errors", errors)
    return run, notes


async def finish(run: Losing) -> None:
    nothing: Any = None
    await run._finish(nothing, nothing, overwrite=False, resume=False)


@pytest.mark.parametrize(
    "error",
    [
        PushFailed("version 1 after 5 attempts: only: did not answer prepare"),
        CriticReset("critic.Adopt: timeline: the critic has just started"),
        RanksLost("policy.start: rank 0 of 1 died: SIGKILL"),
        ExceptionGroup("", [Unavailable("critic.Info: failed to connect"), DeadlineExceeded("rollout.Info: silent")]),
    ],
    ids=lambda error: type(error).__name__,
)
async def test_a_loss_before_the_first_checkpoint_begins_the_run_again(
    error: Exception, tmp_path: Path, policy_folder: Path
) -> None:
    run, notes = losing(tmp_path, policy_folder, [error] * 3, restarts=3)
    await finish(run)
    assert run.attempts == [(None, 0, False), (None, 1, True), (None, 2, True), (None, 3, True)]
    assert len(notes) == 3
    assert all(note.endswith("; beginning again at step 1") for note in notes)
    run, _ = losing(tmp_path, policy_folder, [error] * 4, restarts=3)
    with pytest.raises(type(error)):
        await finish(run)


@pytest.mark.parametrize("error", [ConfigError("dtype"), LeaseLost("lease: another"), ResourceExhausted("no CPUs")])
async def test_what_a_repetition_does_not_mend_ends_it(error: Exception, tmp_path: Path, policy_folder: Path) -> None:
    assert not is_loss(error)
    run, notes = losing(tmp_path, policy_folder, [error])
    with pytest.raises(type(error)):
        await finish(run)
    assert notes == []


async def test_a_run_without_checkpoints_may_have_been_trained_and_ends(tmp_path: Path, policy_folder: Path) -> None:
    run, _ = losing(tmp_path, policy_folder, [RanksLost("rank 0 died")], every=0)
    with pytest.raises(RanksLost):
        await finish(run)


async def test_a_cluster_with_room_for_the_learner_once_has_it_again(
    tmp_path: Path, policy_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the first start nothing says that it has: then asking again would only hide the reason."""

    async def start(*arguments: Any) -> None:
        raise ResourceExhausted("policy.start: no answer within 300 s from rank 0 of 1")

    monkeypatch.setattr(Policy, "start", start)
    run, _ = losing(tmp_path, policy_folder, [])
    with pytest.raises(ResourceExhausted):
        await run._policy(0)
    with pytest.raises(RanksLost, match="no answer within 300 s from rank 0"):
        await run._policy(1)
