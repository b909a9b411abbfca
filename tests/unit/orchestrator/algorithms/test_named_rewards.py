"""Several named scores of a response as one: by hand, against other implementations, and by their laws."""

import math
import random
import statistics
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from orchestrator.algorithms.contract import Algorithm, Group, Outcomes
from orchestrator.algorithms.named import NamedRewardConfig
from orchestrator.algorithms.registry import parse, presets
from orchestrator.algorithms.rewards import RunningNormaliser, combined
from orchestrator.loop.batch import Batch
from orchestrator.loop.estimate import Advantages, estimate_advantages
from quartet.config.base import ConfigError
from services.rollout.sample import FinishReason, Sample
from tests.unit.experiences import Experience, collected
from tests.unit.fakes import make_prompts
from tests.unit.reference_ppo import close, doubles

GROUPS = torch.tensor([0, 0, 4, 4])
RIGHT, LENGTH = torch.tensor([1.0, 0.0, 1.0, 1.0]), torch.tensor([10.0, 30.0, 20.0, 60.0])


def rewards(**named: Any) -> dict[str, NamedRewardConfig]:
    return {name: NamedRewardConfig(**settings) for name, settings in named.items()}


def weighed(step: int = 1, normalisers: Any = None, **named: Any) -> tuple[Tensor, dict[str, RunningNormaliser]]:
    scores = {"right": RIGHT, "length": LENGTH}
    return combined(scores, GROUPS, rewards(**named), step, normalisers or {})


def test_the_weighted_sum_by_hand() -> None:
    made, normalisers = weighed(right={"weight": 2.0}, length={"weight": -0.1})
    close(made, torch.tensor([1.0, -3.0, 0.0, -4.0]), 1e-6)
    assert (made.dtype, normalisers) == (torch.float32, {})
    # 10 30 20 60 clipped to 25 and counted a tenth.
    made, _ = weighed(right={}, length={"weight": 0.1, "clip": 25.0})
    close(made, torch.tensor([2.0, 2.5, 3.0, 3.5]), 1e-6)
    made, _ = weighed(right={"weight": 0.0}, length={})
    assert made.tolist() == LENGTH.tolist()


def test_scores_normalised_by_their_groups_by_hand() -> None:
    # Two numbers a and b have the mean (a + b) / 2 and the unbiased deviation |a - b| / sqrt 2: 0.7071 and its
    # negative. The second group is equal in `right`, which is 0 there.
    half = 2**-0.5
    made, _ = weighed(right={"normalise": "group"}, length={"normalise": "group", "weight": -3.0})
    close(made, torch.tensor([4 * half, -4 * half, 3 * half, -3 * half]), 1e-4)
    made, _ = weighed(right={"normalise": "group", "clip": 0.5, "weight": 2.0}, length={"weight": 0.0})
    close(made, torch.tensor([1.0, -1.0, 0.0, 0.0]), 1e-6)


def test_scores_normalised_by_all_so_far_by_hand() -> None:
    # Lengths have the mean 30 and the squares 400 + 0 + 100 + 900, over 3: a deviation of 21.6025.
    settings: dict[str, Any] = {"right": {}, "length": {"normalise": "running"}}
    made, after = weighed(**settings)
    close(made, RIGHT.double() + torch.tensor([-20.0, 0.0, -10.0, 30.0]) / 21.6024690, 1e-6)
    assert after.keys() == {"length"}
    assert (after["length"].count, after["length"].mean) == (4, 30.0)
    # Those seen before count too, of the same name alone.
    seen = {"length": RunningNormaliser().update(torch.full((4,), 30.0)), "other": RunningNormaliser(1, 2.0, 0.0)}
    made, after = weighed(normalisers=seen, **settings)
    close(made, RIGHT.double() + torch.tensor([-20.0, 0.0, -10.0, 30.0]) / math.sqrt(1400 / 7), 1e-6)
    assert (after["length"].count, after["other"], seen["length"].count) == (8, seen["other"], 4)


