"""Models that engine or learner would refuse, or compute something else with: `quartet check` names them."""

import json
import os
import re
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Gemma4TextConfig, LlamaConfig, MambaConfig

from orchestrator.commands.checks.architectures import unfit_heads
from orchestrator.commands.checks.models import broken_weights
from quartet.config.base import ConfigError
from quartet.models.loading import check_whole, load_causal
from quartet.models.size import head_size
from services.rollout.config import RolloutConfig
from services.rollout.engines import ENGINES
from tests.families import FAMILIES
from tests.models import WORDS, make_policy, make_reward
from tests.unit.preflights import args, checked, problems


@pytest.fixture
def copy(policy_folder: Path, tmp_path: Path) -> Path:
    return Path(copytree(policy_folder, tmp_path / "copy"))


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (lambda whole: None, "is missing"),
        (lambda whole: whole[:-1], "is incomplete or no file of weights"),
        (lambda whole: b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n", "is incomplete or no"),
    ],
)
def test_weights_that_are_not_all_there(copy: Path, content: Any, said: str) -> None:
    """A copy that broke off, and git's pointer in the place of a large file."""
    assert list(broken_weights(str(copy))) == []
    file = copy / "model.safetensors"
    weights = load_file(file)
    first, second = (copy / f"model-0000{part}-of-00002.safetensors" for part in (1, 2))
    parts = {name: first.name if at % 2 else second.name for at, name in enumerate(weights)}
    for part in (first, second):
        save_file({name: weights[name] for name, its in parts.items() if its == part.name}, part, {"format": "pt"})
    file.unlink()
    (copy / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": parts}))
    assert list(broken_weights(str(copy))) == []
    AutoModelForCausalLM.from_pretrained(copy)  # the index is one
    whole = second.read_bytes()
    second.unlink()
    if (changed := content(whole)) is not None:
        second.write_bytes(changed)
    (line,) = broken_weights(str(copy))
    assert line.startswith(f"{second} {said}")


def test_weights_that_no_machine_can_map_are_checked_by_their_headers(copy: Path) -> None:
    file, size = copy / "model.safetensors", 1 << 41
    content = file.read_bytes()
    start = 8 + int.from_bytes(content[:8], "little")
    header, held = json.loads(content[8:start]), len(content) - start
    header["unused"] = {"dtype": "U8", "shape": [size], "data_offsets": [held, held + size]}
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + content[start:])
    os.truncate(file, file.stat().st_size + size)  # without blocks on the disk
    assert list(broken_weights(str(copy))) == []
    check_whole(AutoModelForCausalLM, str(copy))
    os.truncate(file, file.stat().st_size - 1)
    [line] = broken_weights(str(copy))
    assert line.startswith(f"{file} is incomplete or no file of weights")


def test_a_model_without_weights_is_named_once(raw: dict[str, Any], copy: Path, tmp_path: Path) -> None:
    (copy / "model.safetensors").unlink()
    raw["orchestrator"]["policy"]["model"] = args(raw, "rollout")["model"] = str(copy)
    assert problems(raw, tmp_path) == [
        f"orchestrator.policy.model: {copy} holds no weights; it should hold model.safetensors, or its parts and "
        "their index"
    ]
    for index in ("[]", "{", '{"metadata": {}, "weight_map": 1}', '{"weight_map": {}}'):
        (copy / "model.safetensors.index.json").write_text(index)
        said = f"{copy}/model.safetensors.index.json is no index of weights; copy it again"
        assert list(broken_weights(str(copy))) == [said]


def without(folder: Path, name: str, instead: torch.Tensor | None = None) -> None:
    weights = load_file(folder / "model.safetensors")
    del weights[name]
    if instead is not None:
        weights[name] = instead
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


def test_weights_that_would_be_made_up(raw: dict[str, Any], copy: Path, reward_folder: Path, tmp_path: Path) -> None:
    """transformers draws them at random, so that learner, reference and critic would each have others."""
    raw["orchestrator"]["policy"]["model"] = str(copy)
    name = "model.layers.1.mlp.down_proj.weight"
    without(copy, name, torch.zeros(3, 4))
    said = f"orchestrator.policy.model: {copy} holds {name} [3, 4], of another shape than its config.json says"
    assert problems(raw, tmp_path) == [said]
    without(copy, name)
    said = f"{copy} lacks {name}, which would be random; it should hold all weights of LlamaForCausalLM"
    assert problems(raw, tmp_path) == [f"orchestrator.policy.model: {said}"]
    with pytest.raises(ValueError, match=re.escape(said)):
        load_causal(str(copy), "float32")
    raw["orchestrator"]["policy"]["model"] = str(reward_folder)  # a classifier has no lm_head
    assert problems(raw, tmp_path)[0].startswith(f"orchestrator.policy.model: {reward_folder} lacks lm_head.weight, ")


