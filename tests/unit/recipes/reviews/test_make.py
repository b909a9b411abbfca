"""The reviews recipe from end to end, tiny."""

import io
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from recipes.common.shape import Shape
from recipes.common.stages import Stages
from recipes.reviews.grammar import split_prompts
from recipes.reviews.make import make
from recipes.reviews.models import make_models
from recipes.reviews.settings import Settings

pytestmark = pytest.mark.processes

TINY = Settings(
    shape=Shape(hidden=16, layers=1, heads=2),
    supervised_steps=20,
    supervised_batch=16,
    preferences=64,
    reward_epochs=1,
    reward_batch=16,
    measured=32,
)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("reviews") / "models"
    assert make(out, TINY, Console(file=io.StringIO()))
    return out


def test_the_policy_and_its_tokenizer_load(made: Path) -> None:
    policy = AutoModelForCausalLM.from_pretrained(made / "policy")
    tokenizer = AutoTokenizer.from_pretrained(made / "policy")
    assert policy.config.architectures == ["LlamaForCausalLM"]
    assert policy.config.vocab_size == len(tokenizer) == 106
    assert policy.config.max_position_embeddings == tokenizer.model_max_length == 128
    assert policy.lm_head.weight is not policy.model.embed_tokens.weight
    for settings in (policy.config, policy.generation_config, tokenizer):
        assert (settings.pad_token_id, settings.bos_token_id, settings.eos_token_id) == (0, 1, 2)
    assert tokenizer("write a review")["input_ids"][0] == 1
    assert 1 not in tokenizer("write a review", add_special_tokens=False)["input_ids"]


def test_the_reward_model_loads_and_knows_its_scale(made: Path) -> None:
    model = AutoModelForSequenceClassification.from_pretrained(made / "reward").eval()
    tokenizer = AutoTokenizer.from_pretrained(made / "reward")
    assert model.config.architectures == ["LlamaForSequenceClassification"]
    assert (model.config.num_labels, model.config.pad_token_id) == (1, 0)
    assert isinstance(model.config.reward_mean, float)
    assert model.config.reward_std > 0
    assert tokenizer.get_vocab() == AutoTokenizer.from_pretrained(made / "policy").get_vocab()
    ids = tokenizer("write a short review of the phone for students : the price is fair . <eos>").input_ids
    with torch.no_grad():
        assert model(input_ids=torch.tensor([ids])).logits.shape == (1, 1)


def test_the_models_owe_nothing_to_the_held_out_prompts(made: Path, tmp_path: Path) -> None:
    train, held_out = split_prompts(TINY.seed, TINY.held_out)
    make_models(tmp_path, train, held_out[:5], TINY, Stages(Console(file=io.StringIO())))
    for file in ("policy/model.safetensors", "reward/model.safetensors", "reward/config.json"):
        assert (tmp_path / file).read_bytes() == (made / file).read_bytes()


def test_the_prompts_are_split_into_rows(made: Path) -> None:
    rows = {
        split: [json.loads(line) for line in (made / "prompts" / f"{split}.jsonl").read_text().splitlines()]
        for split in ("train", "eval")
    }
    assert {split: len(part) for split, part in rows.items()} == {"train": 288, "eval": 96}
    for row in rows["train"] + rows["eval"]:
        assert row["prompt"] == "write a {tone} review of the {product} for {audience} :".format(**row)
        assert row.keys() == {"prompt", "tone", "product", "audience"}
    assert not {row["prompt"] for row in rows["train"]} & {row["prompt"] for row in rows["eval"]}


def test_the_record_holds_the_measures(made: Path) -> None:
    record = json.loads((made / "recipe.json").read_text())
    assert record["measures"].keys() == {"reward_accuracy", "reward_gold_correlation", "policy_gold"}
    assert 0 <= record["measures"]["reward_accuracy"] <= 1
    assert -1 <= record["measures"]["policy_gold"] <= 1
    assert record["settings"]["shape"] == {"hidden": 16, "layers": 1, "heads": 2}
    assert record["seconds"].keys() == {"policy: supervised", "preferences", "reward model", "measures"}


def test_a_second_run_finds_everything_made_without_loading_torch(made: Path) -> None:
    program = f"""
import pathlib, sys
from rich.console import Console
from recipes.common.shape import Shape
from recipes.reviews.make import make
from recipes.reviews.settings import Settings, Style
sys.exit(make(pathlib.Path({str(made)!r}), {TINY!r}, Console()) or "torch" in sys.modules)
"""
    root = Path(__file__).parents[4]
    command = [sys.executable, "-c", program]
    ended = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    assert "already made in" in ended.stdout


def test_another_seed_makes_other_prompts_and_models(made: Path, tmp_path: Path) -> None:
    make(tmp_path / "other", replace(TINY, seed=1), Console(file=io.StringIO()))
    for file in ("prompts/eval.jsonl", "policy/model.safetensors", "reward/model.safetensors"):
        assert (tmp_path / "other" / file).read_bytes() != (made / file).read_bytes()


@pytest.mark.exhaustive  # made again with the same seed, as in the test of held-out prompts
def test_the_same_seed_makes_the_same_prompts_and_models(made: Path, tmp_path: Path) -> None:
    make(tmp_path / "again", TINY, Console(file=io.StringIO()))
    for file in ("prompts/eval.jsonl", "policy/model.safetensors", "reward/model.safetensors"):
        assert (tmp_path / "again" / file).read_bytes() == (made / file).read_bytes()
