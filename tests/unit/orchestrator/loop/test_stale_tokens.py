"""Tokens that are too old to train on: advantages and measures by hand, and by loops over single tokens."""

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from orchestrator.algorithms.ppo import PPO
from orchestrator.algorithms.registry import parse as parse_algorithm
from orchestrator.loop.batch import Batch
from orchestrator.loop.estimate import Advantages, Distance, estimate_advantages, measure_distance
from services.rollout.sample import FinishReason, Sample
from tests.trajectories import cut
from tests.unit.algorithm_settings import plain
from tests.unit.experiences import Experience, collected
from tests.unit.fake_run import SECTION, Stage
from tests.unit.fakes import make_prompts, respond

OLDEST = 7
"""Oldest version that is trained on: version 8 with tokens at most one version behind."""


def experience(versions: list[int], score: float, logprobs: Any, ref: Any, values: Any) -> Experience:
    spans = tuple((version, at, at + 1) for at, version in enumerate(versions))
    logprobs, ref, values = (np.asarray(row, np.float32) for row in (logprobs, ref, values))
    sample = Sample(0, np.zeros(len(versions), np.int32), logprobs, FinishReason.STOP, spans)
    return Experience(0, make_prompts(1)[0], sample, score, ref, values)


class Rows(NamedTuple):
    """An estimate, response by response."""

    advantages: list[Any]
    returns: list[Any]
    metrics: dict[str, float]
    packed: Advantages


def made(
    experiences: list[Experience], old: list[Any], oldest: int | None = OLDEST, **algorithm: Any
) -> tuple[Batch, Rows, Distance]:
    settings = parse_algorithm(plain(algorithm, max_token_staleness=1))
    batch = Batch.of(collected(experiences, each=settings.samples_per_prompt), oldest)
    own = [np.asarray(row, np.float32) for row in old]
    estimate = estimate_advantages(batch, batch.padded(own), settings, 0.1, {}, step=1)
    rows = Rows(
        cut(estimate.advantages, own),
        [] if estimate.returns is None else cut(estimate.returns, own),
        estimate.metrics,
        estimate,
    )
    return batch, rows, measure_distance(batch, own, settings, 8)


OLD = [[-1.0, -1.0, -1.0, -1.0], [-1.0, -1.0], [-1.0]]
BATCH = [
    # k1 of OLD to the reference: 0.5, 0.3, 0.2, 0.1.
    experience([5, 7, 6, 8], 2.0, [-1, -1.1, -9, -1], [-1.5, -1.3, -1.2, -1.1], [0.5, 1.0, 0.7, 0.4]),
    experience([7, 5], -1.0, [-1, -9], [-1.5, -1.1], [0.25, 9.0]),  # k1: 0.5, 0.1
    experience([6], 3.0, [-9], [-1.4], [0.6]),
]


def rows(values: Any) -> list[Any]:
    return [row.tolist() for row in values]


def near(actual: list[Any], expected: list[list[float]]) -> None:
    for row, right in zip(rows(actual), expected, strict=True):
        assert row == pytest.approx(right, abs=1e-5)


def test_masked_tokens_are_stepped_over_and_what_they_earned_is_kept() -> None:
    batch, estimate, _ = made(BATCH, OLD, gae_lambda=0.5)
    assert batch.mask.tolist() == [[False, True, False, True], [True, False, False, False], [False] * 4]
    # Rewards -0.05, -0.03, -0.02, 2 - 0.01: the third is the second token's, whose next value is the fourth's.
    # 1.99 - 0.4 = 1.59; -0.05 + 0.4 - 1 + 1.59 / 2 = 0.145. The score of the second response is at its masked last
    # token, and so the first one's: -0.05 - 1.01 - 0.25 = -1.31.
    near(estimate.advantages, [[0.0, 0.145, 0.0, 1.59], [-1.31, 0.0], [0.0]])
    near(estimate.returns, [[0.0, 1.145, 0.0, 1.99], [-1.06, 0.0], [0.0]])
    # The mean of all that was earned, over three responses.
    assert estimate.metrics["reward/mean"] == pytest.approx((1.89 - 1.06 + 2.96) / 3)
    assert estimate.metrics["staleness/masked"] == pytest.approx(4 / 7)


