"""Forward passes over padded pairs against one sequence at a time."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    GPT2Config,
    GPT2ForSequenceClassification,
    GPT2LMHeadModel,
    MistralConfig,
    MistralForCausalLM,
)
from transformers.utils import is_flash_attn_2_available

from quartet.config.base import ConfigError
from quartet.learner.recomputed import recompute_activations
from quartet.models.attention.packed import packed_attention
from quartet.models.attention.padded import NAME as PADDED
from quartet.models.loading import load_causal, load_tokenizer, max_length
from quartet.models.scalar import ScalarModel, load_scalar, load_value, scores_of, values_of
from quartet.models.sequences import concatenate_pairs, pad_pairs
from tests import plain
from tests.families import FAMILIES
from tests.models import EOS, MAX_LENGTH, PAD, ROWS, make_policy, make_tokenizer
from tests.response_logits import response_logits
from tests.unit.naive import arrays

PROMPTS = [[1, 5, 6, 7], [1, 8], [9]]
RESPONSES = [[10, EOS], [11, PAD, 12, PAD], [PAD]]


@pytest.fixture
def scalar(reward_folder: Path) -> ScalarModel:
    model = load_scalar(str(reward_folder), "float32")
    model.eval().requires_grad_(False)
    return model


@torch.no_grad()
def head_outputs(folder: Path, row: list[int]) -> torch.Tensor:
    """[len(row)]: the reward model's score head at every token, by Hugging Face's own class."""
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    return model.score(model.model(torch.tensor([row])).last_hidden_state)[0, :, 0]


@pytest.mark.parametrize("last", [True, False])
@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_response_logits_equal_those_without_padding(kind: str, last: bool, tmp_path: Path) -> None:
    folder = make_policy(tmp_path / kind, kind=kind, tied=True)  # type: ignore[arg-type]
    model = load_causal(str(folder), "float32").eval().requires_grad_(False)
    actual = response_logits(model, pad_pairs(arrays(PROMPTS), arrays(RESPONSES), last=last))
    assert actual.shape == (3, 4, ROWS)
    for row, (prompt, response) in enumerate(zip(PROMPTS, RESPONSES, strict=True)):
        alone = model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
        torch.testing.assert_close(actual[row, : len(response)], alone, atol=1e-5, rtol=0)


@pytest.mark.parametrize("last", [True, False])
@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_packed_logits_equal_those_of_each_sequence_alone(kind: str, last: bool, tmp_path: Path) -> None:
    folder = make_policy(tmp_path / kind, kind=kind, tied=True)  # type: ignore[arg-type]
    plain = load_causal(str(folder), "float32").eval().requires_grad_(False)
    model = load_causal(str(folder), "float32", packing=True).eval().requires_grad_(False)
    pairs = concatenate_pairs(arrays(PROMPTS), arrays(RESPONSES), last=last)
    actual = response_logits(model, pairs)
    assert actual.shape == (1, 7, ROWS)
    for piece, prompt, response in zip(actual[0].split(pairs.lengths), PROMPTS, RESPONSES, strict=True):
        alone = plain(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
        torch.testing.assert_close(piece, alone, atol=1e-5, rtol=0)
    # The model that takes the row for one sequence finds something else, so that the comparison tells.
    crossed = plain(
        pairs.input_ids, position_ids=pairs.position_ids, attention_mask=torch.ones_like(pairs.input_ids)
    ).logits
    assert (crossed[0, pairs.predictors] - actual[0]).abs().max() > 0.01


def test_packing_is_refused_where_a_layer_sees_a_window(tmp_path: Path) -> None:
    shape = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    config = MistralConfig(**shape, num_attention_heads=2, num_key_value_heads=2, sliding_window=8)
    MistralForCausalLM(config).save_pretrained(tmp_path)
    load_causal(str(tmp_path), "float32")
    with pytest.raises(ConfigError, match=r"packing: .* \(mistral\) has layers without plain causal attention"):
        load_causal(str(tmp_path), "float32", packing=True)
    query, key, value = torch.zeros(3, 1, 2, 4, 8)
    with pytest.raises(RuntimeError, match="gets no lengths of the sequences"):
        packed_attention(torch.nn.Module(), query, key, value, None)


def test_packing_is_refused_where_attention_is_capped(tmp_path: Path) -> None:
    """Such a model computes without a kernel that keeps the sequences of a row apart."""
    family = FAMILIES["gemma2"]
    capped = replace(family, options=family.options | {"layer_types": ["full_attention"] * 2, "sliding_window": None})
    folder = capped.make(tmp_path / "capped")
    with pytest.raises(
        ConfigError, match=r"packing: .*/capped \(gemma2\) caps its attention scores; set packing to false"
    ):
        load_causal(str(folder), "float32", packing=True)


def test_a_body_that_is_wider_inside_than_its_end_gets_a_head_that_fits(tmp_path: Path) -> None:
    family = FAMILIES["opt"]
    narrow = replace(family, options=family.options | {"word_embed_proj_dim": 32})  # as in opt-350m
    folder = narrow.make(tmp_path / "opt")
    pairs = pad_pairs(arrays(PROMPTS), arrays(RESPONSES))
    assert values_of(load_value(str(folder), "float32"), pairs).shape == (3, 4)
    full = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1)
    full.save_pretrained(tmp_path / "reward")
    expected = full.score.weight
    assert torch.equal(load_scalar(str(tmp_path / "reward"), "float32").head.weight, expected)


def test_a_saved_model_knows_nothing_of_packing(policy_folder: Path, tmp_path: Path) -> None:
    load_causal(str(policy_folder), "float32", packing=True).save_pretrained(tmp_path)  # type: ignore[operator]
    assert "packed" not in (tmp_path / "config.json").read_text()
    assert load_causal(str(tmp_path), "float32").config._attn_implementation == PADDED


def test_padding_moves_no_absolute_position(tmp_path: Path) -> None:
    torch.manual_seed(0)
    shape = {"vocab_size": 64, "n_positions": 16, "n_embd": 16, "n_layer": 1, "n_head": 2, "initializer_range": 0.5}
    GPT2LMHeadModel(GPT2Config(**shape)).save_pretrained(tmp_path / "causal")
    config = GPT2Config(**shape, num_labels=1, pad_token_id=PAD)
    GPT2ForSequenceClassification(config).save_pretrained(tmp_path / "scalar")
    causal = load_causal(str(tmp_path / "causal"), "float32").eval().requires_grad_(False)
    scalar = load_scalar(str(tmp_path / "scalar"), "float32")
    scalar.eval().requires_grad_(False)
    pairs = pad_pairs(arrays(PROMPTS), arrays(RESPONSES))
    logits, scores = response_logits(causal, pairs), scores_of(scalar, pairs)
    for row, (prompt, response) in enumerate(zip(PROMPTS, RESPONSES, strict=True)):
        alone = pad_pairs(arrays([prompt]), arrays([response]))
        expected = causal(alone.input_ids).logits[0, len(prompt) - 1 : -1]
        torch.testing.assert_close(logits[row, : len(response)], expected, atol=1e-4, rtol=0)
        hidden = scalar.body(alone.input_ids).last_hidden_state[0, -1]
        torch.testing.assert_close(scores[row], scalar.head(hidden)[0], atol=1e-4, rtol=0)


def test_scores_are_taken_at_the_last_token_even_if_it_is_a_pad(reward_folder: Path, scalar: ScalarModel) -> None:
    actual = scores_of(scalar, pad_pairs(arrays(PROMPTS), arrays(RESPONSES)))
    rows = [head_outputs(reward_folder, p + r) for p, r in zip(PROMPTS, RESPONSES, strict=True)]
    assert actual.tolist() == pytest.approx([float(row[-1]) for row in rows], abs=1e-5)
    # A model that looks for the last token that is not a pad would have taken these instead.
    assert abs(float(rows[1][-1] - rows[1][-2])) > 1e-3


def test_values_are_taken_before_each_response_token(reward_folder: Path, scalar: ScalarModel) -> None:
    pairs = pad_pairs(arrays(PROMPTS), arrays(RESPONSES))
    values = pairs.unpad(values_of(scalar, pairs))
    for prompt, response, row in zip(PROMPTS, RESPONSES, values, strict=True):
        expected = head_outputs(reward_folder, prompt + response)[len(prompt) - 1 : -1]
        assert row.tolist() == pytest.approx(expected.tolist(), abs=1e-5)


def test_a_new_head_is_small_but_not_zero(reward_folder: Path) -> None:
    torch.manual_seed(0)
    model = load_value(str(reward_folder), "bfloat16")
    assert model.head.weight.dtype == torch.bfloat16
    # Standard deviation 1 / (64 + 1) over 64 weights.
    assert float(model.head.weight.detach().float().std()) == pytest.approx(1 / 65, rel=0.3)
    assert model.head.bias.tolist() == [0]
    assert model(pad_pairs(arrays(PROMPTS), arrays(RESPONSES))).dtype == torch.float32


def test_gradient_checkpointing_changes_no_gradient(reward_folder: Path) -> None:
    gradients = []
    for checkpointing in (False, True):
        model = load_scalar(str(reward_folder), "float32").train()
        if checkpointing:
            recompute_activations(model)
        scores_of(model, pad_pairs(arrays(PROMPTS), arrays(RESPONSES))).sum().backward()
        gradients.append(torch.cat([p.grad.view(-1) for p in model.parameters() if p.grad is not None]))
    torch.testing.assert_close(*gradients, atol=1e-6, rtol=0)
    assert all(layer.gradient_checkpointing for layer in model.body.layers)


def test_what_a_model_and_a_tokenizer_are(policy_folder: Path) -> None:
    model = load_causal(str(policy_folder), "bfloat16")
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert max_length(model.config) == MAX_LENGTH
    assert load_tokenizer(str(policy_folder)).get_vocab() == make_tokenizer().get_vocab()


def test_folders_that_hold_no_model(tmp_path: Path, policy_folder: Path) -> None:
    (tmp_path / "config.json").write_text((policy_folder / "config.json").read_text())
    for load, kind in ((load_causal, "AutoModelForCausalLM"), (load_value, "AutoModel")):
        with pytest.raises(ConfigError, match=re.escape(f"model: {tmp_path} cannot be loaded as {kind}: ")):
            load(str(tmp_path), "float32")


@pytest.mark.parametrize("name", ["qwen2.5", "gemma3", "opt"])
@pytest.mark.parametrize("padded", [False, True])
def test_attention_over_padded_rows_is_that_of_transformers_bit_for_bit(
    name: str, padded: bool, tmp_path: Path
) -> None:
    folder = FAMILIES[name].make(tmp_path / name)
    ours: Any = load_causal(str(folder), "float32").eval()
    theirs = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="sdpa").eval()
    prompts, responses = plain.random_pairs(4, seed=2, longest=24)
    if not padded:
        prompts, responses = [np.resize(p, 20) for p in prompts], [np.resize(r, 10) for r in responses]
    pairs = pad_pairs(prompts, responses)
    assert bool(pairs.attention_mask.all()) is not padded  # type: ignore[union-attr]
    assert ours.config._attn_implementation == PADDED
    with torch.no_grad():
        given = {"position_ids": pairs.position_ids, "attention_mask": pairs.attention_mask.long()}  # type: ignore[union-attr]
        assert torch.equal(ours(**pairs.inputs).logits, theirs(pairs.input_ids, **given).logits)


def test_attention_is_the_one_asked_for(policy_folder: Path) -> None:
    for attention, taken in (("sdpa", PADDED), ("eager", "eager")):
        assert load_causal(str(policy_folder), "float32", attention).config._attn_implementation == taken


def test_flash_attention_is_taken_where_it_is_and_refused_by_its_field_elsewhere(policy_folder: Path) -> None:
    for load in (load_causal, load_value):
        if is_flash_attn_2_available():
            model: Any = load(str(policy_folder), "bfloat16", "flash_attention_2")
            assert model.config._attn_implementation == "flash_attention_2"
            continue
        with pytest.raises(ConfigError, match="attn_implementation: flash_attention_2 needs an NVIDIA GPU"):
            load(str(policy_folder), "bfloat16", "flash_attention_2")


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_folders_that_hold_no_tokenizer(kind: str, tmp_path: Path) -> None:
    folder = make_policy(tmp_path / kind, kind=kind, tied=True)  # type: ignore[arg-type]
    for file in folder.glob("tokenizer*"):
        file.unlink()
    with pytest.raises(ConfigError, match=re.escape(f"tokenizer: {folder} holds no tokenizer")):
        load_tokenizer(str(folder))


def test_a_scalar_model_needs_a_linear_head(tmp_path: Path) -> None:
    from transformers import BertConfig, BertForSequenceClassification

    tiny = BertConfig(vocab_size=8, hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8)
    BertForSequenceClassification(tiny).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="has no linear `score` head; causal architectures have one"):
        load_scalar(str(tmp_path), "float32")


def test_capped_attention_is_computed_capped(tmp_path: Path) -> None:
    """transformers leaves the cap out of torch's fused kernel, without a word."""
    folder = FAMILIES["gemma2"].make(tmp_path / "gemma2")
    ids = torch.arange(4, 40)[None]
    with torch.no_grad():
        actual, expected = load_causal(str(folder), "float32")(ids).logits, plain.language_model(folder)(ids).logits
    torch.testing.assert_close(actual, expected)
