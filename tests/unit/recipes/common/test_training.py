"""The training and the sampling that the recipes share."""

import json
from pathlib import Path

import pytest
import torch

from recipes.common.llama import load_tiny, tiny_policy, write_tiny
from recipes.common.sampling import sample
from recipes.common.shape import Shape
from recipes.common.tokenizer import EOS_ID, word_tokenizer
from recipes.common.training import train

pytestmark = pytest.mark.processes

TINY = Shape(hidden=16, layers=1, heads=2)


def test_a_policy_learns_what_its_rows_say_in_their_order(tmp_path: Path) -> None:
    tokenizer = word_tokenizer(["a", "b"], max_length=128)
    torch.manual_seed(0)
    start = write_tiny(tmp_path / "base", tokenizer, TINY)
    first, last = {"prompt": "a", "response": "a a"}, {"prompt": "a", "response": "b"}
    rows = [first] * 80 + [last] * 320
    train("sft", start, rows, tmp_path / "policy", 2e-2, batch_size=8, shuffle=False, seed=0)
    samples = sample(load_tiny(tmp_path / "policy"), tokenizer, ["a"] * 50, max_new_tokens=5)
    assert sum(one.pair.response == "b" for one in samples) > 45
    assert json.loads((tmp_path / "policy" / "generation_config.json").read_text())["eos_token_id"] == EOS_ID


def test_samples_differ_and_stop_at_the_first_end_or_at_the_limit() -> None:
    torch.manual_seed(0)
    tokenizer = word_tokenizer(["a", "b"], max_length=128)
    policy = tiny_policy(len(tokenizer), TINY).eval()
    prompts = ["a b", "a", "b b b"] * 40  # different lengths: the batch is padded
    samples = sample(policy, tokenizer, prompts, max_new_tokens=5, batch_size=50)
    assert [one.pair.prompt for one in samples] == prompts
    assert [len(one.prompt_ids) for one in samples] == [3, 2, 4] * 40
    for one in samples:
        assert one.pair.ended == (one.response_ids[-1] == EOS_ID) == one.written.endswith(" <eos>")
        assert EOS_ID not in one.response_ids[:-1]
        assert one.pair.ended or len(one.response_ids) == 5
        assert one.pair.response.split() == [("a", "b")[i - 4] for i in one.response_ids if i > 3]
    assert {one.pair.ended for one in samples} == {True, False}