def test_measures_are_of_the_tokens_that_are_trained_on() -> None:
    """Tokens that are not trained on differ by 8 nats."""
    _, estimate, distance = made(BATCH, OLD, gae_lambda=0.5)
    # KL 0.3, 0.1 and 0.5 at three of seven tokens, of three responses.
    assert distance.kl == pytest.approx(0.9 / 3 * 7 / 3)
    assert distance.metrics["mismatch/max_abs"] == pytest.approx(0.1, abs=1e-6)
    assert distance.metrics["mismatch/mean_abs"] == pytest.approx(0.1 / 3, abs=1e-6)
    k = np.exp([0.1, 0, 0])
    assert distance.metrics["off_policy/ess"] == pytest.approx(k.sum() ** 2 / (3 * (k**2).sum()))
    returns, advantages = np.asarray([1.145, 1.99, -1.06]), np.asarray([0.145, 1.59, -1.31])
    assert estimate.metrics["value/explained_variance"] == pytest.approx(1 - advantages.var() / returns.var())


def test_a_responses_ratio_is_that_of_all_its_tokens() -> None:
    """Without those that are not trained on it would be within the band."""
    batch, _, _ = made(BATCH, OLD)
    own = [np.asarray(row, np.float32) for row in OLD]
    settings = PPO(correction="geometric", importance_band=(0.5, 2.0))
    assert measure_distance(batch, own, settings, 9).metrics["off_policy/corrected"] == 1


@pytest.mark.parametrize(("version", "expected"), [(7, 0.1 / 3), (8, 0.0), (9, None)])
def test_the_mismatch_of_the_present_version_is_that_of_its_own_tokens(version: int, expected: float | None) -> None:
    """All three tokens that are trained on are of version 7 or later; of version 8 is only the last of the first
    response."""
    batch, _, _ = made(BATCH, OLD)
    distance = measure_distance(batch, [np.asarray(row, np.float32) for row in OLD], PPO(), version)
    actual = distance.metrics.get("mismatch/present_mean_abs")
    assert actual == (expected if expected is None else pytest.approx(expected, abs=1e-6))


def test_whitening_is_over_the_tokens_that_are_trained_on() -> None:
    _, estimate, _ = made(BATCH, OLD, gae_lambda=0.5, scale="batch")
    plain = np.asarray([0.145, 1.59, -1.31])
    wanted = (plain - plain.mean()) / plain.std(ddof=1)
    actual = [estimate.advantages[0][1], estimate.advantages[0][3], estimate.advantages[1][0]]
    assert actual == pytest.approx(wanted.tolist(), abs=1e-6)
    assert estimate.advantages[2].tolist() == [0]
    # A single token has no spread.
    _, single, _ = made([BATCH[1]], [OLD[1]], scale="batch")
    assert rows(single.advantages) == [[0, 0]]


def test_a_response_is_one_action_with_all_its_reward_in_leave_one_out() -> None:
    """A masked response is still a baseline of the others."""
    _, estimate, _ = made(BATCH[1:], OLD[1:], kind="rloo", samples_per_prompt=2)
    # Rewards -1.06 and 2.96.
    assert rows(estimate.advantages) == [[pytest.approx(-4.02, abs=1e-5), 0], [0]]


def test_a_batch_of_which_nothing_is_trained_on_gives_nothing() -> None:
    batch, estimate, distance = made(BATCH, OLD, oldest=9, scale="batch")
    assert (batch.too_old, distance) == (1.0, Distance(None, {}))
    assert {x for side in (estimate.advantages, estimate.returns) for row in side for x in row.tolist()} == {0.0}
    assert "value/explained_variance" not in estimate.metrics
    assert np.isfinite(list(estimate.metrics.values())).all()
    assert not batch.columns["trained"].any()


