"""Facts of a file with which a service would not start, told before anything is started."""

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest
import torch
import yaml
from ray._common.utils import RESOURCE_CONSTRAINT_PREFIX
from ray._private.resource_and_label_spec import ResourceAndLabelSpec
from transformers import LlamaConfig

from orchestrator.commands.checks.startable import ACCELERATOR, OWN_RESOURCES, beyond_this_machine, unstartable
from orchestrator.deployment.file import Deployment
from services.rollout.config import RolloutConfig
from services.rollout.engines import problem_of_own, unknown_parsers
from tests.unit.preflights import application, args, ask, checked, problems, refused

Change = Callable[[dict[str, Any]], object]


@pytest.fixture
def without_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.mark.usefixtures("without_gpu")
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda raw: args(raw, "rollout").pop("kv_cache_mib"),
            "applications.rollout.args.kv_cache_mib: required on a machine without a GPU, e.g. 256",
        ),
        (
            lambda raw: args(raw, "rollout").update(max_num_batched_tokens=127),
            "applications.rollout.args.max_num_batched_tokens: 127, but max_num_seqs is 128",
        ),
        (
            lambda raw: args(raw, "rollout").update(tensor_parallel_size=3),
            "applications.rollout.args.tensor_parallel_size: should divide the model's num_attention_heads ",
        ),
        (
            lambda raw: [
                args(raw, "rollout").update(tensor_parallel_size=2, kv_cache_mib=None),
                ask(raw, "rollout", num_gpus=1),
            ],
            "applications.rollout.args.tensor_parallel_size: 2, but a replica's num_gpus is 1",
        ),
        (
            lambda raw: [args(raw, "reference").update(offload=True), ask(raw, "reference", num_gpus=2)],
            "applications.reference.args.offload: for a model on one GPU; with num_gpus 2 set it to false",
        ),
        (
            lambda raw: args(raw, "critic").update(
                attn_implementation="flash_attention_2", dtype="bfloat16", zero_stage=1
            ),
            "applications.critic.args.attn_implementation: flash_attention_2 needs a GPU, but num_gpus is 0",
        ),
        (
            lambda raw: args(raw, "critic").update(lora={"target_modules": ["qkv"]}),
            "applications.critic.args.lora.target_modules: ",
        ),
        (
            lambda raw: raw["orchestrator"]["policy"].update(lora={"target_modules": ["qkv", "model.out"]}),
            "orchestrator.policy.lora.target_modules: ",
        ),
        (
            lambda raw: raw["orchestrator"]["policy"].update(lora={"target_modules": ["q_proj", "norm"]}),
            "orchestrator.policy.lora.target_modules: Target module ",
        ),
        (
            lambda raw: args(raw, "reward").update(scorer={"kind": "function", "function": "itertools:chain"}),
            "applications.reward.args.scorer.function: itertools:chain has no Python source to identify it by",
        ),
    ],
)
def test_a_service_that_would_not_start_is_refused(
    raw: dict[str, Any], tmp_path: Path, change: Change, message: str
) -> None:
    checked(raw, tmp_path)
    change(raw)
    refused(raw, tmp_path, message)


def test_each_layer_that_is_to_get_an_adapter_has_to_be_there(raw: dict[str, Any], tmp_path: Path) -> None:
    raw["orchestrator"]["policy"]["lora"] = {"target_modules": ["q_proj", "qkv", "model.out"]}
    [told] = problems(raw, tmp_path)
    assert re.search(r"lora\.target_modules: .* has no layer that is called qkv or model\.out; its linear", told)


def test_a_head_whose_adapter_no_engine_computes_with_is_refused(raw: dict[str, Any], tmp_path: Path) -> None:
    lora = {"target_modules": ["q_proj", "lm_head"]}
    raw["orchestrator"]["policy"]["lora"] = args(raw, "rollout")["adapters"] = lora
    raw["orchestrator"]["weights"] = {"adapters": True}
    field = "applications.rollout.args.adapters.target_modules"
    refused(raw, tmp_path, f"{field}: lm_head: adapters of embeddings and head can only be pushed merged; leave ")


def test_a_parser_that_the_engine_does_not_have_is_refused(raw: dict[str, Any], tmp_path: Path) -> None:
    args(raw, "rollout").update(tool_parser="hermess", reasoning_parser="qwen3")
    [told] = [line for line in problems(raw, tmp_path) if "parser" in line]
    assert re.match(r"applications\.rollout\.args\.tool_parser: should be one of .*\bhermes, .*; got 'hermess'", told)


