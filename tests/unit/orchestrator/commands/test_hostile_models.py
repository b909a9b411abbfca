"""Model folders made by others: their code never runs, nothing is asked, and every oddity is one plain line."""

import json
import math
import os
import pty
import re
import select
import subprocess
import sys
import time
from collections import OrderedDict
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest
import torch
import yaml
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from quartet.config.base import ConfigError
from quartet.models.distribution import end_ids
from quartet.models.loading import check_whole, load_causal, load_config, load_tokenizer, shape_of_causal
from quartet.models.reading import check_sizes
from quartet.models.size import ModelSize
from tests.unit.preflights import args, problems

OWN = """
from pathlib import Path
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
Path(__file__).parent.joinpath("ran").touch()
Path({ran!r}).touch()
class Config(LlamaConfig):
    model_type = "own"
class Model(LlamaForCausalLM):
    config_class = Config
class Tokenizer(PreTrainedTokenizerFast):
    pass
"""
DEEP = '{"a":' + "[" * 50_000 + "]" * 50_000 + "}"
TYPED_S = 120
"""Longest time, in seconds, that `quartet check` may take at the terminal."""


@pytest.fixture
def folder(policy_folder: Path, tmp_path: Path) -> Path:
    return Path(copytree(policy_folder, tmp_path / "from elsewhere"))


def change(folder: Path, name: str, **values: Any) -> None:
    file = folder / name
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def with_code(folder: Path) -> Path:
    """Gives configuration, model and tokenizer classes that lie in the folder; returns the file that they touch."""
    ran = folder.parent / "ran"
    (folder / "own.py").write_text(OWN.format(ran=str(ran)))
    models = {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"}
    change(folder, "config.json", model_type="own", auto_map=models)
    tokenizers = {"AutoTokenizer": ["own.Tokenizer", "own.Tokenizer"]}
    change(folder, "tokenizer_config.json", tokenizer_class="Tokenizer", auto_map=tokenizers)
    return ran


def at_a_terminal(folder: Path, *arguments: str) -> tuple[int, str]:
    """Exit code and output of a `quartet` command at a terminal, where a person answers every question with y."""
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "orchestrator.cli", *arguments]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "COLUMNS": "500", "HF_HOME": str(folder / "hub")}
    with subprocess.Popen(
        command, cwd=folder, stdin=theirs, stdout=theirs, stderr=theirs, env=environment
    ) as running:
        os.close(theirs)
        told, end = b"", time.monotonic() + TYPED_S
        while time.monotonic() < end:
            if select.select([ours], [], [], 0.2)[0]:
                try:
                    told += os.read(ours, 1 << 16)
                except OSError:  # the other end is closed
                    break
                if told.endswith(b"[y/N] "):
                    os.write(ours, b"y\n")
        else:
            running.kill()
        code = running.wait()
    os.close(ours)
    return code, told.decode().replace("\r\n", "\n")


@pytest.mark.processes
def test_check_asks_nothing_at_a_terminal(raw: dict[str, Any], folder: Path, tmp_path: Path) -> None:
    """transformers asks there whether it may run the code of a folder; without a terminal it refuses by itself."""
    ran = with_code(folder)
    raw["orchestrator"]["policy"]["model"] = args(raw, "rollout")["model"] = str(folder)
    (tmp_path / "a.yaml").write_text(yaml.safe_dump(raw))
    code, told = at_a_terminal(tmp_path, "check", "a.yaml")
    assert code == 1, told
    assert "[y/N]" not in told
    assert "Traceback" not in told
    assert "orchestrator.policy.model" in told
    assert "it needs the Python code that the folder names as auto_map, which is never run" in told
    assert not ran.exists()


def test_models_and_tokenizers_with_code_are_refused(folder: Path) -> None:
    ran = with_code(folder)
    for read, what in (
        (load_config, "model"),
        (lambda path: shape_of_causal(path, "float32"), "model"),
        (lambda path: load_causal(path, "float32"), "model"),
        (load_tokenizer, "tokenizer"),
    ):
        with pytest.raises(ConfigError, match=rf"^{what}: {folder} .*auto_map, which is never run$"):
            read(str(folder))
    assert not ran.exists()