def test_where_no_token_is_masked_all_is_as_without() -> None:
    plain, given = (made(BATCH, OLD, oldest) for oldest in (None, 5))
    for (batch, estimate, distance), share in ((plain, None), (given, 0.0)):
        assert estimate.metrics.get("staleness/masked") == share
        assert "trained" not in batch.columns or batch.columns["trained"].all()
        assert distance == plain[2]
        assert rows(estimate.advantages) == rows(plain[1].advantages)
        assert rows(estimate.returns) == rows(plain[1].returns)


def test_the_length_of_a_response_is_that_of_its_trained_tokens() -> None:
    """Two tokens of the first response are trained on: alpha 1 gives 1/2, as in the test by hand."""
    _, estimate, _ = made(BATCH, OLD, gae_lambda_alpha=1.0, critic_gae_lambda=0.5)
    _, wanted, _ = made(BATCH, OLD, gae_lambda=0.5)
    near(estimate.advantages, rows(wanted.advantages))
    near(estimate.returns, rows(wanted.returns))


async def test_both_learners_are_told_which_tokens_to_leave_out(policy_folder: Path) -> None:
    """The first tokens come from the version that samples must at least come from, two behind from the third batch
    on; the last ones from the next version."""
    algorithm = {"minibatch_size": 1, "max_token_staleness": 1}
    stage = Stage(policy_folder, algorithm=algorithm, loop={"max_staleness": 2, "depth": 1})

    def mixed(index: int, prompt: Any, version: int) -> Sample:
        sample = respond(index, prompt, version)
        last = len(sample.response_ids) - 1
        spans = ((version, 0, last), (version + 1, last, last + 1)) if last else ((version, 0, 1),)
        return Sample(index, sample.response_ids, sample.logprobs, sample.finish_reason, spans)

    stage.fakes.rollout.respond = mixed
    await stage.run(policy_version=6)
    said = [stage.log.lines[step]["staleness/masked"] for step in (1, 2, 3)]
    assert said == [0.0, 0.0, pytest.approx(2 / 3)]
    # One token and two, of which the last is one version old.
    for batch, _ in stage.policy.batches[:2]:
        assert batch.trained is None
    marks = stage.policy.batches[2][0].trained
    assert marks is not None
    assert sorted(rows(marks)) == [[False], [False, True]]
    told = [trained["trained"] for trained in stage.fakes.critic.trained]
    assert [all(np.concatenate(given)) for given in told] == [True, True, False]
    assert rows(stage.fakes.critic.trained[2]["trained"]) == rows(marks)


async def test_a_step_whose_tokens_are_all_too_old_is_told_and_goes_on(policy_folder: Path) -> None:
    kl = {"coef": 0.2, "target": 3, "horizon": 4}
    loop = {"max_staleness": 2, "depth": 1}
    stage = Stage(policy_folder, algorithm={"minibatch_size": 1, "max_token_staleness": 1, "kl": kl}, loop=loop)
    notes: list[str] = []
    stage.progress.note = notes.append  # type: ignore[assignment, method-assign]
    await stage.run(policy_version=6)
    assert notes == [
        "step 3: nothing is trained on, as 100% of its tokens are older than algorithm.max_token_staleness"
    ]
    lines = [stage.log.lines[step] for step in (1, 2, 3)]
    assert [line["staleness/masked"] for line in lines] == [0.0, 0.0, 1.0]
    assert [line["samples/used_total"] for line in lines] == [2.0, 4.0, 6.0]
    assert [line["policy/version"] for line in lines] == [8, 9, 10]
    assert "mismatch/mean_abs" in lines[1]
    assert "mismatch/mean_abs" not in lines[2]
    # Nothing was measured that could have changed the coefficient of the next step.
    coefs = [state.kl_coef for state in stage.checkpoints.states]
    assert coefs[0] != coefs[1] != coefs[2] == coefs[3]
    assert SECTION["steps"] == stage.checkpoints.states[-1].step == 3
