"""Settings that belong together, what a kind fills in, and the combinations that are refused."""

from typing import Any

import numpy as np
import pytest

from orchestrator.algorithms.contract import Algorithm, Group, Outcomes
from orchestrator.algorithms.registry import algorithms, parse
from quartet.config.base import ConfigError


@pytest.mark.parametrize(
    ("section", "problem"),
    [
        (
            {"ratio": "sequence"},
            "ratio sequence .* the advantages of baseline critic differ from token to token",
        ),
        ({"kind": "reinforce++", "ratio": "sequence"}, "ratio sequence .* the advantages of baseline batch differ"),
        ({"scale": "group"}, "scale group divides by the deviation of a prompt's rewards, and baseline critic"),
        ({"baseline": "none"}, "scale batch subtracts the mean over the batch, which is baseline batch"),
        ({"kind": "rloo", "gae_lambda": 0.5}, "gae_lambda belongs to baseline critic, and baseline is leave-one-out"),
        ({"kind": "rloo", "critic_epochs": 2}, "critic_epochs belongs to baseline critic"),
        ({"kind": "rloo", "critic_only_steps": 2}, "critic_only_steps belongs to baseline critic"),
        ({"kind": "grpo", "gamma": 0.9}, "gamma belongs to baseline critic or batch or none, and baseline is group"),
        ({"kind": "grpo", "clip": "none", "dual_clip": 3}, "dual_clip belongs to clip ppo, and clip is none"),
        ({"kind": "grpo", "clip_cap": 4}, "clip_cap belongs to clip cispo, and clip is ppo"),
        ({"kind": "cispo", "clip_eps_low": 0.1}, "clip_eps_low belongs to clip ppo, and clip is cispo"),
        ({"kind": "grpo", "max_discarded": 2}, "max_discarded belongs to zero_variance resample"),
        ({"kind": "grpo", "overlong_penalty": 2}, "overlong_penalty has no effect while overlong_buffer is 0"),
        ({"kind": "grpo", "kl": {"placement": "loss", "estimator": "k3"}}, "coef is 0 with kind grpo"),
        ({"clip": "dis", "importance_cap": 5}, "importance_cap has no effect with clip dis"),
        ({"score_weight": 0, "kl": {"coef": 0}}, "score_weight 0 leaves no reward"),
        (
            {"zero_variance": "leave-out"},
            "zero_variance leave-out compares the responses to one prompt, so samples_per_prompt must be 2",
        ),
        (
            {"kind": "grpo", "kl": {"coef": 0.04, "placement": "reward", "estimator": "k1"}},
            "scale group divides the KL penalty in the rewards",
        ),
        ({"kind": "sao", "gae_lambda": 0.9}, "gae_lambda has no effect beside gae_lambda_alpha"),
        ({"kind": "distil", "score_clip": 1}, "score_clip is for scores, which have no effect"),
        ({"kind": "distil", "rewards": {"right": {"clip": 1}}}, "rewards.right: clip and normalise are for scores"),
        (
            {"kind": "distil", "samples_per_prompt": 2, "rewards": {"right": {"normalise": "group"}}},
            "rewards.right: clip and normalise are for scores",
        ),
        ({"kl": {"coef": 0.1, "horizon": 500}}, "horizon has no effect while target is null"),
    ],
)
def test_what_would_have_no_effect_or_a_wrong_gradient_is_refused(section: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=f"^algorithm(\\.kl)?: {problem}"):
        parse(section)


def test_the_policy_waits_for_a_critic_only_where_there_is_one() -> None:
    assert [parse({"kind": "sao"}).trains_policy(step) for step in (1, 10, 11)] == [False, False, True]
    assert parse({"kind": "sao", "baseline": "leave-one-out", "samples_per_prompt": 4}).trains_policy(1)


def test_scores_by_name_that_are_only_measured_need_no_weight() -> None:
    measured = parse({"kind": "distil", "rewards": {"right": {"weight": 0}}})
    assert list(measured.misfits(["right"], "reward")) == []


@pytest.mark.parametrize("kind", algorithms())
def test_a_kind_only_fills_in_settings(kind: str) -> None:
    """Another kind with the same settings is the same algorithm, whatever its name."""
    section = parse({"kind": kind}).model_dump(mode="json")
    for other in algorithms():
        same = parse(section | {"kind": other})
        assert same.model_dump(exclude={"kind"}) == parse({"kind": kind}).model_dump(exclude={"kind"})
    assert {each.credit for each in algorithms().values()} == {Algorithm.credit}


