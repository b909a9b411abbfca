"""Runs whose reward service gives several scores of a response, by name, and whose prompts have tasks."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from orchestrator.data.prompts import PromptStream
from orchestrator.experience.experience import Collected, schema_of
from orchestrator.experience.journal import ExperienceJournal
from quartet.columns import Columns
from quartet.config.base import ConfigError
from quartet.wire.errors import InvalidReply, leaves
from tests.unit.fake_run import Stage
from tests.unit.fakes import make_config, make_prompts
from tests.unit.step_metrics import untimed

PLAIN = {"minibatch_size": 1, "kl": {"coef": 0}}
TWO = {"token": {"weight": [[1, 0.5], [3, 1.5]]}, "length": {"weight": -2.0, "normalise": "running"}}


def two_names(response: Any) -> list[float]:
    """The first token, and the number of tokens."""
    return [float(response[0]), float(len(response))]


def stage(folder: Path, rewards: dict[str, Any], **section: Any) -> Stage:
    """A run with these rewards, of which a fake service gives the first token and the length."""
    made = Stage(folder, evaluates=False, algorithm=PLAIN | {"rewards": rewards}, **section)
    made.fakes.reward.names, made.fakes.reward.answer = ("token", "length"), two_names
    return made


def steady(stage: Stage) -> list[dict[str, float]]:
    return [untimed(line) for line in stage.log.lines.values()]


async def test_the_sum_is_trained_on_and_each_name_is_measured(policy_folder: Path) -> None:
    """Tokens 10 and 11 are the scores, lengths 1 and 2; the weight of the first goes from 0.5 by 1 to 1.5."""
    made = stage(policy_folder, TWO)
    await made.run()
    for step, weight in ((1, 0.5), (2, 1.0), (3, 1.5)):
        line = made.log.lines[step]
        assert line["score/token/mean"] == 10.5
        assert line["score/length/mean"] == 1.5
        assert (line["score/token/weight"], line["score/length/weight"]) == (weight, -2.0)
        # As the service gives them: the mean of 10 w - 2 and 11 w - 4.
        assert line["score/mean"] == pytest.approx(10.5 * weight - 3)
        # Lengths seen n times have the mean 1.5 and the unbiased variance 0.25 n / (n - 1).
        normalised = 0.5 / (0.25 * 2 * step / (2 * step - 1)) ** 0.5
        expected = sorted([10 * weight + 2 * normalised, 11 * weight - 2 * normalised])
        returns = sorted(float(row[-1]) for row in made.fakes.critic.trained[step - 1]["returns"])
        assert returns == pytest.approx(np.clip(expected, -10, 10), abs=1e-5)
        kept = made.experience.kept[step].columns
        assert sorted(kept["score"].tolist()) == pytest.approx(sorted([10 * weight - 2, 11 * weight - 4]))


async def test_one_name_is_the_run_without_names_bit_for_bit(policy_folder: Path) -> None:
    plain = Stage(policy_folder, evaluates=False, algorithm=PLAIN | {"normalise_scores": True})
    named = Stage(
        policy_folder, evaluates=False, algorithm=PLAIN | {"normalise_scores": True, "rewards": {"token": {}}}
    )
    named.fakes.reward.names = ("token",)
    await plain.run()
    await named.run()
    for one, other in zip(plain.fakes.critic.trained, named.fakes.critic.trained, strict=True):
        assert [row.tobytes() for row in one["returns"]] == [row.tobytes() for row in other["returns"]]
    for (before, _), (after, _) in zip(plain.policy.batches, named.policy.batches, strict=True):
        assert [row.tobytes() for row in before.advantages] == [row.tobytes() for row in after.advantages]
    assert plain.checkpoints.states == named.checkpoints.states
    bare = [{name: each for name, each in line.items() if "/token/" not in name} for line in steady(named)]
    assert bare == steady(plain)


@pytest.mark.parametrize("journal", [False, True])
async def test_a_run_that_goes_on_has_the_weights_and_normalisers_of_one_that_was_not_interrupted(
    policy_folder: Path, journal: bool
) -> None:
    """Back from step 3 to the checkpoint of step 1, with the journal's samples or with new ones."""
    straight, again = stage(policy_folder, TWO, steps=4), stage(policy_folder, TWO, steps=4)
    await straight.run()
    state = straight.checkpoints.states[1]
    assert state.step == 1
    again.experience.kept = {step: straight.experience.kept[step] for step in (2, 3)} if journal else {}
    await again.go_on(type(state).model_validate_json(state.model_dump_json()))
    assert again.checkpoints.states == straight.checkpoints.states[2:]
    assert steady(again) == steady(straight)[1:]
    for one, other in zip(again.fakes.critic.trained, straight.fakes.critic.trained[1:], strict=True):
        assert [row.tobytes() for row in one["returns"]] == [row.tobytes() for row in other["returns"]]


