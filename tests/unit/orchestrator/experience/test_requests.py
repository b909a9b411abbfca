"""Samples by their numbers: which prompt and seed each has, however it is batched."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from orchestrator.data.prompts import PromptStream
from orchestrator.experience.requests import EVALUATION, SampleRequest, evaluation_requests, training_requests
from tests.unit.fakes import make_config, make_prompts


def asked(folder: Path, first: int, count: int, **section: Any) -> list[SampleRequest]:
    config = make_config(folder, **{"batch_size": 4} | section)
    stream = PromptStream(make_prompts(7), config.seed, config.algorithm.samples_per_prompt)
    return training_requests(config, stream, range(first, first + count))


def test_a_samples_prompt_and_seed_follow_from_its_number_alone(policy_folder: Path) -> None:
    together = asked(policy_folder, 0, 20)
    assert [request.number for request in together] == list(range(20))
    for first, count in ((0, 1), (3, 2), (4, 4), (7, 9), (19, 1)):
        assert asked(policy_folder, first, count) == together[first : first + count]


def test_samples_of_one_prompt_follow_each_other_with_seeds_of_their_own(policy_folder: Path) -> None:
    """The seeds are those of a run with one sample per prompt: they go by the sample's number."""
    algorithm = {"minibatch_size": 1, "samples_per_prompt": 2}
    together, single = asked(policy_folder, 0, 20, algorithm=algorithm), asked(policy_folder, 0, 20)
    assert [request.prompt for request in together[::2]] == [request.prompt for request in together[1::2]]
    assert [request.prompt.row for request in together[::2]] == [request.prompt.row for request in single[:10]]
    assert [request.seed for request in together] == [request.seed for request in single]
    for first, count in ((3, 2), (7, 9), (19, 1)):
        assert asked(policy_folder, first, count, algorithm=algorithm) == together[first : first + count]


def test_no_two_samples_of_two_runs_share_a_seed(policy_folder: Path) -> None:
    seeds = [request.seed for seed in (0, 1) for request in asked(policy_folder, 0, 24, seed=seed)]
    assert len(set(seeds)) == 48
    assert all(isinstance(seed, int) and 0 <= seed < 2**63 for seed in seeds)
    assert {request.seed for request in asked(policy_folder, 0, 6, sampling={"seeded": False})} == {None}


def test_a_seed_is_a_draw_of_its_block(policy_folder: Path) -> None:
    """Batches of four: sample 6 is the third of the second block, as it always was at lock-step."""
    draws = np.random.SeedSequence([5, 2]).generate_state(4, np.uint64)
    assert asked(policy_folder, 6, 1, seed=5)[0].seed == int(draws[2]) >> 1


@pytest.mark.parametrize("samples", [1, 3])
def test_all_evaluations_of_a_run_share_their_seeds(policy_folder: Path, samples: int) -> None:
    config = make_config(policy_folder, seed=5, evaluation={"samples_per_prompt": samples})
    requests = evaluation_requests(config, make_prompts(2))
    draws = np.random.SeedSequence([5, EVALUATION]).generate_state(2 * samples, np.uint64)
    assert [request.seed for request in requests] == [int(draw) >> 1 for draw in draws]
    assert [request.prompt.row for request in requests] == [0] * samples + [1] * samples