def test_a_line_says_what_a_kind_fills_in_and_what_a_file_changes() -> None:
    line = parse({"kind": "dapo", "samples_per_prompt": 8, "kl": {"coef": 0.02}, "dual_clip": 3}).filled_in()
    assert line == (
        "kind dapo fills in samples_per_prompt 16, baseline group, scale group, clip_eps_high 0.28, zero_variance "
        "resample, kl.coef 0, kl.estimator k3, kl.placement loss; set otherwise: samples_per_prompt 8, dual_clip 3, "
        "kl.coef 0.02"
    )
    assert "otherwise" not in parse({"kind": "gspo"}).filled_in()


@pytest.mark.parametrize("kind", ["grpo", "dr-grpo", "dapo", "gspo", "cispo"])
def test_a_penalty_of_kinds_with_groups_is_in_the_loss(kind: str) -> None:
    """In the rewards `scale: group` would divide it by the deviation of the scores."""
    kl = parse({"kind": kind, "kl": {"coef": 0.04}}).kl
    assert (kl.coef, kl.placement, kl.estimator) == (0.04, "loss", "k3")
    assert parse({"kind": kind, "kl": {"estimator": "k1"}}).kl.estimator == "k1"  # measured, without a penalty


def test_an_algorithm_that_only_decides_on_groups_discards() -> None:
    class Picky(Algorithm):
        kind: str = "picky"

        def admit(self, group: Group) -> bool:
            return bool(group.scores["score"].max() > 0)

    assert Picky(samples_per_prompt=2).discard_limit == 9
    assert Picky(samples_per_prompt=2, max_discarded=3).discard_limit == 3
    assert Algorithm(kind="bare", baseline="batch").discard_limit == 0


def test_keys_of_the_penalty_that_are_not_given_are_the_kinds() -> None:
    kl = parse({"kind": "reinforce++-baseline", "kl": {"coef": 0.5}}).kl
    assert (kl.coef, kl.placement, kl.estimator) == (0.5, "loss", "k2")
    assert parse({"kind": "grpo", "kl": {}}) == parse({"kind": "grpo"})


GROUPS: Any = np.asarray([4, 0, 4, 0, 7, 4, 0], np.int64)
SCORES = np.asarray([1, 2, 1, 2.5, 9, 1, 2], np.float32)
TRUNCATED = np.asarray([1, 0, 0, 1, 0, 0, 0], bool)


def test_responses_of_groups_without_a_spread_and_cut_off_ones_are_left_out_if_asked_for() -> None:
    """Group 4 has thrice the same score, and group 7 a single one, in any order."""
    outcomes = Outcomes(GROUPS, {"score": SCORES}, TRUNCATED)
    assert outcomes.zero_variance(["score"]).tolist() == [True, False, True, False, True, True, False]
    settings: dict[str, Any] = {"kind": "grpo", "samples_per_prompt": 3}
    assert parse(settings).chosen(outcomes) is None
    chosen = {
        (zero, cut): parse(settings | {"zero_variance": zero, "truncated": cut}).chosen(outcomes)
        for zero in ("keep", "leave-out")
        for cut in ("keep", "mask")
    }
    assert chosen["keep", "keep"] is None
    expected = {
        ("leave-out", "keep"): [0, 1, 0, 1, 0, 0, 1],
        ("keep", "mask"): [0, 1, 1, 0, 1, 1, 1],
        ("leave-out", "mask"): [0, 1, 0, 0, 0, 0, 1],
    }
    for names, wanted in expected.items():
        actual = chosen[names]
        assert actual is not None
        assert actual.tolist() == [bool(one) for one in wanted]


def test_groups_without_a_spread_are_resampled_by_their_raw_scores() -> None:
    group = Group({"score": np.full(3, 0.7, np.float32)}, np.asarray([1, 2, 3], np.int64), np.zeros(3, bool))
    dapo = parse({"kind": "dapo", "samples_per_prompt": 3, "overlong_buffer": 4})
    assert not dapo.admit(group)
    assert dapo.discard_limit == 9
    assert parse({"kind": "grpo", "samples_per_prompt": 3}).admit(group)


def test_the_constant_of_a_reduction_is_the_longest_response() -> None:
    assert parse({"kind": "dr-grpo"}).sized(128).reduction == 128
    assert parse({"kind": "grpo"}).sized(128).reduction == "trajectories"
