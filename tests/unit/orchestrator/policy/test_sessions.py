"""Sessions of agents as training data: the learner's step on them against rows and gradients by hand."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from orchestrator.algorithms.reinforce_pp import ReinforcePP
from orchestrator.experience.experience import Collected
from orchestrator.loop.batch import Batch
from orchestrator.loop.estimate import estimate_advantages
from quartet.columns import Columns
from quartet.trajectory import Segment
from services.rollout.session_trajectory import as_json, columns_of_session
from services.rollout.sessions import Sessions
from tests.plain import language_model
from tests.unit.policy_batches import TEMPERATURE, make_trainer, weights

GIVEN, TOOL = (1, 5, 6), (2, 7, 3)
ROWS = [
    # ids, those of them that were sampled, reward
    ([*GIVEN, 12, 13, *TOOL, 15, 16, 2], [3, 4, 8, 9, 10], 0.5),
    ([*GIVEN, 14, *TOOL, 17], [7], 0.5),  # a changed history, all of which is given
    ([*GIVEN, 18, 2], [3, 4], -1.0),
]
"""Sequences of the sessions below, by hand."""
LOGPROBS = [np.linspace(-4.5, -3, len(sampled)).astype(np.float32) for _, sampled, _ in ROWS]


def finished() -> list[Any]:
    """Answers of `/rl/trajectory` for two sessions: of several turns with a tool's tokens between them, one of which
    is answered twice, and one of which is changed later; and of a single turn."""
    sessions = Sessions()
    for name in ("s1", "s2"):
        sessions.start("me", name, "t")

    def record(name: str, interaction: str, prompt: Any, *response: int, logprobs: Any) -> None:
        segment = Segment(np.asarray(response, np.int32), np.asarray(logprobs, np.float32), ((1, 0, len(response)),))
        sessions.record("me", name, interaction, np.asarray(prompt, np.int32), segment, b"")

    record("s1", "c1", GIVEN, 12, 13, logprobs=LOGPROBS[0][:2])
    record("s1", "lost", [*GIVEN, 12, 13, *TOOL], 19, 20, logprobs=[-9.0, -9.0])
    record("s1", "c2", [*GIVEN, 12, 13, *TOOL], 15, 16, 2, logprobs=LOGPROBS[0][2:])
    record("s1", "c3", [*GIVEN, 14, *TOOL], 17, logprobs=LOGPROBS[1])
    record("s2", "c4", GIVEN, 18, 2, logprobs=LOGPROBS[2])
    sessions.set_reward("me", "s1", 0.5, "")
    sessions.set_reward("me", "s2", -1.0, "c4")
    for name in ("s1", "s2"):
        sessions.end("me", name)
    return [json.loads(as_json(sessions.trajectory("me", name))) for name in ("s1", "s2")]


def batch_of(columns: Columns) -> Columns:
    """With the advantages of the run's own estimator."""
    size = len(columns)
    rest = {"truncated": np.zeros(size, np.bool_), "kept": np.zeros(size, np.int32)}
    batch = Batch.of(Collected(columns.with_rows(**rest), [], 0.0, 0.0))
    algorithm = ReinforcePP(old_logprobs="rollout", normalise_scores=False, score_clip=None)
    made = estimate_advantages(batch, batch.logprobs, algorithm, 0.0, {}, step=1)
    return columns.select("logprobs").with_sampled(advantages=made.advantages)


def test_a_step_on_sessions_is_that_on_their_tokens_masks_logprobs_and_rewards(policy_folder: Path) -> None:
    first, second = finished()
    assert [turn["superseded"] for turn in first["interactions"]] == [False, True, False, False]
    told = Columns.concatenate([columns_of_session(first, 0, 0, 0), columns_of_session(second, 2, 2, 1)])
    assert told["score"].tolist() == [reward for *_, reward in ROWS]
    assert [ids.tolist() for ids in np.split(told.ids, told.lengths.cumsum()[:-1])] == [ids for ids, *_ in ROWS]
    batch = batch_of(told)
    # Rewards to go without discount or KL are a row's reward at each of its tokens, whitened over all tokens.
    every = torch.cat([torch.full((len(sampled),), reward) for _, sampled, reward in ROWS]).double()
    advantages = ((every - every.mean()) / every.std()).split([len(sampled) for _, sampled, _ in ROWS])
    model = language_model(policy_folder)
    loss = torch.zeros(())
    for (ids, sampled, _), old, credit in zip(ROWS, LOGPROBS, advantages, strict=True):
        logits = model(torch.tensor([ids])).logits[0] / TEMPERATURE
        new = logits.log_softmax(-1)[[place - 1 for place in sampled], [ids[place] for place in sampled]]
        ratio = (new - torch.from_numpy(old)).exp()
        loss = loss - torch.minimum(ratio * credit, ratio.clamp(0.8, 1.2) * credit).sum() / len(every)
    wanted = torch.cat([gradient.view(-1) for gradient in torch.autograd.grad(loss, list(model.parameters()))])
    trainer = make_trainer(policy_folder, old_logprobs="rollout")
    before = weights(trainer)
    metrics = trainer.train(batch, 0.0, 0)
    assert metrics["loss"] == pytest.approx(float(loss.detach()), abs=1e-6)
    assert metrics["grad_norm"] == pytest.approx(float(wanted.norm()), rel=1e-4)
    torch.testing.assert_close(before - weights(trainer), wanted.float(), atol=1e-6, rtol=1e-4)
