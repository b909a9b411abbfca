"""The critic as a learner: what it is asked in an update, in a checkpoint and in a restart."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from orchestrator.learners import CriticLearner, Update
from tests.trajectories import of
from tests.unit.fakes import make_config

ROWS = [np.ones(2, np.float32)]
COLUMNS = of([[7]], [[8, 9]], values=[[0, 0]], returns=[[3, 3]], logprobs=ROWS, advantages=ROWS)
UPDATE = Update(step=3, seed=41, columns=COLUMNS, kl_coef=0.25)


class Recorder:
    """Any client: notes each method that is called and its arguments."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def __getattr__(self, name: str) -> Callable[..., Any]:
        async def called(*arguments: Any, **named: Any) -> dict[str, float]:
            self.calls.append((name, arguments, named))
            return {"loss": 0.5}

        return called


async def test_the_critics_steps_go_on_from_its_first_and_its_folder_has_a_name_under_the_root(
    policy_folder: Path, tmp_path: Path
) -> None:
    """Trained for 100 steps before: step 3 of this run is its 103rd."""
    algorithm = {"epochs": 3, "minibatch_size": 1}
    section = {
        "algorithm": algorithm,
        "timeouts": {"train_s": 21},
        "checkpoint": {"root": str(tmp_path), "timeout_s": 9},
    }
    critic = Recorder()
    learner = CriticLearner(critic, make_config(policy_folder, **section), first_step=100)  # type: ignore[arg-type]
    checkpoint = tmp_path / "demo" / "step-000003"
    assert await learner.train(UPDATE) == {"loss": 0.5}
    await learner.take_snapshot(checkpoint, 3, copies=False)
    await learner.write_snapshot(checkpoint)
    await learner.restore(checkpoint)
    trained = (103, COLUMNS)
    schedule = {"epochs": 3, "minibatch_size": 1, "seed": 41, "last_step": 102, "timeout_s": 21}
    name = "demo/step-000003/critic"
    assert critic.calls == [
        ("train", trained, schedule),
        ("take_checkpoint", (name, 103, 9), {"copies": False}),
        ("write_checkpoint", (name, 9), {}),
        ("restore_checkpoint", (name, 9), {}),
    ]


async def test_the_critic_may_take_passes_of_its_own(policy_folder: Path) -> None:
    critic = Recorder()
    for passes in ({}, {"critic_epochs": 4}):
        config = make_config(policy_folder, algorithm={"epochs": 2, "minibatch_size": 1} | passes)
        await CriticLearner(critic, config, first_step=0).train(UPDATE)  # type: ignore[arg-type]
    assert [options["epochs"] for _, _, options in critic.calls] == [2, 4]
