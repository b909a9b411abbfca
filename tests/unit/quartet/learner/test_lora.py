"""Low-rank adapters: what they train, and what is pushed and saved with them."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from orchestrator.algorithms.ppo import PPO
from orchestrator.policy.trainer import PolicyTrainer
from quartet.config.base import ConfigError
from quartet.config.learner import LoraConfig, OptimizerConfig, PolicyConfig
from quartet.learner import module
from quartet.learner.lora import NAME, adapted_layer, adapters_for, add_adapters, weights_of
from quartet.models.distribution import Distribution
from quartet.models.loading import load_causal
from quartet.ranks.ranks import Ranks
from services.critic.config import CriticConfig
from services.critic.trainer import CriticTrainer
from tests.families import FAMILIES
from tests.learner_batches import logprob_rows
from tests.models import make_policy
from tests.plain import furthest
from tests.unit.layouts import GROUP, Bench
from tests.unit.naive import PROMPTS, RESPONSES, arrays

RANK = 3
LORA = LoraConfig(rank=RANK, alpha=6)


def make_trainer(folder: Path, **options: Any) -> PolicyTrainer:
    config = PolicyConfig(model=str(folder), optimizer=OptimizerConfig(learning_rate=1e-2), **options)
    return PolicyTrainer(config, PPO(), Distribution(0.7))


def draw_adapters(trainer: PolicyTrainer) -> None:
    """Gives all that is trained random weights: fresh adapters change nothing."""
    for parameter in trainer.learner.module.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter, std=0.1)


@pytest.mark.parametrize(("kind", "tied"), [("llama", False), ("llama", True), ("qwen2", False)])
def test_fresh_adapters_change_neither_names_nor_weights(tmp_path: Path, kind: Any, tied: bool) -> None:
    folder = make_policy(tmp_path / "policy", kind=kind, tied=tied)
    plain = dict(load_causal(str(folder), "float32").named_parameters())
    adapted = add_adapters(load_causal(str(folder), "float32"), LORA)
    actual = {weight.name: weight.merged() for weight in weights_of(adapted)}
    assert list(actual) == list(plain)
    assert all(torch.equal(actual[name], plain[name]) for name in plain)
    parts = {weight.name: len(weight.parts) for weight in weights_of(adapted)}
    assert (parts["model.layers.0.self_attn.q_proj.weight"], parts["model.embed_tokens.weight"]) == (3, 1)


def test_only_adapters_are_trained(policy_folder: Path) -> None:
    model = add_adapters(load_causal(str(policy_folder), "float32"), LORA)
    trained = {name: p.numel() for name, p in model.named_parameters() if p.requires_grad}
    assert all(".lora_" in name for name in trained)
    # Two layers, hidden size 64, feed-forward 128: four maps of 64 to 64 and three between 64 and 128.
    assert sum(trained.values()) == 2 * RANK * (4 * (64 + 64) + 3 * (64 + 128))


def test_adapters_where_they_are_asked_for(policy_folder: Path) -> None:
    model = add_adapters(load_causal(str(policy_folder), "float32"), LoraConfig(rank=2, target_modules=("q_proj",)))
    assert {name.split(".")[-4] for name, p in model.named_parameters() if p.requires_grad} == {"q_proj"}
    with pytest.raises(ConfigError, match=r"lora.target_modules: .*nowhere"):
        add_adapters(load_causal(str(policy_folder), "float32"), LoraConfig(target_modules=("nowhere",)))


@pytest.mark.parametrize("name", ["embed_tokens", "lm_head"])
def test_a_matrix_of_two_layers_gets_no_adapter_and_that_of_one_is_only_pushed_merged(
    tmp_path: Path, name: str
) -> None:
    lora = LoraConfig(rank=2, target_modules=("q_proj", name))
    tied, untied = (make_policy(tmp_path / str(tied), kind="llama", tied=tied) for tied in (True, False))
    both = "model.embed_tokens.weight and lm_head.weight are one matrix"
    with pytest.raises(ConfigError, match=rf"^lora.target_modules: {both}, which gets no adapter"):
        add_adapters(load_causal(str(tied), "float32"), lora)
    weights = {weight.name: weight for weight in weights_of(add_adapters(load_causal(str(untied), "float32"), lora))}
    adapted = {each for each, weight in weights.items() if weight.layer is not None and "q_proj" not in each}
    assert [each.split(".")[-2] for each in adapted] == [name]
    with pytest.raises(ConfigError, match=rf"^lora.target_modules: .*{name}: adapters of embeddings and head can on"):
        adapters_for(str(untied), "float32", lora)


def test_what_is_pushed_needs_no_factor(policy_folder: Path) -> None:
    lora = LoraConfig(rank=3, alpha=7.5)
    config = PolicyConfig(model=str(policy_folder), optimizer=OptimizerConfig(learning_rate=1e-2), lora=lora)
    trainer = PolicyTrainer(config, PPO(epochs=1, minibatch_size=5), Distribution(), adapters=True)
    draw_adapters(trainer)
    sent = dict(trainer.sending._weights())
    assert not any(tensor.requires_grad for name, tensor in sent.items() if ".lora_B" in name)
    source = load_causal(str(policy_folder), "float32").state_dict()
    for name, merged in trainer.learner.full_weights():
        layer = name.removesuffix(".weight")
        if f"{layer}.lora_A.weight" in sent:
            change = sent[f"{layer}.lora_B.weight"] @ sent[f"{layer}.lora_A.weight"]
            assert float((merged - source[name] - change).abs().max()) < 1e-6


def test_the_saved_policy_is_the_trained_one_and_differs_by_matrices_of_low_rank(
    policy_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "GROUP_ELEMENTS", GROUP)  # as the bench has it, and afterwards as it was
    bench = Bench(policy_folder, policy_folder, Ranks())
    actual = bench.policy({"lora": LORA})
    assert furthest(actual["after"], actual["before"]) > 0.1
    source = AutoModelForCausalLM.from_pretrained(policy_folder).state_dict()
    assert list(actual["weights"]) == list(source)
    for name, tensor in actual["weights"].items():
        change = torch.from_numpy(tensor) - source[name]
        sizes = torch.linalg.svdvals(change) if change.dim() == 2 else change.abs()
        if "_proj" in name:
            assert float(sizes[RANK - 1]) > 1e-4
            assert float(sizes[RANK]) < 1e-6
        else:
            assert float(sizes.max()) == 0


@pytest.mark.parametrize("zero_stage", [0, 3])
def test_adapters_alone_are_those_that_peft_would_save(
    policy_folder: Path, monkeypatch: pytest.MonkeyPatch, zero_stage: int
) -> None:
    monkeypatch.setattr(module, "GATHER_BYTES", 10_000)  # some adapters at a time
    trainer = make_trainer(policy_folder, lora=LORA, zero_stage=zero_stage)
    learner = trainer.learner
    shapes = learner.shapes(adapters=True)
    assert shapes["model.layers.1.mlp.down_proj.lora_A.weight"].shape == (RANK, 128)
    assert shapes["model.layers.1.mlp.down_proj.lora_B.weight"].shape == (64, RANK)
    assert len(shapes) == 2 * 7 * 2
    own = add_adapters(load_causal(str(policy_folder), "float32"), LORA)  # of the same seed
    expected = {name.replace(".default.", "."): p for name, p in own.named_parameters() if p.requires_grad}
    actual = {name: tensor.clone() for name, tensor in learner.full_weights(adapters=True)}
    assert list(actual) == list(shapes) == list(expected)
    assert all(torch.equal(actual[name], expected[name]) for name in expected)
    ours = adapters_for(str(policy_folder), "float32", LORA)
    assert {name: tensor.shape for name, tensor in ours.items()} == {n: t.shape for n, t in shapes.items()}
    assert {adapted_layer(name) for name in ours} == {name.split(".")[-3] for name in expected}


def test_adapters_of_experts_in_one_parameter_are_not_pushed_alone(tmp_path: Path) -> None:
    folder = FAMILIES["qwen3-moe"].make(tmp_path / "experts")
    with pytest.raises(ConfigError, match=r"^lora: model.layers.0.mlp.experts holds several matrices in one param"):
        adapters_for(str(folder), "float32", LORA)


@pytest.mark.parametrize(
    ("family", "targets"), [("qwen2.5", None), ("gpt2", None), ("qwen3", ("embed_tokens", "layers.1.mlp.up_proj"))]
)
def test_the_adapters_that_are_saved_beside_the_model_compute_as_it_with_peft(
    tmp_path: Path, family: str, targets: tuple[str, ...] | None
) -> None:
    folder = FAMILIES[family].make(tmp_path / family)
    trainer = make_trainer(folder, lora=LORA.model_copy(update={"target_modules": targets}))
    draw_adapters(trainer)
    saved = tmp_path / "saved"
    trainer.learner.save(saved)
    whole = AutoModelForCausalLM.from_pretrained(saved)
    adapted = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folder), saved / "adapters")
    ids = torch.arange(4, 40)[None]
    with torch.no_grad():
        plain = AutoModelForCausalLM.from_pretrained(folder)(ids).logits
        merged, alone = whole(ids).logits, adapted(ids).logits
    assert float((alone - plain).abs().max()) > 0.1
    assert float((alone - merged).abs().max()) < 1e-4
    named = {name.replace(f".{NAME}", "") for name, _ in adapted.named_parameters() if ".lora_" in name}
    assert load_file(saved / "adapters" / "adapter_model.safetensors").keys() == named
    described = json.loads((saved / "adapters" / "adapter_config.json").read_text())
    assert (described["base_model_name_or_path"], described["task_type"]) == (str(folder), "CAUSAL_LM")
    # A second time in its place, and as part of a snapshot.
    trainer.learner.save(saved)
    trainer.learner.take_snapshot(tmp_path / "snapshot", 1)
    trainer.learner.write_snapshot()
    files = {file.name for file in (tmp_path / "snapshot" / "model" / "adapters").iterdir()}
    assert {"adapter_config.json", "adapter_model.safetensors"} <= files


def test_adapters_with_a_head_of_their_own_or_of_experts_are_saved_merged_only(
    policy_folder: Path, tmp_path: Path
) -> None:
    config = CriticConfig(model=str(policy_folder), optimizer=OptimizerConfig(learning_rate=1e-2), lora=LORA)
    critic = CriticTrainer(config)
    critic.learner.save(tmp_path / "critic")
    experts = make_trainer(FAMILIES["qwen3-moe"].make(tmp_path / "experts"), lora=LORA)
    experts.learner.save(tmp_path / "policy")
    for name in ("critic", "policy"):
        assert (tmp_path / name / "model.safetensors").exists()
        assert not (tmp_path / name / "adapters").exists()


def test_what_is_saved_and_sent_computes_as_the_adapted_model(policy_folder: Path, tmp_path: Path) -> None:
    trainer = make_trainer(policy_folder, lora=LORA)
    draw_adapters(trainer)
    expected = logprob_rows(trainer, arrays(PROMPTS), arrays(RESPONSES))
    assert furthest(expected, logprob_rows(make_trainer(policy_folder), arrays(PROMPTS), arrays(RESPONSES))) > 0.1
    trainer.learner.save(tmp_path / "saved")
    again = make_trainer(tmp_path / "saved")
    assert furthest(logprob_rows(again, arrays(PROMPTS), arrays(RESPONSES)), expected) < 1e-5
    sent, whole = dict(trainer.learner.full_weights()), dict(again.learner.full_weights())
    assert list(sent) == list(whole) == list(trainer.learner.shapes())
    for name, tensor in sent.items():
        np.testing.assert_allclose(tensor.numpy(), whole[name].numpy(), atol=1e-6)
