"""The synthetic task of benchmarks/lag, who samples in it, and its table."""

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM

from benchmarks.lag.__main__ import add, read, second_half, table
from benchmarks.lag.drawing import draw
from benchmarks.lag.run import BATCH, NONE, Behaviour, Learners, Setting, train
from benchmarks.lag.task import END, MOST, WANTED, make_model, sample, score
from orchestrator.algorithm.off_policy import correction_weights
from services.rollout.sample import FinishReason


def setting(correction: str = NONE, lag: int = 2, steps: int = 3) -> Setting:
    return Setting(correction, lag, learning_rate=3e-3, steps=steps)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("lag"), seed=0)


@pytest.fixture(scope="module")
def learners(model: Path) -> Learners:
    return Learners(model, setting(), seed=0)


def test_too_long_and_too_short_cost_the_same() -> None:
    assert score(WANTED) == 1
    assert [score(WANTED + d) for d in (-3, 3)] == [0.5, 0.5]
    assert score(MOST) < 0 < score(1)


def test_a_response_ends_with_its_first_end_token(model: Path) -> None:
    prompts = [np.asarray([4 + row % 8], np.int32) for row in range(64)]
    policy = LlamaForCausalLM.from_pretrained(model).eval()
    samples = sample(policy, prompts, 3, torch.Generator().manual_seed(0))
    assert {each.finish_reason for each in samples} == set(FinishReason)
    for each in samples:
        length, ended = len(each.response_ids), each.finish_reason is FinishReason.STOP
        assert END not in each.response_ids[: length - ended]
        assert each.response_ids[-1] == END if ended else length == MOST
        assert (len(each.logprobs), each.spans) == (length, ((3, 0, length),))


def test_no_correction_weighs_every_token_alike() -> None:
    old, behaviour, mask = torch.tensor([[-1.0, -9.0]]), torch.tensor([[-5.0, -1.0]]), torch.ones(1, 2).bool()
    ppo = setting(NONE).ppo
    weights = correction_weights(ppo.correction, old, behaviour, mask, sampled=mask, cap=ppo.importance_cap)
    assert weights.tolist() == [[1.0, 1.0]]
    assert setting("dis").ppo.correction == "dis"
    assert setting("tis").ppo.importance_cap is not None


@pytest.mark.processes  # for its length: the learners are built by DeepSpeed
def test_a_batch_comes_from_the_version_that_is_as_old_as_the_lag(model: Path, learners: Learners) -> None:
    behaviour, ages = Behaviour(model, setting(lag=2), seed=0), []
    for version in range(5):
        behaviour.push(version, learners.weights())
        batch = behaviour.batch(learners.critic)
        assert len(batch) == BATCH
        versions = {each.sample.policy_version for each in batch.experiences}
        ages += [version - each for each in versions]
        if version == 0:
            # The present weights sampled it, so that the learner gives its tokens the same log-probs.
            expected = batch.padded(learners.policy.logprobs(batch.prompts, batch.responses))
            torch.testing.assert_close(batch.logprobs, expected, atol=1e-5, rtol=0)
            before = learners.policy.logprobs(batch.prompts, batch.responses)
            learners.train(batch, seed=0)
            after = learners.policy.logprobs(batch.prompts, batch.responses)
            assert max(np.abs(a - b).max() for a, b in zip(before, after, strict=True)) > 1e-4
    assert ages == [0, 1, 2, 2, 2]


@pytest.mark.processes  # for its length: the learners are built by DeepSpeed
def test_a_seed_gives_the_same_run(model: Path) -> None:
    first = train(setting(lag=0), seed=1)
    assert train(setting(lag=0), seed=1) == first
    assert train(setting(lag=0), seed=2) != first
    ahead = train(setting(lag=1), seed=1)
    # The first batch is of version 0 in both; the last is not of the same version.
    assert (ahead[0], ahead[2] == first[2]) == (first[0], False)


def test_finished_runs_are_read_again_and_shown(tmp_path: Path) -> None:
    file = tmp_path / "folder" / "results.jsonl"
    assert read(file) == {}
    runs = {setting(NONE, 0, 4): [[0.0, 0.0, 1.0, 0.5]], setting("dis", 2, 4): [[0.0, 0.0, -1.0, 0.0]] * 2}
    for of, curves in runs.items():
        for seed, curve in enumerate(curves):
            add(file, of, seed, curve)
    assert read(file) == {of: dict(enumerate(curves)) for of, curves in runs.items()}
    assert second_half([9.0, 9.0, 1.0, 0.5]) == 0.75
    columns = [list(column.cells) for column in table(runs).columns]
    assert columns[0] == ["s = 0, no correction", "s = 2, dis"]
    assert columns[2:] == [["+0.750", "-0.500"], ["nan", "0.000"], ["+0.50", "-1.00"]]
    draw(runs, tmp_path / "lag.svg")
    assert "s = 2, dis" in (tmp_path / "lag.svg").read_text()