def test_parsers_are_left_to_the_replica_where_its_engine_is_not(
    raw: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    named: Any = {"model": args(raw, "rollout")["model"], "tool_parser": "hermess"}
    assert unknown_parsers(RolloutConfig(**named, engine="examples.plain_engine:start")) == {}
    (tmp_path / "vllm.py").write_text("raise ModuleNotFoundError('vllm')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert unknown_parsers(RolloutConfig(**named)) == {}


@pytest.mark.parametrize(
    ("engine", "problem"),
    [
        ("no_such_engine:start", "'no_such_engine:start' should be package.module:name, but cannot be imported: "),
        ("examples.plain_engine:begin", "'examples.plain_engine:begin' should be package.module:name, but cannot "),
        ("services.rollout.engines:TOLD_S", "'services.rollout.engines:TOLD_S' is not a function"),
    ],
)
def test_an_own_engine_that_is_not_there_is_told_before_a_start(
    raw: dict[str, Any], tmp_path: Path, engine: str, problem: str
) -> None:
    args(raw, "rollout")["engine"] = engine
    refused(raw, tmp_path, f"applications.rollout.args.engine: {problem}")
    application(raw, "rollout").setdefault("runtime_env", {})["working_dir"] = "s3://elsewhere/code.zip"
    checked(raw, tmp_path)


def test_an_own_engine_is_looked_at_in_another_process(
    raw: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The module may change the environment, print, and leave threads behind."""
    (tmp_path / "engine_of_a_user.py").write_text(
        "import atexit, os, threading\n"
        "os.environ['OF_THE_ENGINE'] = '1'\n"
        "atexit.register(print, 'the end')\n"
        "threading.Thread(target=threading.Event().wait).start()\n"
        "async def start(config): ...\n"
    )
    monkeypatch.setenv("QUARTET_FUNCTIONS", str(tmp_path))
    config = RolloutConfig(model=args(raw, "rollout")["model"], engine="engine_of_a_user:start")
    assert problem_of_own(config, "engine") == ""
    assert "OF_THE_ENGINE" not in os.environ
    (tmp_path / "engine_of_a_user.py").write_text("raise SystemExit(3)\n")
    assert problem_of_own(config, "engine") == "engine: importing engine_of_a_user fails with SystemExit: 3"
    # What it tells of itself elsewhere, or not at all, the replica will tell.
    for elsewhere in ("os.dup2(2, 1)", "os._exit(0)", "os.write(1, b'not JSON')\nos._exit(0)"):
        (tmp_path / "engine_of_a_user.py").write_text(f"import os\n{elsewhere}\nasync def start(config): ...\n")
        assert problem_of_own(config, "engine") == ""


@pytest.mark.usefixtures("without_gpu")
def test_the_cache_has_to_hold_one_longest_response(raw: dict[str, Any], tmp_path: Path) -> None:
    """Keys and values of 2 layers with 4 heads of 32 numbers of 4 bytes are 2 KiB a token, 8 MiB for 4096 tokens."""
    model = LlamaConfig(
        hidden_size=256,
        num_attention_heads=8,
        num_key_value_heads=4,
        num_hidden_layers=2,
        max_position_embeddings=4096,
    )
    model.save_pretrained(tmp_path)
    given = {"model": str(tmp_path), "max_num_seqs": 8}
    application(raw, "rollout")["args"] = given
    path = tmp_path / "a.yaml"

    def told(**more: Any) -> list[str]:
        given.update(more)
        path.write_text(yaml.safe_dump(raw))
        return [line for line in unstartable(Deployment.load(path)) if "kv_cache_mib" in line]

    assert told(kv_cache_mib=8, max_length=4096) == []
    assert told(kv_cache_mib=7) == [
        "applications.rollout.args.kv_cache_mib: 7, but one response of max_length 4096 takes 8; raise it, or lower "
        "max_length"
    ]
    # Without max_length it is 2048 tokens.
    assert told(kv_cache_mib=4, max_length=None) == []
    assert told(kv_cache_mib=3, max_length=None) != []
    # Of an engine in parts each has some of the 4 heads with keys and values, and one at least.
    for parts, least in ((2, 4), (4, 2), (8, 2)):
        assert told(kv_cache_mib=least, max_length=4096, tensor_parallel_size=parts) == []
        [line] = told(kv_cache_mib=least - 1)
        assert f"one response of max_length 4096 takes {least};" in line
    # Without max_length an engine stretches no positions.
    rope = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 512}
    model.rope_parameters = rope
    model.save_pretrained(tmp_path)
    assert told(kv_cache_mib=1, max_length=None, tensor_parallel_size=1) == []


@pytest.mark.parametrize(
    ("groups", "size", "problem"),
    [
        (4, 2, ""),
        (4, 4, ""),
        (2, 4, ""),
        (1, 12, ""),
        (4, 5, "should divide the model's num_attention_heads 12, got 5"),
        (2, 3, "should divide the model's num_key_value_heads 2 or be a multiple of it, got 3"),
        (4, 3, "should divide the model's num_key_value_heads 4 or be a multiple of it, got 3"),
        (4, 6, "should divide the model's num_key_value_heads 4 or be a multiple of it, got 6"),
    ],
)
def test_parts_of_an_engine_have_the_same_number_of_heads(
    raw: dict[str, Any], tmp_path: Path, groups: int, size: int, problem: str
) -> None:
    LlamaConfig(hidden_size=96, num_attention_heads=12, num_key_value_heads=groups).save_pretrained(tmp_path)
    args(raw, "rollout").update(model=str(tmp_path), tensor_parallel_size=size)
    path = tmp_path / "a.yaml"
    path.write_text(yaml.safe_dump(raw))
    told = [line for line in unstartable(Deployment.load(path)) if "tensor_parallel_size" in line]
    assert told == ([f"applications.rollout.args.tensor_parallel_size: {problem}"] if problem else [])


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda root: root.symlink_to("/nowhere/at/all"), "is a link to /nowhere/at/all, which does not exist"),
        (lambda root: root.touch(), "is a file and should be a folder"),
    ],
)
def test_a_root_that_cannot_be_made_is_refused(
    raw: dict[str, Any], tmp_path: Path, make: Callable[[Path], None], reason: str
) -> None:
    root = tmp_path / "kept"
    make(root)
    args(raw, "critic")["root"] = str(root)
    raw["orchestrator"]["checkpoint"] = {"root": str(root)}
    assert f"applications.critic.args.root: {root} {reason}; remove it, or choose another place" in problems(
        raw, tmp_path
    )


def test_the_model_says_how_long_a_response_may_be_where_the_file_does_not(
    raw: dict[str, Any], tmp_path: Path
) -> None:
    for name in ("rollout", "reward"):
        args(raw, name).pop("max_length", None)
    checked(raw, tmp_path)


def test_resources_that_this_machine_does_not_have(raw: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"

    def told(cpus: int, gpus: int) -> list[str]:
        path.write_text(yaml.safe_dump(raw))
        return list(beyond_this_machine(Deployment.load(path), cpus, gpus))

    assert told(1, 0) == []
    ask(raw, "rollout", num_cpus=3, num_gpus=0.5)
    raw["orchestrator"]["policy"].update(num_gpus=1, resources={"policy": 1})
    assert told(2, 0) == [
        "orchestrator.policy.num_gpus: 1, but this machine has none",
        "orchestrator.policy.resources.policy: a custom resource, which a head of `quartet up` does not have; leave "
        "it out, or use a Ray cluster of your own (docs/security.md)",
        "applications.rollout: ray_actor_options.num_cpus: 3, but this machine has 2 cores",
        "applications.rollout: ray_actor_options.num_gpus: 0.5, but this machine has none",
    ]
    assert [line.partition(":")[0] for line in told(3, 1)] == ["orchestrator.policy.resources.policy"]


def test_the_resources_that_ray_gives_to_every_head_are_taken(raw: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"

    def told(gpus: int) -> list[str]:
        path.write_text(yaml.safe_dump(raw))
        return list(beyond_this_machine(Deployment.load(path), 8, gpus))

    spec = ResourceAndLabelSpec(num_cpus=1, num_gpus=0, resources={}).resolve(True, "127.0.0.1")
    given = [name for name in spec.to_resource_dict() if ":" in name]
    assert sorted(OWN_RESOURCES) == sorted(given)
    assert RESOURCE_CONSTRAINT_PREFIX == ACCELERATOR
    resources = ask(raw, "rollout", resources={**dict.fromkeys(given, 0.001), "accelerator_type:H100": 0.001})
    raw["orchestrator"]["policy"]["resources"] = {given[0]: 2}
    twice = f"orchestrator.policy.resources.{given[0]}: 2, but Ray gives each node 1 of it"
    assert told(1) == [twice]
    assert [line.partition(": a ")[0] for line in told(0)] == [
        twice,
        "applications.rollout: ray_actor_options.resources.accelerator_type:H100",
    ]
    resources["resources"]["node:10.1.2.3"] = 0.001
    assert any("node:10.1.2.3: a custom resource" in line for line in told(1))


def test_a_file_that_can_start_gives_no_reason(raw: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text(yaml.safe_dump(raw))
    assert list(unstartable(Deployment.load(path, check_services=True))) == []


@pytest.mark.parametrize(
    ("name", "values", "said"),
    [
        ("config.json", {"model_type": "own", "auto_map": {"AutoConfig": "own.Config"}}, "which is never run"),
        ("tokenizer.json", {"model": {"type": "own"}}, "tokenizer: {folder} holds no tokenizer that loads: "),
    ],
)
def test_a_folder_that_no_replica_could_read_is_refused_before_a_start(
    raw: dict[str, Any], tmp_path: Path, name: str, values: dict[str, Any], said: str
) -> None:
    folder, path = tmp_path / "broken", tmp_path / "a.yaml"
    copytree(args(raw, "rollout")["model"], folder)
    (folder / name).write_text(json.dumps(json.loads((folder / name).read_text()) | values))
    args(raw, "rollout")["model"] = str(folder)
    path.write_text(yaml.safe_dump(raw))
    [line] = unstartable(Deployment.load(path, check_services=True))
    assert line.startswith("applications.rollout.args.model: ")
    assert said.format(folder=folder) in line
    assert "\n" not in line
