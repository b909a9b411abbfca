"""The PPO loop with everything around it faked: what is called in what order, and with which numbers."""

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from orchestrator.experience.checks import StaleSample
from tests.unit.fake_run import Stage
from tests.unit.fakes import make_config
from tests.unit.step_metrics import STEP_METRICS, steady, untimed


def step_events(step: int, version: int) -> list[Any]:
    return [
        "generate",
        *["score", "logprobs", "values"] * 2,
        "old logprobs",  # of both, as they come together
        "train policy",
        ("train critic", step),
        ("push", version),
    ]


async def test_the_order_of_a_run(policy_folder: Path) -> None:
    stage = Stage(policy_folder)
    await stage.run()
    assert stage.journal.events == [
        ("push", 1),
        ("evaluate", 0, 1),
        ("log", 0),
        ("checkpoint", 0),
        *step_events(1, 2),
        ("log", 1),
        ("checkpoint", 1),
        *step_events(2, 3),
        ("evaluate", 2, 3),
        ("log", 2),
        ("checkpoint", 2),
        *step_events(3, 4),
        # The last step is evaluated though 3 is not a multiple of 2.
        ("evaluate", 3, 4),
        ("log", 3),
        ("checkpoint", 3, "last"),
        ("save", "saved"),
        "complete",
    ]
    assert stage.progress.calls == [("start", 3, 0), "before training", ("step", 1), ("step", 2), ("step", 3), "stop"]


ON_POLICY = {"minibatch_size": 2, "epochs": 1, "kl": {"placement": "loss", "estimator": "k2"}}


async def test_one_optimizer_step_on_policy_computes_the_old_logprobs(policy_folder: Path) -> None:
    spared, asked = (
        Stage(policy_folder, algorithm=ON_POLICY),
        Stage(policy_folder, algorithm=ON_POLICY | {"minibatch_size": 1}),
    )
    for stage in (spared, asked):
        await stage.run()
    names = spared.journal.names()
    assert names.count("trained logprobs") == 3
    assert "old logprobs" not in names
    assert names.index("train policy") < names.index("trained logprobs") < names.index("push", 1)
    assert asked.journal.names().count("old logprobs") == 3  # of two samples each, which come together
    assert "trained logprobs" not in asked.journal.names()
    for (batch, _), (other, _) in zip(spared.policy.batches, asked.policy.batches, strict=True):
        assert batch.old_logprobs is None
        assert [row.tolist() for row in batch.advantages] == [row.tolist() for row in other.advantages]
    for step in (1, 2, 3):
        of_one, of_two = spared.log.lines[step], asked.log.lines[step]
        assert of_one.keys() == of_two.keys()
        assert untimed(of_one) == untimed(of_two)


async def test_with_the_engines_logprobs_the_first_minibatch_measures_the_mismatch(policy_folder: Path) -> None:
    stage = Stage(policy_folder, algorithm={"minibatch_size": 1, "epochs": 2, "old_logprobs": "rollout"})
    stage.policy.known = 1
    await stage.run()
    assert stage.journal.names().count("trained logprobs") == 3
    assert "old logprobs" not in stage.journal.names()
    for step, (batch, _) in enumerate(stage.policy.batches, 1):
        assert batch.old_logprobs is None
        off = np.abs(np.asarray(batch.logprobs[0]) + 1.25).mean()
        assert stage.log.lines[step]["mismatch/mean_abs"] == pytest.approx(off, abs=1e-6)
        assert "kl/reference" in stage.log.lines[step]
        assert "off_policy/ess" not in stage.log.lines[step]


async def test_what_runs_ahead_or_shares_a_gpu_has_its_old_logprobs_by_the_batch(policy_folder: Path) -> None:
    for loop in ({"max_staleness": 1}, {"colocate": True}):
        stage = Stage(policy_folder, loop=loop)
        assert not stage.config.early_logprobs
        await stage.run()
        assert stage.journal.names().count("old logprobs") == 3
        for batch, _ in stage.policy.batches:
            assert batch.old_logprobs is not None
    assert not make_config(policy_folder, batch_size=2, algorithm=ON_POLICY).early_logprobs
    assert make_config(policy_folder, batch_size=3, algorithm=ON_POLICY).early_logprobs