def test_code_that_transformers_does_not_need_is_ignored(folder: Path) -> None:
    """Many published folders of known architectures hold some."""
    ran = with_code(folder)
    change(folder, "config.json", model_type="llama")
    assert type(load_causal(str(folder), "float32")).__name__ == "LlamaForCausalLM"
    assert not ran.exists()


@pytest.mark.parametrize("key", ["_attn_implementation", "attn_implementation"])
def test_kernels_of_a_hub_are_refused(raw: dict[str, Any], folder: Path, tmp_path: Path, key: str) -> None:
    """transformers would download and run them, if it can."""
    change(folder, "config.json", **{key: "someone/kernel"})
    raw["orchestrator"]["policy"]["model"] = str(folder)
    field = "orchestrator.policy.model"
    assert f"{field}: {folder}/config.json names the code someone/kernel of a model hub; it is never run" in problems(
        raw, tmp_path
    )


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("hidden_size", "x"),
        ("num_attention_heads", 0),
        ("model_type", []),
        ("auto_map", 5),
        ("dtype", "os.system"),
        ("rope_parameters", 7),
        ("_attn_implementation", "nope"),
    ],
)
def test_values_that_make_no_model_are_one_line(folder: Path, key: str, value: Any) -> None:
    change(folder, "config.json", **{key: value})
    for read in (
        lambda path: shape_of_causal(path, "float32"),
        lambda path: check_whole(AutoModelForCausalLM, path),
        lambda path: ModelSize.of(load_config(path)),
    ):
        with pytest.raises(ConfigError, match=rf"^model: {folder}[^\n]+$"):
            read(str(folder))


@pytest.mark.parametrize(
    ("field", "value", "most"),
    [
        ("num_hidden_layers", 3_000_000, 1_000),
        ("n_layer", 1e9, 1_000),
        ("num_labels", 10**9, 100_000),
        ("num_local_experts", 3_000_000, 10_000),
        ("text_config.num_hidden_layers", 1_001, 1_000),
        ("depths", 10**9, 1_000),
        ("num_hidden_layers", math.nan, 1_000),
        ("head_dim", 10**11, 100_000),
        ("text_config.hidden_size", 10**11, 1_000_000),
        ("eos_token_id", 10**12, 10_000_000),
        ("max_position_embeddings", 10**13, 1_000_000_000),
    ],
)
def test_more_parts_than_any_model_has_are_refused_before_one_is_made(
    folder: Path, monkeypatch: pytest.MonkeyPatch, field: str, value: float, most: int
) -> None:
    """transformers makes objects for each of them: for minutes, or until no memory is left."""
    outer, _, inner = field.rpartition(".")
    change(folder, "config.json", **({outer: {inner: value}} if outer else {inner: value}))
    monkeypatch.setattr(AutoConfig, "from_pretrained", None)
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", None)
    said = re.escape(f"model: {folder}/config.json: {field}: {value:g}, where {most} are the most")
    for read in (load_config, load_tokenizer):
        with pytest.raises(ConfigError, match=f"^{said}$"):
            read(str(folder))


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("config.json", {"num_hidden_layers": -1}, "num_hidden_layers: -1, where 0 is the least"),
        ("config.json", {"head_dim": 10**400}, "head_dim: 1e+300, where 100000 are the most"),
        ("generation_config.json", {"eos_token_id": [1, 10**12]}, "eos_token_id: 1e+12, where 10000000 are the most"),
        ("tokenizer_config.json", {"extra_ids": 20_000}, "extra_ids: 20000, where 1000 are the most"),
        ("tokenizer_config.json", {"num_madeup_words": 10**9}, "num_madeup_words: 1e+09, where 1000 are the most"),
        ("tokenizer_config.json", {"other": {"tokens": 10**9}}, "other.tokens: 1e+09, where 100000 are the most"),
        (
            "tokenizer_config.json",
            {"added_tokens_decoder": {"9" * 5_000: {"content": "x"}}},
            "added_tokens_decoder: 1e+300, where 1000000 are the most",
        ),
        ("added_tokens.json", {"x": 10**12}, "x: 1e+12, where 1000000 are the most"),
    ],
)
def test_numbers_beyond_their_use_are_refused_by_file_and_field(
    folder: Path, monkeypatch: pytest.MonkeyPatch, name: str, content: dict[str, Any], said: str
) -> None:
    """Some tokenizers make a token for each, for hours."""
    file = folder / name
    file.write_text(json.dumps((json.loads(file.read_text()) if file.exists() else {}) | content))
    monkeypatch.setattr(AutoConfig, "from_pretrained", None)
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", None)
    for read in (load_config, load_tokenizer):
        with pytest.raises(ConfigError, match=f"^{re.escape(f'model: {file}: {said}')}$"):
            read(str(folder))


