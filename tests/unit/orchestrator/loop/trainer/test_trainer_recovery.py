"""Runs that go on from a checkpoint or a journal, and runs that end early."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quartet.wire.errors import InvalidReply, NotFinite, Unavailable, leaves
from services.critic.client import CriticReset
from tests.unit.fake_run import SAVE_TO, Stage
from tests.unit.step_metrics import untimed


async def test_a_run_goes_on_from_a_checkpoint_as_if_it_had_never_stopped(policy_folder: Path) -> None:
    kl = {"coef": 0.2, "target": 3, "horizon": 4}
    algorithm = {"minibatch_size": 1, "kl": kl, "normalise_scores": True}
    straight, again = Stage(policy_folder, algorithm=algorithm), Stage(policy_folder, algorithm=algorithm)
    await straight.run(policy_version=6, critic_step=9)
    checkpoint = straight.checkpoints.states[1]
    assert (checkpoint.step, checkpoint.policy_version, checkpoint.critic_step) == (1, 8, 10)
    await again.go_on(checkpoint)
    # Neither evaluated nor logged at step 0 again.
    assert again.journal.events[:1] == [("push", 8)]
    assert sorted(again.log.lines) == [2, 3]
    assert again.progress.calls[0] == ("start", 3, 1)
    assert again.checkpoints.states == straight.checkpoints.states[2:]
    assert again.policy.batches[0][1] == straight.policy.batches[1][1]
    for step in (2, 3):
        assert untimed(straight.log.lines[step]) == untimed(again.log.lines[step])


async def test_a_run_that_is_finished_is_not_trained_again_and_goes_on_with_more_steps(policy_folder: Path) -> None:
    whole, again = Stage(policy_folder), Stage(policy_folder)
    await whole.run()
    finished = whole.checkpoints.states[-1]
    assert finished.step == 3
    await again.go_on(finished)
    assert again.journal.events == [("push", 4), ("save", str(SAVE_TO)), "complete"]
    longer, straight = Stage(policy_folder, steps=5), Stage(policy_folder, steps=5)
    await longer.go_on(finished)
    await straight.run()
    assert longer.policy.batches[0][1] == straight.policy.batches[3][1]
    assert sorted(longer.log.lines) == [4, 5]


async def test_what_is_in_the_journal_is_not_sampled_again(policy_folder: Path) -> None:
    straight, again = Stage(policy_folder), Stage(policy_folder)
    await straight.run()
    again.experience.kept = {step: straight.experience.kept[step] for step in (1, 2)}
    await again.run()
    # Only the third step's two prompts, and the critic's values of them, are asked for.
    assert again.journal.names().count("generate") == 1
    assert [call["versions"] for call in again.fakes.rollout.calls] == [(3, None)]
    trained = [
        [[prompt.tolist() for prompt in batch.prompts] for batch, _ in stage.policy.batches]
        for stage in (straight, again)
    ]
    assert trained[0] == trained[1]
    assert again.log.lines[3]["samples/used_total"] == 6


async def test_steps_that_are_skipped_are_said_and_too_many_in_a_row_end_the_run(policy_folder: Path) -> None:
    stage = Stage(policy_folder, steps=5, checkpoint={"every": 1, "max_skipped_steps": 4})
    stage.policy.skipped_in_a_row = [2, 0, 2, 4, 6]
    with pytest.raises(
        NotFinite, match=r"^step 4: 4 optimizer steps in a row .* The last good checkpoint is of step 0"
    ):
        await stage.run()
    # Logged all the same; the state says it to whatever takes checkpoints.
    assert [stage.log.lines[step]["policy/skipped_in_a_row"] for step in (1, 2, 3, 4)] == [2, 0, 2, 4]
    assert [state.skipped_in_a_row for state in stage.checkpoints.states] == [0, 2, 0, 2]
    assert ("save", str(SAVE_TO)) not in stage.journal.events


@pytest.mark.parametrize("staleness", [0, 1])  # asked for sample by sample, and of a whole batch
@pytest.mark.parametrize("wrong", [np.nan, -np.inf])
async def test_the_learners_own_logprobs_are_looked_at(policy_folder: Path, wrong: float, staleness: int) -> None:
    stage = Stage(policy_folder, loop={"max_staleness": staleness})

    async def logprobs(trajectories: Any) -> Any:
        return np.full(trajectories.size("sampled"), wrong, np.float32)

    stage.policy.logprobs = logprobs  # type: ignore[method-assign]
    with pytest.raises((ExceptionGroup, InvalidReply)) as caught:
        await stage.run()
    for error in leaves(caught.value):
        assert isinstance(error, InvalidReply)
        assert "the learner's own log-probs" in str(error)
    assert stage.policy.batches == []


async def test_those_that_an_update_computed_are_looked_at_too(policy_folder: Path) -> None:
    stage = Stage(
        policy_folder, algorithm={"minibatch_size": 2, "epochs": 1, "kl": {"placement": "loss", "estimator": "k2"}}
    )

    async def trained_logprobs() -> list[Any]:
        return [np.full(len(response), np.nan, np.float32) for response in stage.policy.batches[-1][0].responses]

    stage.policy.trained_logprobs = trained_logprobs  # type: ignore[method-assign]
    with pytest.raises(InvalidReply, match=r"the learner's own log-probs\[0\] is nan"):
        await stage.run()
    assert len(stage.policy.batches) == 1
    assert sorted(stage.log.lines) == [0]


async def test_a_lost_learner_ends_the_run_at_the_checkpoint(policy_folder: Path) -> None:
    stage = Stage(policy_folder)
    stage.checkpoints.failure = CriticReset("gone")
    with pytest.raises(CriticReset):
        await stage.run()
    assert sorted(stage.log.lines) == [0, 1]


async def test_a_failure_ends_the_run_and_keeps_what_was_logged(policy_folder: Path) -> None:
    stage = Stage(policy_folder)
    stage.policy.failure = Unavailable("the learner is gone")
    with pytest.raises(ExceptionGroup) as caught:
        await stage.run()
    assert [str(error) for error in caught.value.exceptions] == ["the learner is gone"]
    assert sorted(stage.log.lines) == [0]
    assert "save" not in stage.journal.names()
    assert stage.journal.names().count("push") == 1
    assert stage.progress.calls == [("start", 3, 0), "before training", "stop"]
