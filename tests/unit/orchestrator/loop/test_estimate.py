"""Rewards, advantages and returns of a batch of two responses, by hand."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch

from orchestrator.algorithms.contract import Algorithm, KLConfig
from orchestrator.algorithms.ppo import PPO
from orchestrator.algorithms.registry import DEFAULT, algorithms
from orchestrator.algorithms.rewards import Normalisers, RunningNormaliser
from orchestrator.experience.experience import Collected
from orchestrator.loop.batch import Batch
from orchestrator.loop.estimate import estimate_advantages, measure_distance, old_logprobs_of
from quartet.columns import Columns
from services.rollout.sample import FinishReason, Sample
from tests.trajectories import cut
from tests.unit.algorithm_settings import plain
from tests.unit.experiences import Experience, collected
from tests.unit.fakes import make_prompts

OLD = [np.asarray([-1.0, -2.0], np.float32), np.asarray([-0.5], np.float32)]


def experience(row: int, logprobs: list[float], ref: list[float], values: list[float], score: float) -> Experience:
    reason = FinishReason.LENGTH if row else FinishReason.STOP
    count = len(logprobs)
    sample = Sample(0, np.zeros(count, np.int32), np.asarray(logprobs, np.float32), reason, ((1, 0, count),))
    return Experience(
        row, make_prompts(2)[row], sample, score, np.asarray(ref, np.float32), np.asarray(values, np.float32)
    )


BATCH = [
    # k1 of OLD to the reference: 0.5 and 0.3.
    experience(0, [-1.1, -2.0], [-1.5, -2.3], [0.5, 1.0], 2.0),
    # k1: 0.5.
    experience(1, [-0.5], [-1.0], [0.0], -1.0),
]


@dataclass
class Estimated:
    """Advantages and distance of a batch."""

    advantages: list[Any]
    returns: list[Any]
    normalisers: dict[str, RunningNormaliser]
    kl: float
    metrics: dict[str, float]


def estimated(
    experiences: list[Experience],
    settings: Algorithm,
    kl_coef: float = 0.1,
    normalisers: Normalisers | None = None,
) -> Estimated:
    batch = Batch.of(collected(experiences, each=settings.samples_per_prompt))
    made = estimate_advantages(batch, batch.padded(OLD), settings, kl_coef, normalisers or {}, step=1)
    distance = measure_distance(batch, OLD, settings, 0)
    assert distance.kl is not None
    metrics = made.metrics | distance.metrics
    returns = [] if made.returns is None else cut(made.returns, OLD)
    return Estimated(cut(made.advantages, OLD), returns, made.normalisers, distance.kl, metrics)


def estimate(kl_coef: float = 0.1, normalisers: Normalisers | None = None, **algorithm: Any) -> Estimated:
    kind = algorithms()[algorithm.get("kind", DEFAULT.kind)]
    settings = kind(**plain(algorithm, gae_lambda=0.5))
    return estimated(BATCH, settings, kl_coef, normalisers)


def rows(values: list[Any]) -> list[list[float]]:
    return [row.tolist() for row in values]


def check(actual: list[Any], expected: list[list[float]]) -> None:
    assert [row.dtype for row in actual] == [np.float32] * 2
    for row, wanted in zip(rows(actual), expected, strict=True):
        assert row == pytest.approx(wanted, abs=1e-6)


def test_kl_in_the_reward() -> None:
    # Rewards -0.05 and -0.03 + 2; -0.05 - 1. With lambda 1/2, from the back:
    # 1.97 - 1 = 0.97, then -0.05 + 1 - 0.5 + 0.97 / 2 = 0.935; -1.05 - 0.
    actual = estimate()
    check(actual.advantages, [[0.935, 0.97], [-1.05]])
    check(actual.returns, [[1.435, 1.97], [-1.05]])
    assert actual.kl == pytest.approx((0.8 + 0.5) / 2)


def test_advantages_and_returns_have_lambdas_of_their_own() -> None:
    # Rewards as above. At lambda 1 a return is what was earned: -0.05 + 1.97 = 1.92; 1.97; -1.05.
    actual = estimate(critic_gae_lambda=1.0)
    check(actual.advantages, [[0.935, 0.97], [-1.05]])
    check(actual.returns, [[1.92, 1.97], [-1.05]])
    # alpha 1: 1/2 for two tokens and 0 for one. At lambda 0 the first return is -0.05 + 1.
    actual = estimate(gae_lambda=0.0, gae_lambda_alpha=1.0)
    check(actual.advantages, [[0.935, 0.97], [-1.05]])
    check(actual.returns, [[0.95, 1.97], [-1.05]])
    actual = estimate(gae_lambda=0.95, gae_lambda_alpha=1.0, critic_gae_lambda=1.0)
    check(actual.advantages, [[0.935, 0.97], [-1.05]])
    check(actual.returns, [[1.92, 1.97], [-1.05]])
    # Where both are alike one pass would do.
    assert rows(estimate(critic_gae_lambda=0.5).returns) == rows(estimate().returns)


def test_kl_in_the_loss_leaves_the_rewards_alone() -> None:
    # Rewards 0 and 2; -1. Advantages 2 - 1 = 1, then 0 + 1 - 0.5 + 1 / 2 = 1; -1 - 0.
    actual = estimate(kl=KLConfig(placement="loss", estimator="k2"))
    check(actual.advantages, [[1.0, 1.0], [-1.0]])
    # k2: 0.5^2 / 2 + 0.3^2 / 2 = 0.17 and 0.5^2 / 2 = 0.125.
    assert actual.kl == pytest.approx((0.17 + 0.125) / 2)
    assert actual.metrics["kl/coef"] == 0.1


def test_the_old_logprobs_are_the_learners_if_they_are_known() -> None:
    unknown = collected(BATCH)
    assert old_logprobs_of(Batch.of(unknown), PPO()) is None
    known = Batch.of(unknown.with_sampled(old_logprobs=np.concatenate(OLD)))
    old = old_logprobs_of(known, PPO())
    assert old is not None
    check(cut(known.packed(old), OLD), rows(OLD))


def test_the_engines_logprobs_as_the_old_ones() -> None:
    """The penalty is of the engine's log-probs; the learner's are known of the second response alone."""
    settings = PPO(old_logprobs="rollout", gae_lambda=0.5, scale="none")
    batch = Batch.of(collected(BATCH))
    old = old_logprobs_of(batch, settings)
    assert old is not None
    made = estimate_advantages(batch, old, settings, 0.1, {}, step=1)
    # k1 0.4 and 0.3; 0.5. Rewards -0.04 and 1.97; -1.05. 1.97 - 1 = 0.97, then -0.04 + 1 - 0.5 + 0.97 / 2 = 0.945.
    check(cut(made.advantages, OLD), [[0.945, 0.97], [-1.05]])
    own = [np.zeros(0, np.float32), np.asarray([-0.3], np.float32)]
    distance = measure_distance(batch, own, settings, 0)
    assert distance.kl == pytest.approx((0.7 + 0.5) / 2)
    assert distance.metrics["mismatch/mean_abs"] == pytest.approx(0.2)
    assert not any(name.startswith("off_policy/") for name in distance.metrics)
    unknown = measure_distance(batch, [own[0]] * 2, settings, 0)
    assert (unknown.kl, unknown.metrics) == (distance.kl, {"kl/reference": distance.kl})
    # dis corrects by the learner's own: one token, whose ratio is exp(-0.3 + 0.5) or its inverse.
    dis = settings.model_copy(update={"clip": "dis"})
    corrected = measure_distance(batch, own, dis, 0).metrics
    assert corrected["off_policy/ess"] == pytest.approx(1)
    assert corrected["off_policy/ratio_p50"] == pytest.approx(np.exp(0.2))
    assert corrected["off_policy/corrected"] == 0


def test_advantages_without_a_penalty_in_the_reward_need_no_logprobs() -> None:
    settings = PPO(kl=KLConfig(placement="loss", estimator="k2"))
    batch = Batch.of(collected(BATCH))
    without = estimate_advantages(batch, None, settings, 0.1, {}, step=1)
    actual = estimated(BATCH, settings)
    assert rows(cut(without.advantages, OLD)) == rows(actual.advantages)
    assert rows(cut(without.returns, OLD)) == rows(actual.returns)
    assert without.metrics.items() <= actual.metrics.items()


def test_leave_one_out_takes_the_other_response_as_the_baseline() -> None:
    # Rewards 1.92 and -1.05 as above: each less the other, at every token. No critic, no returns.
    actual = estimate(kind="rloo", samples_per_prompt=2)
    check(actual.advantages, [[2.97, 2.97], [-2.97]])
    assert actual.returns == []
    groups = {"group/zero_variance", "group/spread"}
    assert actual.metrics.keys() == (estimate().metrics.keys() | groups) - {"value/explained_variance"}
    # Scores 2 and -1.
    assert actual.metrics["group/zero_variance"] == 0
    assert actual.metrics["group/spread"] == pytest.approx(4.5**0.5)
    assert actual.kl == pytest.approx((0.8 + 0.5) / 2)


def test_reinforce_with_the_batch_as_the_baseline() -> None:
    # To go: -0.05 + 1.97 = 1.92, 1.97; -1.05. Their mean is 2.84 / 3, their unbiased variance as below.
    actual = estimate(kind="reinforce++")
    to_go = np.asarray([1.92, 1.97, -1.05])
    scaled = ((to_go - to_go.mean()) / to_go.std(ddof=1)).tolist()
    check(actual.advantages, [scaled[:2], scaled[2:]])
    assert actual.returns == []


def test_whitened_advantages_and_returns_that_are_not() -> None:
    # Mean 0.285, unbiased variance (0.65^2 + 0.685^2 + 1.335^2) / 2 = 1.336975.
    actual = estimate(scale="batch")
    scale = 1.336975**-0.5
    check(actual.advantages, [[0.65 * scale, 0.685 * scale], [-1.335 * scale]])
    check(actual.returns, [[1.435, 1.97], [-1.05]])


def test_normalised_and_clipped_scores() -> None:
    # Mean 0.5, unbiased standard deviation sqrt(4.5): 2 becomes 1.5 / 2.1213 = 0.7071, and -1 its negative.
    actual = estimate(kl_coef=0, normalise_scores=True)
    check(actual.returns, [[0.7071068 - 0.5 * (0.7071068 - 1), 0.7071068], [-0.7071068]])
    assert (actual.normalisers["score"].count, actual.normalisers["score"].mean) == (2, 0.5)
    assert actual.metrics["score/mean"] == 0.5
    actual = estimate(kl_coef=0, normalise_scores=True, score_clip=0.5)
    assert rows(actual.returns)[0][-1] == pytest.approx(0.5)
    assert rows(actual.returns)[1] == pytest.approx([-0.5])
    # Scores seen before count too: 0, 0, 2 and -1 have mean 0.25 and unbiased variance 4.75 / 3.
    seen = RunningNormaliser().update(torch.zeros(2))
    actual = estimate(kl_coef=0, normalise_scores=True, normalisers={"score": seen})
    assert rows(actual.returns)[1] == pytest.approx([-1.25 / (4.75 / 3) ** 0.5])
    assert seen.count == 2


def with_turns(first: list[float], **algorithm: Any) -> Estimated:
    """BATCH, where turns of the first response had these rewards, which its score of 2 holds."""
    settings = PPO(**plain(algorithm, gae_lambda=0.5))
    experience = collected(BATCH).with_sampled(turn_rewards=np.asarray([*first, 0.0], np.float32))
    batch = Batch.of(experience)
    made = estimate_advantages(batch, batch.padded(OLD), settings, 0.0, {}, step=1)
    assert made.returns is not None
    return Estimated(cut(made.advantages, OLD), cut(made.returns, OLD), made.normalisers, 0.0, made.metrics)


def test_a_turns_reward_is_earned_at_its_own_last_token() -> None:
    # Rewards 0.5 and 1.5, values 0.5 and 1. With lambda 1/2: 1.5 - 1 = 0.5, then 0.5 + 1 - 0.5 + 0.5 / 2 = 1.25.
    actual = with_turns([0.5, 0.0])
    check(actual.advantages, [[1.25, 0.5], [-1.0]])
    check(actual.returns, [[1.75, 1.5], [-1.0]])
    assert actual.metrics["reward/mean"] == pytest.approx(0.5)
    # At the last token of all it is where the score is.
    check(with_turns([0.0, 0.5]).advantages, rows(with_turns([0.0, 0.0]).advantages))


def test_a_turns_reward_is_normalised_and_weighed_as_the_score_is() -> None:
    # The unbiased deviation of 2 and -1 is sqrt(4.5): the score 0.7071 and the turn's 0.2357, each times 2.
    actual = with_turns([0.5, 0.0], normalise_scores=True, score_weight=2.0, gamma=1.0, critic_gae_lambda=1.0)
    turn, score = 2 * 0.5 / 4.5**0.5, 2 * 1.5 / 4.5**0.5
    check(actual.returns, [[score, score - turn], [-score]])
    # A clip bounds the score, of which the last token has what the turn leaves.
    clipped = with_turns([0.5, 0.0], score_clip=1.0, gamma=1.0, critic_gae_lambda=1.0)
    check(clipped.returns, [[1.0, 0.5], [-1.0]])


def test_a_process_reward_is_earned_as_a_turns_reward_is_and_beside_it() -> None:
    experience = collected(BATCH)

    def made(**columns: list[float]) -> list[list[float]]:
        given = {name: np.asarray([*first, 0.0], np.float32) for name, first in columns.items()}
        batch = Batch.of(experience.with_sampled(**given))
        settings = PPO(**plain({}, gae_lambda=0.5))
        return cut(estimate_advantages(batch, batch.padded(OLD), settings, 0.0, {}, step=1).advantages, OLD)

    check(made(process_rewards=[0.5, 0.0]), [[1.25, 0.5], [-1.0]])
    check(made(process_rewards=[0.25, 0.0], turn_rewards=[0.25, 0.0]), [[1.25, 0.5], [-1.0]])


def test_equal_scores_are_equal_whatever_parts_of_them_turns_earned() -> None:
    """A float32 sum of the parts may be a rounding away from the score, which a small deviation would make large."""
    parts = np.asarray([*[0.1] * 4, 0.0, *[0.0] * 5], np.float32)
    same = [experience(0, [0.0] * 5, [0.0] * 5, [0.0] * 5, 5.3)] * 2
    batch = Batch.of(collected(same, each=2).with_sampled(turn_rewards=parts))
    grpo = algorithms()["grpo"](kind="grpo", samples_per_prompt=2)
    made = estimate_advantages(batch, None, grpo, 0.0, {}, step=1)
    assert made.advantages.tolist() == [0.0] * 10
    assert made.metrics["reward/mean"] == pytest.approx(5.3)


def test_scores_are_not_normalised_unasked() -> None:
    seen = RunningNormaliser().update(torch.zeros(2))
    assert estimate(normalisers={"score": seen}).normalisers == {"score": seen}
    assert estimate().normalisers == {}


def test_metrics_by_hand() -> None:
    metrics = estimate().metrics
    # Returns 1.435, 1.97, -1.05: squares about 0.785 add up to 5.193950; less the values 0.5, 1, 0 they are the
    # advantages, whose squares about 0.285 add up to 2.673950.
    expected = {
        "score/mean": 0.5,
        "score/std": 1.5,
        "reward/mean": (-0.05 + 1.97 - 1.05) / 2,
        "kl/reference": 0.65,
        "kl/coef": 0.1,
        "value/explained_variance": 1 - 2.673950 / 5.193950,
        "response/length_mean": 1.5,
        "response/length_max": 2,
        "response/truncated": 0.5,
        "mismatch/mean_abs": 0.1 / 3,
        "mismatch/present_mean_abs": 0.1 / 3,
        "mismatch/max_abs": 0.1,
        # k3 of the one token that differs: log r = old - sampled = 0.1.
        "mismatch/kl": (np.exp(0.1) - 1 - 0.1) / 3,
        "mismatch/capped": 0,
        # Ratios 1, 1 and exp(0.1).
        "off_policy/ess": (2 + np.exp(0.1)) ** 2 / (3 * (2 + np.exp(0.2))),
        "off_policy/ratio_p01": 1,
        "off_policy/ratio_p50": 1,
        "off_policy/ratio_p99": 1 + 0.98 * (np.exp(0.1) - 1),
        "off_policy/corrected": 0,
    }
    assert metrics.keys() == expected.keys()
    assert metrics == pytest.approx(expected, abs=1e-6)


def several_sequences() -> Batch:
    """One of two sequences, each of two sampled tokens, and one of a single sequence."""
    sampled = np.asarray([0, 1, 1, 0, 1, 1, 0, 1], np.bool_)
    begins = np.arange(8) == 3
    columns = Columns.of(np.arange(8, dtype=np.int32), np.asarray([6, 2], np.int32), sampled, begins)
    engine = np.zeros(5, np.float32)
    columns = columns.with_sampled(logprobs=engine, ref_logprobs=engine, versions=np.zeros(5, np.int64))
    return Batch.of(Collected(columns, make_prompts(2), 0.0, 0.0))


@pytest.mark.parametrize(
    "algorithm",
    [
        {"correction": "geometric"},
        {"correction": "icepop", "ratio": "sequence"},
        {"clip": "dis", "ratio": "sequence"},
    ],
)
def test_the_correction_is_measured_sequence_by_sequence_as_it_is_trained(algorithm: dict[str, Any]) -> None:
    """Ratios of e^2 and e^-2 of the two, which are 1 together."""
    batch = several_sequences()
    assert batch.sequences is not None
    assert batch.sequences.tolist() == [[0, 0, 1, 1], [0, 0, 0, 0]]
    own = [np.asarray([1.5, 2.5, -1.5, -2.5], np.float32), np.zeros(1, np.float32)]
    settings = algorithms()["grpo"](kind="grpo", samples_per_prompt=2, **algorithm)
    assert measure_distance(batch, own, settings, 0).metrics["off_policy/corrected"] == pytest.approx(4 / 5)
    assert Batch.of(collected(BATCH)).sequences is None


def test_a_responses_measured_ratio_is_that_of_its_own_tokens_alone() -> None:
    """e^0.02, outside the band of 1 %, of the single token of the second response, beside four of ratio 1."""
    settings = algorithms()["grpo"](kind="grpo", samples_per_prompt=2, correction="geometric")
    second = np.asarray([0.02], np.float32)
    for first, share in ((np.zeros(4, np.float32), 1 / 5), (np.empty(0, np.float32), 1)):  # [0]: not known
        metrics = measure_distance(several_sequences(), [first, second], settings, 0).metrics
        assert metrics["off_policy/corrected"] == pytest.approx(share)
        assert metrics["mismatch/mean_abs"] == pytest.approx(0.02 * share)


def test_columns_are_made_of_rows_and_rows_of_columns() -> None:
    batch = Batch.of(collected(BATCH))
    assert [prompt.tolist() for prompt in batch.columns.prompts] == [[10], [11]]
    assert [response.tolist() for response in batch.columns.responses] == [[0, 0], [0]]
    assert batch.mask.tolist() == [[True, True], [True, False]]
    assert batch.values.tolist() == [[0.5, 1.0], [0.0, 0.0]]
    assert (batch.scores.tolist(), batch.truncated, len(batch)) == ([2.0, -1.0], 0.5, 2)
    assert batch.packed(batch.padded(OLD)).tolist() == np.concatenate(OLD).tolist()


@pytest.mark.parametrize("leaving_out", [{"truncated": "mask"}, {"zero_variance": "leave-out"}])
def test_responses_that_are_left_out_are_counted_and_named(leaving_out: dict[str, Any]) -> None:
    """The second of two, of one token; the three tokens are of version 1."""
    settings = algorithms()["grpo"](kind="grpo", samples_per_prompt=2, **leaving_out)
    first, none = [[True, True], [False, False]], [[False, False]] * 2
    for oldest, mask, old in ((None, first, False), (1, first, False), (2, none, True)):
        batch = Batch.of(collected(BATCH, each=2), oldest, np.asarray([True, False]))
        assert batch.mask.tolist() == mask
        assert estimate_advantages(batch, None, settings, 0.0, {}, step=1).metrics["samples/left_out"] == 1
        assert "1 of its 2 responses" in batch.reasons
        assert ("100% of its tokens" in batch.reasons, "% of its tokens" in batch.reasons) == (old, old)
    every = Batch.of(collected(BATCH, each=2))
    assert (every.left_out, every.too_old, every.mask.tolist()) == (0, 0, [[True, True], [True, False]])


def test_each_task_has_its_own_scores_lengths_and_groups() -> None:
    """Two prompts with two responses each: of the task `a`, with scores 2 and -1, and of none."""
    made = collected([*BATCH, replace(BATCH[1], number=2), replace(BATCH[1], number=3)], each=2)
    tasks = [replace(prompt, task="a" if index < 2 else "") for index, prompt in enumerate(made.prompts)]
    grpo = algorithms()["grpo"](kind="grpo", samples_per_prompt=2)
    for groups, settings in (({"group/zero_variance": 0, "group/spread": 4.5**0.5}, grpo), ({}, PPO(scale="none"))):
        batch = Batch.of(replace(made, prompts=tasks))
        metrics = estimate_advantages(batch, None, settings, 0.0, {}, step=1).metrics
        ours = {name.removeprefix("task/a/"): metrics[name] for name in metrics if name.startswith("task/")}
        assert ours == groups | {
            "score/mean": 0.5,
            "samples": 2,
            "response/length_mean": 1.5,
            "response/truncated": 0.5,
        }
