"""Responses that are computed while they grow, against the same responses computed at once."""

from pathlib import Path

import numpy as np
import pytest
import torch

from services.common.models.distribution import Distribution
from services.common.models.frozen_passes import FrozenPasses
from services.common.models.loading import load_causal, response_logits
from services.common.models.scalar import load_scalar
from services.common.models.sequences import PairTensors
from services.common.wire.codec import Floats
from services.reference.model import Question
from tests import plain
from tests.families import FAMILIES

PROMPTS, RESPONSES = plain.random_pairs(6, seed=5, longest=20)
# No end token among the first five: what is forbidden depends on a token's place in the whole response.
DISTRIBUTION = Distribution(temperature=0.7, min_new_tokens=5, end_ids=(2, 7))
ALWAYS = ("gpt2", "llama3", "qwen3-moe")
PACKED = [name for name, family in FAMILIES.items() if family.packs]
NAMES = [pytest.param(name, marks=() if name in ALWAYS else pytest.mark.exhaustive) for name in PACKED]


def questions(lengths: list[int] | None = None) -> list[Question]:
    """Whole responses, or their first tokens as unfinished ones."""
    cut = lengths or [len(response) for response in RESPONSES]
    return [
        Question(prompt, response[:length], DISTRIBUTION, unfinished=lengths is not None)
        for prompt, response, length in zip(PROMPTS, RESPONSES, cut, strict=True)
    ]


class Counted:
    """Log-probs by the model in a folder, and how many tokens it computed."""

    def __init__(self, folder: Path, kept_tokens: int, max_tokens: int = 60) -> None:
        self.model = load_causal(str(folder), "float32", packing=True).eval().requires_grad_(False)
        self.passes = FrozenPasses(max_tokens, torch.device("cpu"), packing=True, kept_tokens=kept_tokens)
        self.tokens = 0

    def logprobs(self, asked: list[Question]) -> list[Floats]:
        return self.passes.run(self._compute, asked)

    def _compute(self, pairs: PairTensors) -> list[Floats]:
        self.tokens += pairs.input_ids.numel()
        with torch.inference_mode():
            return pairs.unpad(DISTRIBUTION.logprobs(response_logits(self.model, pairs), pairs))


@pytest.mark.parametrize("name", NAMES)
def test_a_response_that_grows_gets_the_log_probs_of_the_whole_one(name: str, tmp_path: Path) -> None:
    folder = FAMILIES[name].make(tmp_path / name)
    whole, grown = Counted(folder, 0), Counted(folder, 10_000)
    expected = whole.logprobs(questions())
    halves = [max(1, len(response) // 2) for response in RESPONSES]
    for lengths in ([1] * 6, halves):
        grown.logprobs(questions(lengths))
    before = grown.tokens
    actual = grown.logprobs(questions())
    assert [len(row) for row in actual] == [len(response) for response in RESPONSES]
    assert plain.furthest(actual, expected) < 1e-5
    # Of each response what follows, and its last token before: a response of one token is computed whole again.
    rest = sum(len(response) - half + 1 for response, half in zip(RESPONSES, halves, strict=True))
    repeated = sum(len(response) == half for response, half in zip(RESPONSES, halves, strict=True))
    assert rest <= grown.tokens - before <= rest + repeated
    assert whole.tokens == sum(len(p) + len(r) for p, r in zip(PROMPTS, RESPONSES, strict=True))


def test_a_response_that_went_on_otherwise_is_computed_from_there(policy_folder: Path) -> None:
    """After a replica was lost, another may have sampled other tokens."""
    whole, grown = Counted(policy_folder, 0), Counted(policy_folder, 10_000)
    other = [np.concatenate([response[:-1], response[-1:] + 1]) for response in RESPONSES]
    grown.logprobs([Question(p, r, DISTRIBUTION, True) for p, r in zip(PROMPTS, other, strict=True)])
    assert plain.furthest(grown.logprobs(questions()), whole.logprobs(questions())) < 1e-5


def test_what_was_not_kept_is_computed_again(policy_folder: Path) -> None:
    whole, grown = Counted(policy_folder, 0), Counted(policy_folder, 30)
    grown.logprobs(questions([1] * 6))
    assert 0 < grown.passes._prefixes.tokens <= 30
    assert plain.furthest(grown.logprobs(questions()), whole.logprobs(questions())) < 1e-5


@pytest.mark.parametrize("name", [name for name in NAMES if FAMILIES[str(name.values[0])].one_number])
def test_a_reward_model_scores_a_response_that_grew(name: str, tmp_path: Path) -> None:
    model = load_scalar(str(FAMILIES[name].make_reward(tmp_path / name)), "float32", packing=True).eval()

    def compute(pairs: PairTensors) -> list[Floats]:
        with torch.inference_mode():
            return list(model.scores(pairs).numpy()[:, None])

    whole, grown = (FrozenPasses(60, torch.device("cpu"), packing=True, kept_tokens=kept) for kept in (0, 10_000))
    grown.run(compute, questions([max(1, len(response) // 2) for response in RESPONSES]))
    actual = [outputs[-1] for outputs in grown.run(compute, questions())]
    assert actual == pytest.approx([outputs[-1] for outputs in whole.run(compute, questions())], abs=1e-5)
