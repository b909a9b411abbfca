"""A push's names, shapes and dtypes against what the replica's model needs."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import MixtralConfig, MixtralForCausalLM

from quartet.config.learner import LoraConfig, OptimizerConfig, PolicyConfig
from quartet.learner.learner import RankLearner
from quartet.learner.lora import adapters_for, add_adapters
from quartet.models.loading import load_causal, shape_of_causal
from quartet.weight_transfer.expected import ExpectedWeights
from quartet.weight_transfer.manifest import Manifest
from quartet.wire.errors import InvalidArgument
from tests.models import make_policy

KINDS: Any = ["llama", "qwen2", "qwen3"]


def expected(folder: Path, dtype: str = "float32") -> ExpectedWeights:
    return ExpectedWeights(shape_of_causal(str(folder), dtype), dtype)


def manifest(folder: Path, dtype: str = "float32") -> Manifest:
    return Manifest.of(dict(load_causal(str(folder), dtype).named_parameters()), 1 << 20)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_a_learner_of_the_same_model_pushes_fits(tmp_path: Path, kind: Any, tied: bool, dtype: str) -> None:
    folder = make_policy(tmp_path / "policy", kind=kind, tied=tied)
    right = manifest(folder, dtype)
    wanted = expected(folder, dtype)
    wanted.check(right)
    assert len(right.pack()) <= wanted.longest_manifest


def test_experts_fit(tmp_path: Path) -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = MixtralConfig(vocab_size=64, num_key_value_heads=1, num_local_experts=4, **sizes)
    MixtralForCausalLM(config).save_pretrained(tmp_path)
    expected(tmp_path).check(manifest(tmp_path))


def test_a_tied_head_may_come_too(tmp_path: Path) -> None:
    folder = make_policy(tmp_path / "policy", kind="llama", tied=True)
    weights = dict(load_causal(str(folder), "float32").named_parameters(remove_duplicate=False))
    assert "lm_head.weight" in weights
    expected(folder).check(Manifest.of(weights, 1 << 20))
    del weights["model.embed_tokens.weight"]
    with pytest.raises(InvalidArgument, match=r"the push lacks model.embed_tokens.weight$"):
        expected(folder).check(Manifest.of(weights, 1 << 20))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"hidden_size": 128},
            "sizes differ: model.embed_tokens.weight float32[335, 128] pushed, float32[335, 64] here, ",
        ),
        (
            {"num_hidden_layers": 3},
            "this replica's model lacks model.layers.2.self_attn.q_proj.weight, ",
        ),
        ({"num_hidden_layers": 1}, "the push lacks model.layers.1.self_attn.q_proj.weight, "),
        ({"num_key_value_heads": 1}, "k_proj.weight float32[32, 64] pushed, float32[64, 64] here"),
        ({"vocab_size": 65}, "lm_head.weight float32[65, 64] pushed, float32[335, 64] here"),
    ],
)
def test_another_model_is_refused_and_weights_are_named_on_both_sides(
    policy_folder: Path, tmp_path: Path, change: dict[str, int], message: str
) -> None:
    other = make_policy(tmp_path / "other", kind="llama", tied=False, **change)
    with pytest.raises(InvalidArgument) as caught:
        expected(policy_folder).check(manifest(other))
    assert message in str(caught.value)
    assert len(str(caught.value)) < 600


def test_another_arithmetic_is_refused(policy_folder: Path) -> None:
    with pytest.raises(
        InvalidArgument, match=r"embed_tokens.weight bfloat16\[335, 64\] pushed, float32\[335, 64\] here"
    ):
        expected(policy_folder).check(manifest(policy_folder, "bfloat16"))


def test_a_terabyte_is_refused_by_name(policy_folder: Path) -> None:
    right = manifest(policy_folder)
    huge = Manifest(
        (*right.names, "more"), (*right.dtypes, "float32"), (*right.shapes, (1 << 38,)), right.bucket_bytes
    )
    with pytest.raises(InvalidArgument, match=r"this replica's model lacks more$"):
        expected(policy_folder).check(huge)


def test_adapters_alone_fit_and_no_others(policy_folder: Path) -> None:
    added = adapters_for(str(policy_folder), "float32", LoraConfig(rank=2))
    model = shape_of_causal(str(policy_folder), "float32")
    wanted = ExpectedWeights(model, "float32", added)
    right = Manifest.of(added, 1 << 20)
    wanted.check(right)
    assert len(right.pack()) <= wanted.longest_manifest
    assert wanted.shapes == {name: tuple(tensor.shape) for name, tensor in added.items()}
    with pytest.raises(InvalidArgument, match=r"^manifest: not the adapters .* lacks .*lora_A.weight, .* lacks "):
        wanted.check(manifest(policy_folder))
    other = adapters_for(str(policy_folder), "float32", LoraConfig(rank=3))
    with pytest.raises(InvalidArgument, match=r"lora_A.weight float32\[3, 64\] pushed, float32\[2, 64\] here"):
        wanted.check(Manifest.of(other, 1 << 20))


def test_adapters_push_the_models_own_weights(policy_folder: Path) -> None:
    config = PolicyConfig(
        model=str(policy_folder), optimizer=OptimizerConfig(learning_rate=1e-3), lora=LoraConfig(rank=2)
    )
    learner = RankLearner(add_adapters(load_causal(str(policy_folder), "float32"), config.lora), config, None)
    shapes = learner.shapes()
    assert all(tensor.device == torch.device("meta") for tensor in shapes.values())
    expected(policy_folder).check(Manifest.of(shapes, 1 << 20))