def test_a_reward_model_has_a_head_of_one_label(raw: dict[str, Any], policy_folder: Path, tmp_path: Path) -> None:
    field, scorer = "applications.reward.args.scorer.model", args(raw, "reward")["scorer"]
    scorer["model"] = str(policy_folder)  # its config says nothing of labels
    assert problems(raw, tmp_path)[0].startswith(
        f"{field}: {policy_folder} lacks score.weight, which would be random"
    )
    two = make_reward(tmp_path / "two", labels=2)
    scorer["model"] = str(two)
    assert problems(raw, tmp_path) == [f"{field}: {two} has num_labels 2; it must have 1"]


def test_weights_in_torchs_own_format(copy: Path) -> None:
    weights = load_file(copy / "model.safetensors")
    (copy / "model.safetensors").unlink()
    file = copy / "pytorch_model.bin"
    torch.save(weights, file)
    check_whole(AutoModelForCausalLM, str(copy))
    whole = file.read_bytes()
    for content in (whole[:-1000], b"", b"version https://git-lfs.github.com/spec/v1\n"):
        file.write_bytes(content)
        with pytest.raises(ConfigError, match=rf"^model: {copy} cannot be loaded as AutoModelForCausalLM: [^\n]+$"):
            check_whole(AutoModelForCausalLM, str(copy))


def test_models_that_cannot_be_packed(raw: dict[str, Any], reward_folder: Path, tmp_path: Path) -> None:
    folder = str(FAMILIES["gemma2"].make(tmp_path / "gemma2"))
    raw["orchestrator"]["policy"] |= {"model": folder, "packing": True}
    for name in ("rollout", "reference"):
        args(raw, name)["model"] = folder
    args(raw, "reference")["packing"] = args(raw, "critic")["packing"] = args(raw, "reward")["scorer"]["packing"] = (
        True
    )
    refused = f"packing: {folder} (gemma2) has layers without plain causal attention; set packing to false"
    assert problems(raw, tmp_path) == [
        f"orchestrator.policy.{refused}",
        f"applications.reference.args.{refused}",
    ]
    with pytest.raises(ValueError, match=re.escape(refused)):
        load_causal(folder, "float32", packing=True)
    raw["orchestrator"]["policy"]["packing"] = args(raw, "reference")["packing"] = False
    checked(raw, tmp_path)


def test_heads_that_the_engine_has_no_kernel_for_on_a_cpu(raw: dict[str, Any], tmp_path: Path) -> None:
    small = str(make_policy(tmp_path / "small", kind="llama", tied=False, head_dim=16))
    args(raw, "rollout")["model"] = raw["orchestrator"]["policy"]["model"] = small
    assert problems(raw, tmp_path) == [
        f"applications.rollout.args.model: attention heads of {small} have 16 numbers, which vllm has no kernel for "
        "on a CPU; its sizes there are 32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512"
    ]
    [rollout] = [each for each in raw["applications"] if each["name"] == "rollout"]
    rollout["deployments"][0]["ray_actor_options"] = {"num_gpus": 1}
    checked(raw, tmp_path)
    # Without attention, or with several sizes, nothing is refused.
    for config in (MambaConfig(), Gemma4TextConfig()):
        assert head_size(config) is None
    # Where no size is given, the heads divide the hidden numbers.
    LlamaConfig(hidden_size=96, num_attention_heads=2).save_pretrained(tmp_path / "divided")
    [line] = unfit_heads(RolloutConfig(model=str(tmp_path / "divided")), "rollout")
    assert " have 48 numbers" in line


def test_the_sizes_of_heads_are_those_of_the_engine() -> None:
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    assert list(ENGINES["vllm"].cpu_head_sizes or ()) == CPUAttentionBackend.get_supported_head_sizes()


def test_stop_tokens_are_the_tokenizers(raw: dict[str, Any], tmp_path: Path) -> None:
    raw["orchestrator"]["sampling"]["stop_token_ids"] = [5, len(WORDS), 70]
    assert problems(raw, tmp_path) == [
        "orchestrator.sampling.stop_token_ids: 64, 70, but the tokenizer's ids end at 63, and no other is sampled"
    ]
    raw["orchestrator"]["sampling"]["stop_token_ids"] = list(range(64)) * 5
    [line] = problems(raw, tmp_path)
    assert line.startswith("orchestrator.sampling.stop_token_ids: ")