async def test_a_run_goes_on_where_the_services_are(policy_folder: Path) -> None:
    stage = Stage(policy_folder)
    await stage.run(policy_version=6, critic_step=9)
    events = stage.journal.events
    assert [event[1] for event in events if event[0] == "push"] == [7, 8, 9, 10]
    assert [event[1] for event in events if event[0] == "train critic"] == [10, 11, 12]
    assert [event[1:] for event in events if event[0] == "evaluate"] == [(0, 7), (2, 9), (3, 10)]
    assert [call["versions"] for call in stage.fakes.rollout.calls] == [(7, None), (8, None), (9, None)]
    assert [call["min_step"] for call in stage.fakes.critic.calls] == [9, 9, 10, 10, 11, 11]
    assert [call["last_step"] for call in stage.fakes.critic.trained] == [9, 10, 11]
    assert [stage.log.lines[step]["policy/version"] for step in (1, 2, 3)] == [8, 9, 10]


@pytest.mark.parametrize(
    ("loop", "ages"),
    # At depth 1 the third batch is asked for when the loop waits for the second: 7 is being delivered, 6 is served.
    [({}, [0, 0, 0]), ({"max_staleness": 1}, [0, 1, 1]), ({"max_staleness": 2, "depth": 1}, [0, 1, 2])],
)
async def test_staleness_is_how_many_pushes_the_oldest_weights_lie_behind(
    policy_folder: Path, loop: dict[str, int], ages: list[int]
) -> None:
    stage = Stage(policy_folder, loop=loop)
    await stage.run(policy_version=6)
    assert [stage.log.lines[step]["policy/staleness"] for step in (1, 2, 3)] == ages
    assert [stage.log.lines[step]["staleness/mean"] for step in (1, 2, 3)] == ages
    assert [stage.log.lines[step][f"staleness/share_{age}"] for step, age in enumerate(ages, 1)] == [1.0] * 3


async def test_a_sample_beyond_the_bound_ends_the_run_before_it_is_trained_on(policy_folder: Path) -> None:
    stage = Stage(policy_folder, lag=2, loop={"max_staleness": 1})
    with pytest.raises(StaleSample, match=r"step 1, sample \d: sampled by version 5, 2 behind the policy's 7"):
        await stage.run(policy_version=6)
    assert stage.policy.batches == []


async def test_without_an_evaluator_nothing_is_evaluated(policy_folder: Path) -> None:
    stage = Stage(policy_folder, evaluates=False)
    await stage.run()
    assert "evaluate" not in stage.journal.names()
    assert sorted(stage.log.lines) == [1, 2, 3]


async def test_what_policy_and_critic_train_on(policy_folder: Path) -> None:
    kl = {"coef": 0.2, "estimator": "k1"}
    algorithm = {"minibatch_size": 1, "epochs": 3, "kl": kl, "scale": "none", "gae_lambda": 1}
    stage = Stage(policy_folder, algorithm=algorithm, timeouts={"train_s": 21})
    await stage.run()
    (batch, seed), critic = stage.policy.batches[0], stage.fakes.critic.trained[0]
    order = [int(prompt[0]) for prompt in batch.prompts]
    assert batch.ref_logprobs is not None
    assert batch.old_logprobs is not None
    assert sorted(order) == [10, 11]
    assert [response.tolist() for response in batch.responses] == [[token] * (token - 9) for token in order]
    for rows, value in ((batch.logprobs, -1), (batch.old_logprobs, -1.25), (batch.ref_logprobs, -1.5)):
        assert [row.tolist() for row in rows] == [[value] * (token - 9) for token in order]
    # The KL of the learner is -1.25 + 1.5 = 0.25 per token, so each costs 0.05. The score is 10 for both, being
    # clipped there. A return is what is left to earn: 9.95, and 9.9 before it.
    returns = {10: [9.95], 11: [9.9, 9.95]}
    assert [row.tolist() for row in critic["returns"]] == [pytest.approx(returns[token]) for token in order]
    assert [row.tolist() for row in critic["values"]] == [[0.5] * (token - 9) for token in order]
    advantages = [[value - 0.5 for value in returns[token]] for token in order]
    assert [row.tolist() for row in batch.advantages] == [pytest.approx(row) for row in advantages]
    assert (critic["epochs"], critic["minibatch_size"], critic["timeout_s"]) == (3, 1, 21)
    assert seed == critic["seed"] == 4 * 1_000_003 + 1
    assert [seed for _, seed in stage.policy.batches] == [4_000_013, 4_000_014, 4_000_015]
    assert [batch.kl_coef for batch, _ in stage.policy.batches] == [0.2] * 3