def plain_combination(
    columns: dict[str, list[float]], groups: list[int], weights: dict[str, float], eps: float
) -> list[float]:
    """The sum that TRL 1.10 makes with `multi_objective_aggregation="normalize_then_sum"`, before it scales it: by
    the standard library, with its epsilon as an argument (1e-4 there, 1e-6 here)."""
    total = [0.0] * len(groups)
    for name, column in columns.items():
        for group in set(groups):
            members = [place for place, own in enumerate(groups) if own == group]
            own = [column[place] for place in members]
            deviation = statistics.stdev(own) if len(own) > 1 else 0.0
            for place in members:
                total[place] += weights[name] * (column[place] - statistics.fmean(own)) / (deviation + eps)
    return total


@pytest.mark.parametrize("seed", range(5))
def test_group_normalisation_is_that_of_an_independent_implementation(seed: int) -> None:
    """Groups are unequal and in any order, and names are a million apart in scale."""
    draw = random.Random(seed)
    groups = [draw.randrange(5) for _ in range(24)]
    scales = {"tiny": 1e-3, "plain": 1.0, "huge": 1e3}
    columns = {name: [float(np.float32(draw.gauss(0, scale))) for _ in groups] for name, scale in scales.items()}
    weights = {name: draw.uniform(-2, 2) for name in scales}
    settings = rewards(**{name: {"weight": weights[name], "normalise": "group"} for name in scales})
    made, _ = combined(
        {name: torch.tensor(each) for name, each in columns.items()}, torch.tensor(groups), settings, 1, {}
    )
    alone = {group for group in groups if groups.count(group) == 1}
    expected = plain_combination(columns, groups, weights, eps=1e-6)
    close(made, doubles(expected), 1e-5)
    assert all(value == 0 for group, value in zip(groups, made.tolist(), strict=True) if group in alone)


@pytest.mark.parametrize("seed", range(5))
def test_running_normalisation_is_that_of_everything_seen(seed: int) -> None:
    draw = random.Random(seed)
    settings = rewards(a={"normalise": "running"}, b={"normalise": "running", "weight": -0.5})
    seen: dict[str, list[float]] = {"a": [], "b": []}
    normalisers: dict[str, RunningNormaliser] = {}
    for _ in range(4):
        count = draw.randint(1, 6)
        drawn = {name: torch.tensor([draw.gauss(3, 2) for _ in range(count)]) for name in seen}
        made, normalisers = combined(drawn, torch.arange(count), settings, 1, normalisers)
        terms = {}
        for name in seen:
            seen[name] += drawn[name].tolist()
            if len(seen[name]) > 1:
                centre, spread = statistics.fmean(seen[name]), statistics.stdev(seen[name])
            else:
                centre, spread = 0.0, 1.0
            terms[name] = [(value - centre) / spread for value in drawn[name].tolist()]
        close(made, doubles([a - 0.5 * b for a, b in zip(terms["a"], terms["b"], strict=True)]), 1e-5)


def test_the_order_of_responses_and_other_groups_change_nothing() -> None:
    settings = rewards(right={"normalise": "group"}, length={"normalise": "group", "weight": -0.3, "clip": 1.0})
    scores = {"right": RIGHT, "length": LENGTH}
    straight, _ = combined(scores, GROUPS, settings, 1, {})
    order = torch.tensor([3, 0, 2, 1])
    mixed, _ = combined({name: each[order] for name, each in scores.items()}, GROUPS[order], settings, 1, {})
    assert mixed.tolist() == straight[order].tolist()
    alone, _ = combined({name: each[:2] for name, each in scores.items()}, GROUPS[:2], settings, 1, {})
    assert alone.tolist() == straight[:2].tolist()


def test_weights_follow_the_steps() -> None:
    changing = NamedRewardConfig(weight=((1, 0.0), (5, 1.0), (6, -2.0)))
    assert [changing.weight_at(step) for step in (1, 2, 3, 5, 6, 100)] == [0.0, 0.25, 0.5, 1.0, -2.0, -2.0]
    assert NamedRewardConfig(weight=((10, 0.5), (20, 1.0))).weight_at(1) == 0.5
    assert NamedRewardConfig(weight=0.3).weight_at(7) == 0.3
    algorithm = parse(
        {"kind": "rloo", "samples_per_prompt": 2, "rewards": {"a": {"weight": [[1, 0], [3, 1]]}, "b": {}}}
    )
    columns = {name: np.asarray([1.0, 2.0], np.float32) for name in "ab"}
    assert [algorithm.score(columns, step).tolist() for step in (1, 2, 3)] == [[1, 2], [1.5, 3], [2, 4]]
    huge = {name: np.full(1, 3e38, np.float32) for name in "ab"}
    with pytest.raises(
        ConfigError, match=r"algorithm\.rewards: a sum of the weighted scores is too large for float32"
    ):
        algorithm.score(huge, 3)
    # Two infinities that cancel each other are not a missing score.
    extreme = parse(
        {"kind": "rloo", "samples_per_prompt": 2, "rewards": {"a": {"weight": 1e300}, "b": {"weight": -1e300}}}
    )
    with pytest.raises(ConfigError, match="too large for float32"):
        extreme.score(huge, 1)
    absent = {"a": np.asarray([np.nan, 1], np.float32), "b": np.asarray([np.nan, 2], np.float32)}
    assert np.isnan(algorithm.score(absent, 3)).tolist() == [True, False]


