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
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest
import yaml
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from quartet.config.base import ConfigError
from quartet.models.distribution import end_ids
from quartet.models.loading import check_whole, load_causal, load_config, load_tokenizer, shape_of_causal
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