def test_numbers_that_published_folders_have_are_taken(folder: Path) -> None:
    decoder = {"128255": {"content": "<later>"}}
    change(folder, "tokenizer_config.json", model_max_length=10**30, extra_ids=125, added_tokens_decoder=decoder)
    change(
        folder,
        "config.json",
        max_position_embeddings=10_485_760,
        pad_token_id=-1,
        rope_theta=1e9,
        model_max_length=10**30,
        vision_feature_layer=-2,
    )
    check_sizes(str(folder))


@pytest.mark.parametrize("name", ["tokenizer.json", "chat_template.jinja", "model.safetensors"])
def test_a_pipe_in_the_place_of_a_file_is_refused_before_it_is_read(folder: Path, name: str) -> None:
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name)
    said = f"^model: {re.escape(str(folder / name))} is a pipe, socket or device; it should be a regular file$"
    for read in (load_config, load_tokenizer):
        with pytest.raises(ConfigError, match=said):
            read(str(folder))


def test_an_announced_reason_is_given_and_advice_to_trust_a_file_is_not(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    torch.save({"x": OrderedDict, "y": print}, folder / "pytorch_model.bin")
    with pytest.raises(ConfigError, match=r"are never made; save them as safetensors where you trust them$"):
        check_whole(AutoModelForCausalLM, str(folder))
    change(folder, "config.json", num_hidden_layers="2")
    with pytest.raises(ConfigError, match=r"num_hidden_layers'?: .*int"):
        load_config(str(folder))


def test_the_field_of_the_file_is_named(raw: dict[str, Any], folder: Path, tmp_path: Path) -> None:
    change(folder, "config.json", num_hidden_layers=3_000_000)
    raw["orchestrator"]["policy"]["model"] = str(folder)
    said = f"orchestrator.policy.model: {folder}/config.json: num_hidden_layers: 3e+06, where 1000 are the most"
    assert said in problems(raw, tmp_path)


def test_a_tokenizer_that_panics_while_it_loads_is_one_line(folder: Path) -> None:
    """tokenizers panics where a regular expression takes too many tries, here in the name of an added token."""
    endless = {"type": "Replace", "pattern": {"Regex": "(a+)+$"}, "content": "x"}
    added = {"id": 0, "content": "a" * 60 + "b", "special": False, "normalized": True}
    plain = {"single_word": False, "lstrip": False, "rstrip": False}
    change(folder, "tokenizer.json", normalizer=endless, added_tokens=[added | plain])
    with pytest.raises(ConfigError, match=rf"^tokenizer: {folder} holds no tokenizer that loads: .*retry-limit"):
        load_tokenizer(str(folder))


@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json", "tokenizer.json", "generation_config.json"])
def test_json_that_is_nested_too_deeply(raw: dict[str, Any], folder: Path, tmp_path: Path, name: str) -> None:
    tokenizer = load_tokenizer(str(folder))
    (folder / name).write_text(DEEP)
    if name == "generation_config.json":
        with pytest.raises(ConfigError, match=re.escape(f"model: {folder / name} names no tokens that end a text: ")):
            end_ids(str(folder), tokenizer)
    raw["orchestrator"]["policy"]["model"] = str(folder)
    lines = problems(raw, tmp_path)
    assert all(len(line) < 500 for line in lines)
    assert any(line.startswith("orchestrator.policy.model: ") and "recursion" in line for line in lines)