@pytest.mark.parametrize(
    ("named", "message"),
    [
        ({"a": {"weight": []}}, "algorithm.rewards.a.weight: should be a number, or pairs of a step and a number"),
        ({"a": {"weight": [[3, 1], [3, 2]]}}, "algorithm.rewards.a.weight: should be a number, or pairs of a step"),
        ({"a": {"weight": [[1, 1], [4, 2], [3, 3]]}}, "algorithm.rewards.a.weight: should be a number, or pairs of"),
        ({"a": {"weight": "much"}}, "algorithm.rewards.a.weight: should be a number"),
        ({"a": {"clip": 0}}, "algorithm.rewards.a.clip: should be more than 0"),
        ({"a": {"wieght": 1}}, "algorithm.rewards.a.wieght: unknown field; known: clip, normalise, weight"),
        ({"a": {"weight": 0}}, "algorithm: rewards: all weights are 0, which leaves no score"),
        ({"score": {}}, "should be letters, digits, `_` and `-`"),
        ({"a": {"normalise": "group"}}, "normalise group of a name in rewards compares the responses to one prompt"),
    ],
)
def test_settings_that_cannot_be_are_named(named: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse({"kind": "reinforce++", "rewards": named})
    assert message in str(caught.value)


def test_what_is_weighed_has_to_be_what_is_given() -> None:
    two = parse({"kind": "reinforce++", "rewards": {"right": {}, "brief": {"weight": 0}}})
    assert two.score_names == ("right", "brief")
    assert two.counted_names == ("right",)
    assert [*two.misfits(["brief", "right"], "it")] == []
    assert [*two.misfits(["right", "kind"], "the scorer")] == [
        "orchestrator.algorithm.rewards: lacks kind, as the scorer gives right, kind; give each its weight, or 0 to "
        "measure it only",
        "orchestrator.algorithm.rewards: has brief, but the scorer gives right, kind; leave out what it does not "
        "give",
    ]
    assert [*two.misfits([], "it")] == [
        "orchestrator.algorithm.rewards: has right, brief, but it gives one score without a name; leave out what it "
        "does not give"
    ]
    plain = parse({"kind": "reinforce++"})
    assert (plain.score_names, plain.counted_names) == (("score",), ("score",))
    assert [*plain.misfits([], "it")] == []
    assert len([*plain.misfits(["right"], "it")]) == 1
    assert two.filled_in().endswith("set otherwise: rewards 1 right + 0 brief")


def test_a_group_teaches_nothing_only_if_every_name_that_counts_is_equal() -> None:
    settings = {"kind": "grpo", "samples_per_prompt": 2, "rewards": {"right": {}, "brief": {}, "seen": {"weight": 0}}}

    def admits(**scores: list[float]) -> bool:
        named = {name: np.asarray(each, np.float32) for name, each in scores.items()}
        group = Group(named, np.ones(2, np.int64), np.zeros(2, np.bool_))
        return parse(settings | {"zero_variance": "resample"}).admit(group)

    assert not admits(right=[1, 1], brief=[2, 2], seen=[3, 4])
    assert admits(right=[1, 1], brief=[2, 3], seen=[3, 3])
    # Their sum is equal, and what is trained on may not be: each name may be normalised, and weights change.
    assert admits(right=[1, 0], brief=[0, 1], seen=[3, 3])
    outcomes = Outcomes(
        np.asarray([0, 0, 4, 4], np.int64),
        {
            "right": np.asarray([1, 1, 1, 1], np.float32),
            "brief": np.asarray([2, 2, 2, 3], np.float32),
            "seen": np.asarray([1, 2, 3, 3], np.float32),
        },
        np.zeros(4, np.bool_),
    )
    chosen = parse(settings | {"zero_variance": "leave-out"}).chosen(outcomes)
    assert chosen is not None
    assert chosen.tolist() == [False, False, True, True]


def batch(seed: int, names: tuple[str, ...]) -> Batch:
    """Eight responses, two to each of four prompts; every name has the same scores, which are the row's as well."""
    draw = np.random.default_rng(seed)
    rows = []
    for number in range(8):
        length = int(draw.integers(1, 6))
        logprobs, ref, values = (draw.normal(-1, 0.5, length).astype(np.float32) for _ in range(3))
        sample = Sample(0, np.zeros(length, np.int32), logprobs, FinishReason.STOP, ((1, 0, length),))
        score = float(np.float32(draw.normal(0, 3)))
        rows.append(Experience(number, make_prompts(8)[number // 2], sample, score, ref, values))
    made = collected(rows, each=2)
    columns = made.columns.with_rows(**{f"score/{name}": made.columns["score"] for name in names})
    return Batch.of(replace(made, columns=columns))


def estimated(algorithm: Algorithm, seed: int, names: tuple[str, ...] = ()) -> Advantages:
    made = batch(seed, names)
    old = made.logprobs - 0.125
    return estimate_advantages(made, old, algorithm, 0.25, {}, step=3, longest=8)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kind", presets())
@pytest.mark.parametrize(
    "more", [{}, {"normalise_scores": True, "score_clip": 0.75}, {"overlong_buffer": 3}], ids=str
)
def test_one_name_of_weight_one_is_bit_for_bit_the_score_without_a_name(
    kind: str, seed: int, more: dict[str, Any]
) -> None:
    if kind == "distil":  # measures scores, and learns nothing of them
        more = {}
    settings = {"kind": kind, "samples_per_prompt": 2} | more
    plain = estimated(parse(settings), seed)
    named = estimated(parse(settings | {"rewards": {"right": {}}}), seed, ("right",))
    assert named.advantages.tobytes() == plain.advantages.tobytes()
    assert (named.returns is None) == (plain.returns is None)
    if named.returns is not None and plain.returns is not None:
        assert named.returns.tobytes() == plain.returns.tobytes()
    assert named.normalisers == plain.normalisers
    its_own = {name: value for name, value in named.metrics.items() if not name.startswith("score/right/")}
    assert its_own == plain.metrics


@pytest.mark.parametrize("seed", range(3))
def test_long_responses_lose_their_part_of_the_reward(seed: int) -> None:
    plain, settings = {"kind": "reinforce++", "kl": {"coef": 0.0}}, {"overlong_buffer": 6, "overlong_penalty": 0.75}
    lengths = batch(seed, ()).lengths.tolist()
    # Of 8 tokens the last six cost 0.125 each.
    lost = [max(0, length - 2) * 0.125 for length in lengths]
    assert any(lost)
    before, after = (estimated(parse(plain | more), seed).metrics["reward/mean"] for more in ({}, settings))
    assert before - after == pytest.approx(sum(lost) / len(lost), abs=1e-6)


def test_each_name_is_measured_by_itself_and_in_its_groups() -> None:
    algorithm = parse(
        {"kind": "rloo", "samples_per_prompt": 2, "rewards": {"a": {"weight": [[1, 1], [5, 3]]}, "b": {"weight": 0}}}
    )
    metrics = estimated(algorithm, 0, ("a", "b")).metrics
    for name, weight in (("a", 2.0), ("b", 0.0)):
        assert metrics[f"score/{name}/mean"] == metrics["score/mean"]
        assert metrics[f"score/{name}/std"] == metrics["score/std"]
        assert metrics[f"score/{name}/weight"] == weight
        assert metrics[f"score/{name}/group/spread"] == metrics["group/spread"]
        assert metrics[f"score/{name}/group/zero_variance"] == 0
    alone = estimated(parse({"kind": "reinforce++", "rewards": {"a": {}}}), 0, ("a",)).metrics
    assert "score/a/group/spread" not in alone