async def test_an_adaptive_coefficient_counts_from_the_next_step(policy_folder: Path) -> None:
    # KL per response: 0.25 per token over 1 and 2 tokens, 0.375 on average: 87.5 % below 3, clipped to -20 %.
    # Two samples at a horizon of 4: a factor of 1 - 0.2 * 2 / 4 = 0.9 per step.
    kl = {"coef": 0.2, "target": 3, "horizon": 4}
    stage = Stage(policy_folder, algorithm={"minibatch_size": 1, "kl": kl})
    await stage.run()
    expected = pytest.approx([0.2, 0.18, 0.162])
    assert [batch.kl_coef for batch, _ in stage.policy.batches] == expected
    assert [stage.log.lines[step]["kl/coef"] for step in (1, 2, 3)] == expected
    assert [stage.log.lines[step]["kl/reference"] for step in (1, 2, 3)] == pytest.approx([0.375] * 3)


async def test_a_resumed_run_begins_at_its_own_coefficient_unless_one_was_adapted(policy_folder: Path) -> None:
    """Each run goes on from the one before for a step; an adaptive one multiplies its coefficient by 0.9."""
    adaptive = {"target": 3, "horizon": 4}
    first = Stage(policy_folder, steps=1, algorithm={"minibatch_size": 1, "kl": {"coef": 0}})
    await first.run()
    state = first.checkpoints.states[-1]
    begun = ({"coef": 0.2} | adaptive, 0.2)
    others = [({"coef": 7} | adaptive, 0.18), ({"coef": 0.5}, 0.5), ({"coef": 0.6} | adaptive, 0.6)]
    for step, (kl, coef) in enumerate([begun, *others], start=2):
        stage = Stage(policy_folder, steps=step, algorithm={"minibatch_size": 1, "kl": kl})
        await stage.go_on(type(state).model_validate_json(state.model_dump_json()))
        assert stage.log.lines[step]["kl/coef"] == pytest.approx(coef)
        state = stage.checkpoints.states[-1]
        assert state.step == step


async def test_the_normaliser_remembers_the_scores_of_earlier_steps(policy_folder: Path) -> None:
    algorithm = {"minibatch_size": 1, "normalise_scores": True, "kl": {"coef": 0}}
    stage = Stage(policy_folder, algorithm=algorithm)
    await stage.run()
    # Scores 10 and 11 every step: mean 10.5, unbiased variance (0.5^2 * n) / (n - 1) for n = 2, 4, 6.
    for trained, n in zip(stage.fakes.critic.trained, (2, 4, 6), strict=True):
        last = sorted(float(row[-1]) for row in trained["returns"])
        normalised = 0.5 / (0.25 * n / (n - 1)) ** 0.5
        assert last == pytest.approx([-normalised, normalised], abs=1e-5)


async def test_what_is_measured(policy_folder: Path) -> None:
    stage = Stage(policy_folder)
    await stage.run()
    lines = stage.log.lines
    assert lines[0].keys() == {"eval/score", "seconds/evaluate"}
    assert steady(lines[1]) >= STEP_METRICS
    for step in (2, 3):
        assert steady(lines[step]) - steady(lines[1]) == {"eval/score", "seconds/evaluate"}
    first = lines[1]
    assert (first["policy/loss"], first["value/loss"], first["seconds/push"]) == (0.5, 0.25, 0.125)
    assert (first["score/mean"], first["response/length_mean"], lines[2]["eval/score"]) == (10.5, 1.5, 2.0)
    assert [first[f"samples/{part}"] for part in ("asked", "repeated", "used")] == [2, 0, 2]
    # Three tokens and two epochs.
    assert first["tokens_per_s/generation"] == pytest.approx(3 / (first["work/rollout"] * first["seconds/wall"]))
    assert first["tokens_per_s/training"] == pytest.approx(3 * 2 / first["seconds/train"])
    parts = sum(first[f"seconds/{part}"] for part in ("generate", "score", "logprobs", "train"))
    assert first["seconds/step"] >= parts
    assert lines[2]["seconds/step"] >= lines[2]["seconds/evaluate"] + lines[2]["seconds/publish"]


async def test_the_ledger_counts_what_was_asked_for_again(policy_folder: Path) -> None:
    stage = Stage(policy_folder, steps=1)
    stage.fakes.rollout.repeats = [3]
    await stage.run()
    assert [stage.log.lines[1][f"samples/{part}"] for part in ("asked", "repeated", "used")] == [5, 3, 2]


async def test_policy_and_critic_train_at_the_same_time(policy_folder: Path) -> None:
    stage = Stage(policy_folder, steps=1)
    stage.policy.meeting = stage.fakes.critic.meeting = asyncio.Barrier(2)
    async with asyncio.timeout(10):
        await stage.run()
    assert sorted(stage.log.lines) == [0, 1]
