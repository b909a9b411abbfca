"""Responses that are computed while they grow, against the same responses computed at once."""

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import DiffLlamaConfig, DiffLlamaForCausalLM

from quartet.config.base import ConfigError
from quartet.models.attention import packed
from quartet.models.attention.prefixes import Past
from quartet.models.distribution import Distribution
from quartet.models.frozen_passes import FrozenPasses
from quartet.models.loading import load_causal
from quartet.models.scalar import load_scalar
from quartet.models.sequences import PairTensors
from quartet.wire.codec import Floats
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
        self.passes = FrozenPasses(
            self.model, max_tokens, torch.device("cpu"), packing=True, last=False, kept_tokens=kept_tokens
        )
        self.tokens = 0

    def logprobs(self, asked: list[Question]) -> list[Floats]:
        return self.passes.run(self._compute, asked)

    def _compute(self, pairs: PairTensors) -> list[Floats]:
        self.tokens += pairs.input_ids.numel()
        with torch.inference_mode():
            return pairs.unpad(DISTRIBUTION.asked_of(self.model, pairs)[0])


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
    # Of each response the last token before and what follows but the last: one of one token is computed whole again.
    rest = sum(len(response) - half for response, half in zip(RESPONSES, halves, strict=True))
    repeated = sum(len(response) == half for response, half in zip(RESPONSES, halves, strict=True))
    assert rest <= grown.tokens - before <= rest + repeated
    assert whole.tokens == sum(len(p) + len(r) - 1 for p, r in zip(PROMPTS, RESPONSES, strict=True))


def test_a_response_that_went_on_otherwise_is_computed_from_there(policy_folder: Path) -> None:
    """After a replica was lost, another may have sampled other tokens."""
    whole, grown = Counted(policy_folder, 0), Counted(policy_folder, 10_000)
    other = [np.concatenate([response[:-1], response[-1:] + 1]) for response in RESPONSES]
    grown.logprobs([Question(p, r, DISTRIBUTION, True) for p, r in zip(PROMPTS, other, strict=True)])
    assert plain.furthest(grown.logprobs(questions()), whole.logprobs(questions())) < 1e-5


def test_another_sample_of_the_same_prompt_takes_none_of_a_group(policy_folder: Path) -> None:
    """Samples 1 to 3 of a prompt have begun; sample 0, which has not, is asked about with them."""
    grown, draw = Counted(policy_folder, 10_000), np.random.default_rng(3)
    prompt = PROMPTS[0]
    group = [draw.integers(3, 30, 20).astype(np.int32) for _ in range(4)]
    grown.logprobs([Question(prompt, response[:16], DISTRIBUTION, unfinished=True) for response in group[1:]])
    before = grown.tokens
    actual = grown.logprobs([Question(prompt, response, DISTRIBUTION) for response in group])
    assert grown.tokens - before == len(prompt) + 19 + 3 * 4
    expected = Counted(policy_folder, 0).logprobs([Question(prompt, response, DISTRIBUTION) for response in group])
    assert plain.furthest(actual, expected) < 1e-5


def test_a_long_rest_is_attended_to_in_blocks(policy_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed, "MASKED_ROWS", 3)
    whole, grown = Counted(policy_folder, 0), Counted(policy_folder, 10_000)
    grown.logprobs(questions([1] * 6))
    assert plain.furthest(grown.logprobs(questions()), whole.logprobs(questions())) < 1e-5


def test_nothing_is_kept_of_a_pass_that_fails_and_the_next_one_is_right(policy_folder: Path) -> None:
    whole, grown = Counted(policy_folder, 0), Counted(policy_folder, 10_000)
    grown.logprobs(questions([1] * 6))

    def fail(pairs: PairTensors) -> list[Floats]:
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        grown.passes.run(fail, questions())
    assert grown.passes._prefixes.tokens == 0
    assert plain.furthest(grown.logprobs(questions()), whole.logprobs(questions())) < 1e-5


def test_keys_and_values_that_are_kept_hold_no_other_memory(policy_folder: Path) -> None:
    grown = Counted(policy_folder, 10_000)
    for length in (1, 2):
        grown.logprobs(questions([length] * 6))
    for prefixes in grown.passes._prefixes._kept.values():
        for prefix in prefixes:
            for layer in prefix.layers.values():
                for states in layer:
                    assert states.untyped_storage().nbytes() == states.numel() * states.element_size()


def test_a_model_whose_layers_attend_twice_is_refused(tmp_path: Path) -> None:
    config = DiffLlamaConfig(
        vocab_size=32, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2
    )
    DiffLlamaForCausalLM(config).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="kept_tokens: layers of diffllama attend more than once"):
        Counted(tmp_path, 100)
    assert Counted(tmp_path, 0).model is not None
    past = Past([None], [True])
    row = torch.zeros(1, 1, 1, 1)
    past.extended(0, 0, row, row)
    with pytest.raises(RuntimeError, match="layer 0 of this architecture attends more than once"):
        past.extended(0, 0, row, row)


def test_what_was_not_kept_is_computed_again(policy_folder: Path) -> None:
    whole, grown = Counted(policy_folder, 0), Counted(policy_folder, 30)
    grown.logprobs(questions([1] * 6))
    assert 0 < grown.passes._prefixes.tokens <= 30
    assert plain.furthest(grown.logprobs(questions()), whole.logprobs(questions())) < 1e-5


@pytest.mark.parametrize("name", NAMES)
def test_a_reward_model_scores_a_response_that_grew(name: str, tmp_path: Path) -> None:
    model = load_scalar(str(FAMILIES[name].make_reward(tmp_path / name)), "float32", packing=True).eval()

    def compute(pairs: PairTensors) -> list[Floats]:
        with torch.inference_mode():
            return list(model.scores(pairs).numpy()[:, None])

    whole, grown = (
        FrozenPasses(model.body, 60, torch.device("cpu"), packing=True, last=True, kept_tokens=kept)
        for kept in (0, 10_000)
    )
    grown.run(compute, questions([max(1, len(response) // 2) for response in RESPONSES]))
    actual = [outputs[-1] for outputs in grown.run(compute, questions())]
    assert actual == pytest.approx([outputs[-1] for outputs in whole.run(compute, questions())], abs=1e-5)