async def test_discarded_samples_count_with_the_weights_of_their_step(policy_folder: Path) -> None:
    """Both responses to a prompt have its token, but for those of prompt 0: all other groups are discarded."""
    algorithm = {"kind": "grpo", "samples_per_prompt": 2, "minibatch_size": 2, "zero_variance": "resample"}
    rewards = {"token": {"weight": [[1, 1.0], [2, 3.0]]}, "length": {"weight": 0.0}}
    section: dict[str, Any] = {"steps": 2, "services": {"critic": None}}
    made = Stage(policy_folder, evaluates=False, algorithm=algorithm | {"rewards": rewards}, **section)
    made.prompts = 3
    drawn = iter(range(1000))
    made.fakes.reward.names = ("token", "length")
    # The length differs in every group, and has no weight.
    made.fakes.reward.answer = lambda response: [
        float(response[0]) + (next(drawn) if response[0] == 10 else 0),
        float(next(drawn)),
    ]
    await made.run()
    for step, weight in ((1, 1.0), (2, 3.0)):
        batch = made.experience.kept[step]
        assert [prompt.row for prompt in batch.prompts] == [0, 0]
        assert [each.score for each in batch.discarded] == [weight * (10 + each.row) for each in batch.discarded]
        assert all(each.row for each in batch.discarded)
    assert made.checkpoints.states[-1].samples_discarded > 0


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("token", "reward.Score: scores: of token; must be of token, length"),
        ("score", "reward.Score: scores: of score; must be of token, length"),
    ],
)
async def test_a_score_that_is_missing_ends_the_run(policy_folder: Path, name: str, message: str) -> None:
    made = stage(policy_folder, TWO)
    made.prompts, made.fakes.reward.names, made.fakes.reward.answer = 1, (name,), lambda response: [1.0]
    with pytest.raises(ExceptionGroup) as caught:
        await made.run()
    assert {str(leaf) for leaf in leaves(caught.value) if isinstance(leaf, InvalidReply)} == {message}


async def test_the_journal_holds_each_name_and_is_read_with_the_same_names_alone(
    policy_folder: Path, tmp_path: Path
) -> None:
    made = stage(policy_folder, TWO)
    await made.run()
    said: list[str] = []
    journal = ExperienceJournal(tmp_path, made.config, said.append)
    journal.write(1, made.experience.kept[1])
    prompts = PromptStream(make_prompts(2), made.config.seed)

    def read(journal: ExperienceJournal) -> Collected | None:
        return journal.read(1, prompts.dealt)

    again = read(journal)
    assert again is not None
    assert again.columns.pack() == made.experience.kept[1].columns.pack()
    assert Columns.unpack(again.columns.pack(), schema_of(["token", "length"])).columns.keys() >= {
        "score",
        "score/token",
        "score/length",
    }
    others: list[dict[str, Any]] = [{}, {"token": {}}, TWO | {"length": {"weight": 1.0}}]
    for rewards in others:
        other = make_config(policy_folder, algorithm=PLAIN | {"rewards": rewards}, batch_size=2, steps=3, seed=4)
        assert read(ExperienceJournal(tmp_path, other, said.append)) is None
    assert len(said) == 3


async def test_scores_and_lengths_of_each_task(policy_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts 0 to 3 have one to four tokens; those of even rows are of the task `even`, and row 3 of none."""
    tasks = {0: "even", 1: "odd", 2: "even", 3: ""}
    prompts = [replace(prompt, task=tasks[prompt.row]) for prompt in make_prompts(4)]
    monkeypatch.setattr("tests.unit.fake_run.make_prompts", lambda count: prompts)
    made = stage(policy_folder, TWO, batch_size=4, steps=1)
    await made.run()
    line = made.log.lines[1]
    assert {name.split("/")[1] for name in line if name.startswith("task/")} == {"even", "odd"}
    assert (line["task/even/samples"], line["task/odd/samples"]) == (2, 1)
    # Tokens 10 and 12, lengths 1 and 3; token 11, length 2, which is odd and so cut off.
    assert (line["task/even/score/token/mean"], line["task/even/score/length/mean"]) == (11, 2)
    assert line["task/even/score/mean"] == pytest.approx(0.5 * 11 - 2 * 2)
    assert (line["task/even/response/length_mean"], line["task/odd/response/length_mean"]) == (2, 2)
    assert (line["task/even/response/truncated"], line["task/odd/response/truncated"]) == (0, 1)


async def test_a_sum_beyond_float32_ends_the_run_with_the_key(policy_folder: Path) -> None:
    made = stage(policy_folder, {"token": {"weight": 1e39}, "length": {}})
    with pytest.raises(ConfigError, match=r"^orchestrator\.algorithm\.rewards: a sum of the weighted scores is too"):
        await made.run()
