"""Losses of a run: what is one, those before the first checkpoint begin it again, and bad input ends it."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from orchestrator.commands.restarts import is_loss, restarting
from orchestrator.commands.train import Run
from orchestrator.config.checkpoint import SnapshotsConfig
from orchestrator.deployment.file import Deployment
from orchestrator.loop.checkpoint_folder import Checkpoint
from orchestrator.policy.ranks import Policy
from orchestrator.push.prover import PushDisproved
from orchestrator.push.pusher import PushFailed
from quartet.config.base import ConfigError
from quartet.ranks.group import RanksLost
from quartet.wire.errors import (
    DeadlineExceeded,
    Internal,
    InvalidArgument,
    LeaseLost,
    OffTimeline,
    ResourceExhausted,
    Unavailable,
)
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
    ("restarts", "steps", "tries"), [(2, (10, 10, 20, 20, 20, 30), 5), (2, (0, 0, 0, 10), 3), (0, (5, 10), 1)]
)
async def test_a_run_that_gets_further_may_go_back_again(restarts: int, steps: tuple[int, ...], tries: int) -> None:
    reached, tried = iter(steps), []

    async def lost(checkpoint: Any, attempt: int) -> None:
        tried.append(attempt)
        raise RanksLost("rank 0 died")

    def last() -> Checkpoint[Any]:
        return Checkpoint(Path(), SimpleNamespace(step=next(reached)))

    with pytest.raises(RanksLost):
        await restarting(lost, None, last, SnapshotsConfig(restarts=restarts), lambda text: None)
    assert tried == list(range(tries))


@pytest.mark.parametrize(
    ("error", "mended"),
    [
        (RanksLost("rank 0 died"), True),
        (CriticReset("replaced"), True),
        (ExceptionGroup("", [ExceptionGroup("", [DeadlineExceeded("critic.Values: no answer within 60 s")])]), True),
        (Unavailable("no rollout replica answers"), True),
        (PushFailed("version 12 after 5 attempts: policy.rendezvous: no answer within 60 s"), True),
        (OffTimeline("rollout.Generate: timeline: this replica holds version 0 of no timeline"), True),
        (PushDisproved("version 12: a computes with other weights than were pushed"), False),
        (ExceptionGroup("", [LeaseLost("another run"), Unavailable("rollout")]), False),
        (InvalidArgument("prompts[3]: too long"), False),
        (ResourceExhausted("no CPUs"), False),
        (ConfigError("orchestrator.steps"), False),
        (Internal("Score: internal error"), False),
    ],
)
def test_a_run_goes_back_for_what_may_mend_itself_only(error: Exception, mended: bool) -> None:
    assert is_loss(error) is mended


async def test_a_loss_before_the_first_checkpoint_begins_the_run_again(tmp_path: Path, policy_folder: Path) -> None:
    error = RanksLost("policy.start: rank 0 of 1 died: SIGKILL")
    run, notes = losing(tmp_path, policy_folder, [error] * 3, restarts=3)
    await finish(run)
    assert run.attempts == [(None, 0, False), (None, 1, True), (None, 2, True), (None, 3, True)]
    assert len(notes) == 3
    assert all(note.endswith("; beginning again at step 1") for note in notes)
    run, _ = losing(tmp_path, policy_folder, [error] * 4, restarts=3)
    with pytest.raises(RanksLost):
        await finish(run)


async def test_what_a_repetition_does_not_mend_ends_it(tmp_path: Path, policy_folder: Path) -> None:
    run, notes = losing(tmp_path, policy_folder, [ConfigError("dtype")])
    with pytest.raises(ConfigError):
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
