"""Tokens of a batch that the critic does not train on, over its messages."""

from typing import Any

import numpy as np
import pytest

from protos import critic_pb2 as pb
from quartet.wire.codec import unpack_metrics
from quartet.wire.errors import FailedPrecondition
from tests import trajectories
from tests.unit.contexts import Context
from tests.unit.critic_calls import OURS, train, values
from tests.unit.naive import PROMPTS, RESPONSES, TOKENS

pytestmark = pytest.mark.processes


async def test_only_the_tokens_that_are_marked_are_trained_on(critic: Any) -> None:
    """Whole and staged alike: a repetition is the same batch. Those that are left out would be far off."""
    marks = np.arange(TOKENS) % 3 == 0
    before, numbers = await values(critic), np.where(marks, 1, 100).astype(np.float32)
    batch = trajectories.of(PROMPTS, RESPONSES, values=numbers, returns=numbers, trained=marks)
    schedule: dict[str, Any] = {"step": 1, "epochs": 1, "minibatch_size": 4, "seed": 0, "lease": OURS}
    request = pb.TrainRequest(batch=batch.pack(), **schedule)
    whole = unpack_metrics((await critic.Train(request, Context())).metrics)
    assert whole["mean"] == pytest.approx(float(before[marks].mean()), abs=1e-5)
    # By hand: clipped values are at 0.8, further from the return of 1 than the values are not.
    clipped = np.clip(before[marks], 0.8, 1.2)
    error = np.maximum((before[marks] - 1) ** 2, (clipped - 1) ** 2)
    assert whole["loss"] == pytest.approx(float(error.mean() / 2), abs=1e-5)
    for rows in (range(1), range(1, len(batch))):
        part = batch.take(rows).pack()
        await critic.Stage(pb.StageRequest(step=1, row=rows.start, batch=part, lease=OURS), Context())
    repeated = await critic.Train(pb.TrainRequest(staged=len(PROMPTS), **schedule), Context())
    assert unpack_metrics(repeated.metrics) == whole
    other = batch.with_sampled(trained=~marks).pack()
    with pytest.raises(FailedPrecondition, match="step: 1 was trained on another batch"):
        await critic.Train(pb.TrainRequest(batch=other, **schedule), Context())


async def test_a_step_without_a_token_to_train_on_is_taken_and_changes_nothing(critic: Any) -> None:
    before = await values(critic)
    ones = np.ones(TOKENS, np.float32)
    batch = trajectories.of(PROMPTS, RESPONSES, values=ones, returns=ones, trained=np.zeros(TOKENS, np.bool_))
    request = pb.TrainRequest(
        step=1,
        batch=batch.pack(),
        epochs=2,
        minibatch_size=2,
        last_step=0,
        lease=OURS,
    )
    metrics = unpack_metrics((await critic.Train(request, Context())).metrics)
    assert metrics == {"skipped_steps": 0, "skipped_in_a_row": 0, "empty_steps": 4}
    assert (await values(critic, min_step=1)).tolist() == before.tolist()
    assert (await train(critic, 2, 1))["skipped_steps"] == 0
