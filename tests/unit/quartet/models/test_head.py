"""Models that compute log-probs inside their heads, against their logits."""

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, CohereConfig

from orchestrator.algorithms.registry import parse as parse_algorithm
from orchestrator.policy.trainer import PolicyTrainer
from quartet.columns import Columns
from quartet.config.learner import LoraConfig, OptimizerConfig, PolicyConfig
from quartet.models import head as heads
from quartet.models import tiles
from quartet.models.distribution import Distribution
from quartet.models.head import LogprobHead, answer_in_head
from quartet.models.loading import load_causal
from quartet.models.sequences import PairTensors, pair_tensors
from tests import plain
from tests.families import FAMILIES
from tests.learner_batches import PolicyBatch, train_policy
from tests.models import EOS, MAX_LENGTH, WORDS
from tests.response_logits import response_logits

PROMPTS, RESPONSES = plain.random_pairs(6, seed=4, longest=20)
DISTRIBUTION = Distribution(0.8, vocabulary=len(WORDS) - 3, min_new_tokens=3, end_ids=(EOS, 7))
ALWAYS = ("gemma2", "gpt2", "qwen2.5")
NAMES = [pytest.param(name, marks=() if name in ALWAYS else pytest.mark.exhaustive) for name in FAMILIES]


@pytest.fixture
def tiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes tiles so small that a tiny vocabulary has several of them."""
    monkeypatch.setitem(tiles.TILE_ELEMENTS, "cpu", 1)
    monkeypatch.setattr(tiles, "LEAST_WIDTH", 13)


def pairs_for(packing: bool) -> PairTensors:
    return pair_tensors(Columns.of_pairs(PROMPTS, RESPONSES), torch.device("cpu"), packing=packing, last=False)


def gradients(model: nn.Module, value: torch.Tensor) -> list[torch.Tensor]:
    return list(torch.autograd.grad(value.square().sum(), list(model.parameters()), allow_unused=True))


@pytest.mark.usefixtures("tiled")
@pytest.mark.parametrize("name", NAMES)
def test_each_family_answers_as_from_its_logits(name: str, tmp_path: Path) -> None:
    family = FAMILIES[name]
    model = load_causal(str(family.make(tmp_path / name)), "float32", packing=family.packs)
    pairs = pairs_for(family.packs)
    assert type(model.get_output_embeddings()) is LogprobHead  # type: ignore[operator]
    logits = response_logits(model, pairs)
    actual = torch.stack(DISTRIBUTION.asked_of(model, pairs, entropy=True))  # type: ignore[arg-type]
    expected = torch.stack(DISTRIBUTION.with_entropy(logits, pairs))
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=0)
    both = [gradients(model, value) for value in (actual, expected)]
    scale = max(float(each.abs().max()) for each in both[1])
    for one, other in zip(*both, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5 * scale, rtol=0)


def answers(model: Any) -> tuple[bool, bool]:
    """Returns True twice if the model's head is a LogprobHead, and if it computes the log-probs."""
    pairs = pairs_for(False)
    asked: list[heads.Asked] = []

    def noted(*args: Any, **kwargs: Any) -> torch.Tensor:
        asked.append(args)  # type: ignore[arg-type]
        return tiles.linear_logprobs(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(heads, "linear_logprobs", noted)
        actual, _ = Distribution().asked_of(model, pairs)
    torch.testing.assert_close(actual, Distribution().logprobs(response_logits(model, pairs), pairs))
    return type(model.get_output_embeddings()) is LogprobHead, bool(asked)


@pytest.mark.usefixtures("tiled")
def test_a_model_that_scales_its_logits_is_asked_for_these() -> None:
    """Cohere's logits are a multiple of its head's; nothing else but the comparison tells."""
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = CohereConfig(vocab_size=96, max_position_embeddings=MAX_LENGTH, logit_scale=0.25, **sizes)
    model = AutoModelForCausalLM.from_config(config)
    answer_in_head(model)
    assert answers(model) == (False, False)


@pytest.mark.usefixtures("tiled")
def test_a_head_that_is_replaced_later_gives_logits(tmp_path: Path) -> None:
    model: Any = load_causal(str(FAMILIES["bos"].make(tmp_path / "bos")), "float32")
    assert answers(model) == (True, True)
    head = model.get_output_embeddings()
    other = nn.Linear(head.in_features, head.out_features, bias=False)
    model.set_output_embeddings(other)
    assert answers(model) == (False, False)


@pytest.mark.usefixtures("tiled")
def test_a_decoder_with_a_function_of_its_own_keeps_it(tmp_path: Path) -> None:
    """Libraries that divide a model among devices give its parts such functions."""
    model = AutoModelForCausalLM.from_pretrained(FAMILIES["bos"].make(tmp_path / "bos"))
    decoder = model.get_decoder()
    own = decoder.forward = functools.partial(type(decoder).forward, decoder)
    answer_in_head(model)
    assert vars(decoder)["forward"] is own
    assert answers(model) == (False, False)


def test_logits_that_make_one_tile_go_the_plain_way(tmp_path: Path) -> None:
    model = load_causal(str(FAMILIES["bos"].make(tmp_path / "bos")), "float32")
    assert answers(model) == (True, False)


@pytest.mark.usefixtures("tiled")
@pytest.mark.parametrize(
    "options",
    [
        {"zero_stage": 3, "zero_persist_below": 0},
        {"zero_stage": 1, "packing": True, "gradient_checkpointing": True},
        {"lora": LoraConfig(rank=2)},
    ],
)
def test_a_policy_trains_as_with_logits(
    options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With ZeRO 3, which holds the head's weights only while the head is called; with adapters, whose head is
    frozen."""
    folder = FAMILIES["bos"].make(tmp_path / "bos")
    rows = [[0.1 * (-1) ** t for t in range(len(row))] for row in RESPONSES]
    arrays = [torch.tensor(row).numpy() for row in rows]
    batch = PolicyBatch(PROMPTS, RESPONSES, arrays, None, arrays, arrays, 0.1)
    measured = []
    for tile in (1, 1 << 22):
        monkeypatch.setitem(tiles.TILE_ELEMENTS, "cpu", tile)
        config = PolicyConfig(model=str(folder), optimizer=OptimizerConfig(learning_rate=1e-3), **options)
        algorithm = parse_algorithm({"epochs": 1, "minibatch_size": 6, "entropy_coef": 0.1, "kl": {"coef": 0}})
        trainer = PolicyTrainer(config, algorithm, DISTRIBUTION)
        measured.append([train_policy(trainer, batch, seed=step) for step in range(3)])
    for one, other in zip(*measured, strict=True):
        for name in ("loss", "entropy", "grad_norm"):
            assert one[name] == pytest.approx(other[name], rel=1e-4, abs=1e-6)
