"""Checks of the services before a run begins: precision, lengths, scorers, models, deadlines, GPUs."""

import json
import re
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest
import yaml
from transformers import GenerationConfig, LlamaConfig, Phi3Config
from typer.testing import CliRunner

from orchestrator.cli import app
from orchestrator.commands.checks.architectures import too_long_for_model
from orchestrator.commands.checks.preflight import preflight
from orchestrator.deployment.file import Deployment
from services.rollout.config import RolloutConfig
from tests.models import EOS, MAX_LENGTH, make_policy
from tests.unit.preflights import SUM, args, checked, problems


def test_lengths_must_fit_every_service_and_model(
    raw: dict[str, Any], policy_folder: Path, reward_folder: Path, tmp_path: Path
) -> None:
    # 16 for the prompt and 113 for the response, one more than the models take.
    raw["orchestrator"]["sampling"]["max_new_tokens"] = 113
    args(raw, "rollout")["max_length"] = 129
    args(raw, "reward")["max_length"] = 128
    too_long = f"takes {MAX_LENGTH} tokens (its max_position_embeddings)"
    assert problems(raw, tmp_path) == [
        f"applications.reward.args.max_length: 128, but {SUM} is 129",
        *(
            f"{field}: {path} {too_long}, but {SUM} is 129"
            for field, path in (
                ("orchestrator.policy.model", policy_folder),
                ("applications.rollout.args.model", policy_folder),
                ("applications.reward.args.scorer.model", reward_folder),
                ("applications.reference.args.model", policy_folder),
                ("applications.critic.args.model", reward_folder),
            )
        ),
        f"applications.rollout.args.max_length: 129, but {policy_folder} {too_long}",
    ]
    raw["orchestrator"]["sampling"]["max_new_tokens"] = 112
    args(raw, "rollout")["max_length"] = 128
    checked(raw, tmp_path)


@pytest.mark.parametrize(
    "config",
    [
        LlamaConfig(max_position_embeddings=64, rope_scaling={"rope_type": "dynamic", "factor": 2.0}),
        Phi3Config(
            max_position_embeddings=256,
            original_max_position_embeddings=64,
            rope_scaling={"rope_type": "longrope", "short_factor": [1.0] * 48, "long_factor": [2.0] * 48},
        ),
    ],
)
def test_a_rotation_that_depends_on_the_length_must_not_change_with_it(config: Any, tmp_path: Path) -> None:
    """vLLM would rotate short sequences as long ones, transformers would not."""
    config.save_pretrained(tmp_path)
    kind = config.rope_parameters["rope_type"]
    found = [
        list(too_long_for_model(RolloutConfig(model=str(tmp_path), max_length=length), "rollout"))
        for length in (64, 65)
    ]
    assert found == [
        [],
        [
            f"applications.rollout.args.max_length: 65, but {tmp_path} rotates longer sequences than 64 tokens by "
            f"other frequencies (rope_type {kind}), which the engine would use for all sequences and the learner "
            "only for long ones; set it to 64 at most"
        ],
    ]


def test_a_reward_function_must_be_one(raw: dict[str, Any], tmp_path: Path) -> None:
    function = {"kind": "function", "function": "tests.scorers:count"}
    parts = [{"weight": 1.0, "scorer": function}, {"weight": 1.0, "scorer": function | {"function": "math:no"}}]
    args(raw, "reward")["scorer"] = {"kind": "blend", "parts": parts}
    (line,) = problems(raw, tmp_path)
    field = "applications.reward.args.scorer.parts.1.scorer.function"
    assert line.startswith(f"{field}: 'math:no' should be package.module:name, but cannot be imported: ")
    # Where the service has an environment of its own, it is for the service to say.
    raw["applications"][1]["runtime_env"] = {"working_dir": "https://host/code.zip"}
    checked(raw, tmp_path)


def test_a_judge_whose_module_fails_is_named(
    raw: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken_judge.py").write_text("1 / 0\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    raw["orchestrator"]["evaluation"]["judges"] = {"gold": "broken_judge:score"}
    assert problems(raw, tmp_path) == [
        "orchestrator.evaluation.judges.gold: importing broken_judge fails with ZeroDivisionError: division by zero"
    ]


def test_another_tokenizer_is_named_and_all_problems_are_told_at_once(
    raw: dict[str, Any], policy_folder: Path, tmp_path: Path
) -> None:
    other = copytree(policy_folder, tmp_path / "other")
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["w4"], vocabulary["w5"] = vocabulary["w5"], vocabulary["w4"]
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    args(raw, "reward")["tokenizer"] = str(other)
    args(raw, "rollout")["dtype"] = "bfloat16"
    raw["orchestrator"]["data"]["path"] = "/no/such/prompts"
    starts = [
        "applications.rollout.args.dtype: bfloat16, but ",
        f"applications.reward.args.tokenizer: the tokenizer of {other} is not that of orchestrator.policy.model "
        f"({policy_folder}), so its token ids mean something else",
        "data.path: no such file or folder: /no/such/prompts",
    ]
    said = problems(raw, tmp_path)
    assert len(said) == len(starts)
    assert all(line.startswith(start) for line, start in zip(said, starts, strict=True))


def test_services_on_another_machine_are_left_to_what_they_say(raw: dict[str, Any], tmp_path: Path) -> None:
    args(raw, "rollout").update(model="/on/another/machine", dtype="bfloat16")
    path = tmp_path / "a.yaml"
    path.write_text(yaml.safe_dump(raw))
    assert len(preflight(Deployment.load(path)).train.prompts) == 4


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        (
            {"hidden_size": 128},
            "sizes differ: model.embed_tokens.weight float32[335, 64] pushed, float32[335, 128] here",
        ),
        ({"num_hidden_layers": 3}, "the push lacks model.layers.2.self_attn.q_proj.weight"),
        ({"num_hidden_layers": 1}, "this replica's model lacks model.layers.1.self_attn.q_proj.weight"),
    ],
)
def test_a_rollout_model_that_the_policy_cannot_be_pushed_to(
    raw: dict[str, Any], tmp_path: Path, shape: dict[str, int], message: str
) -> None:
    other = make_policy(tmp_path / "other", kind="llama", tied=False, **shape)
    args(raw, "rollout")["model"] = str(other)
    [problem] = problems(raw, tmp_path)
    assert problem.startswith(
        f"applications.rollout.args.model: {other} cannot take the weights of orchestrator.policy"
    )
    assert message in problem


def test_another_copy_of_the_same_model_is_as_good(raw: dict[str, Any], policy_folder: Path, tmp_path: Path) -> None:
    args(raw, "rollout")["model"] = str(copytree(policy_folder, tmp_path / "copy"))
    checked(raw, tmp_path)


def test_texts_must_end_alike_where_they_must_not_end_early(
    raw: dict[str, Any], policy_folder: Path, tmp_path: Path
) -> None:
    copy = copytree(policy_folder, tmp_path / "copy")
    GenerationConfig(eos_token_id=[EOS, 9]).save_pretrained(copy)
    args(raw, "rollout")["model"] = str(copy)
    checked(raw, tmp_path)
    raw["orchestrator"]["sampling"]["min_new_tokens"] = 2
    [problem] = problems(raw, tmp_path)
    assert problem.startswith(f"applications.rollout.args.model: texts of {copy} end with the tokens [{EOS}, 9], but")
    assert f"({policy_folder}) with [{EOS}]; correct eos_token_id" in problem
    raw["orchestrator"]["sampling"]["stop_token_ids"] = [9]
    checked(raw, tmp_path)


def test_deadlines_that_the_replicas_refuse_and_a_root_that_is_not_the_critics(
    raw: dict[str, Any], tmp_path: Path
) -> None:
    args(raw, "rollout")["max_phase_s"] = 20
    args(raw, "critic")["root"] = "/elsewhere"
    assert problems(raw, tmp_path) == [
        "orchestrator.weights.timeout_s: 30, but applications.rollout.args.max_phase_s is 20; "
        "lower the first or raise the second",
        "orchestrator.weights.commit_s: 30, but applications.rollout.args.max_phase_s is 20; "
        "lower the first or raise the second",
        "orchestrator.checkpoint.root: runs, but applications.critic.args.root is /elsewhere; the critic writes its "
        "part of each checkpoint under its root, so both must be the same folder",
    ]


def test_what_has_to_share_a_gpu_must_fit_on_it(raw: dict[str, Any], tmp_path: Path) -> None:
    """The models are tiny: what is left are the KV cache of 64 MiB or so, and what each process takes by itself."""
    rollout = next(a for a in raw["applications"] if a["name"] == "rollout")
    rollout["deployments"] = [{"name": "Rollout", "num_replicas": 1, "ray_actor_options": {"num_gpus": 0.5}}]
    raw["orchestrator"]["policy"]["num_gpus"] = 0.5
    raw["orchestrator"]["gpu_gib"] = 2.5
    [problem] = problems(raw, tmp_path)
    assert problem.startswith("orchestrator.gpu_gib: one GPU may have to hold rollout ")
    assert " GiB, but has 2.5; raise " in problem
    raw["orchestrator"]["gpu_gib"] = 8
    checked(raw, tmp_path)
    # What never shares a GPU is not added up.
    raw["orchestrator"]["gpu_gib"], raw["orchestrator"]["policy"]["num_gpus"] = 3, 0.6
    checked(raw, tmp_path)


def test_what_may_be_on_one_host_must_fit_there_and_check_prints_the_sums(
    raw: dict[str, Any], tmp_path: Path
) -> None:
    """The models are tiny: what is left are the KV cache of 64 MiB or so, and what each process takes by itself."""
    raw["orchestrator"]["gpu_gib"] = 8
    raw["orchestrator"]["policy"]["num_gpus"] = 0.5
    raw["orchestrator"]["host_gib"] = 10
    [problem] = problems(raw, tmp_path)
    assert problem.startswith("orchestrator.host_gib: one host may have to hold rollout 4.")
    assert " GiB, but has 10; the largest part, 4, is libraries of rollout: put less on a host" in problem
    raw["orchestrator"]["host_gib"] = 30
    checked(raw, tmp_path)
    said = " ".join(CliRunner().invoke(app, ["check", str(tmp_path / "a.yaml")]).output.split())
    policy = r"memory of policy, of which there are 1: (\d\.\d) on a GPU and 2\.\d on a host "
    assert re.search(policy + r".*one GPU: policy \1 = \1 of 8", said)
    assert re.search(r"one host: rollout 4\.\d .* = \d\d of 30 GiB", said)
    assert said.endswith("a.yaml: fine")
    for key in ("gpu_gib", "host_gib"):
        del raw["orchestrator"][key]
    checked(raw, tmp_path)
    assert "memory of" not in CliRunner().invoke(app, ["check", str(tmp_path / "a.yaml")]).output


@pytest.mark.parametrize(
    ("backend", "policy", "replica", "reason"),
    [
        ("nccl", 0, 0.5, "orchestrator.policy.num_gpus is 0, so the learner is on a CPU"),
        ("cuda-ipc", 0.5, 0, "the replicas' ray_actor_options have no num_gpus, so they are on a CPU"),
        (
            "nccl",
            0.5,
            0.5,
            "the policy's num_gpus and a replica's are 1 together: they may share a GPU, which NCCL refuses",
        ),
        ("cuda-ipc", 0.6, 0.5, "the policy's num_gpus and a replica's are 1.1 together: they never share a GPU"),
        ("nccl", 0.6, 0.5, ""),
        ("cuda-ipc", 0.5, 0.5, ""),
        ("ipc", 0, 0, ""),
    ],
)
def test_a_backend_that_the_files_gpus_rule_out_is_refused(
    raw: dict[str, Any], tmp_path: Path, backend: str, policy: float, replica: float, reason: str
) -> None:
    rollout = next(a for a in raw["applications"] if a["name"] == "rollout")
    rollout["deployments"] = [{"name": "Rollout", "num_replicas": 1, "ray_actor_options": {"num_gpus": replica}}]
    raw["orchestrator"]["policy"]["num_gpus"] = policy
    raw["orchestrator"]["weights"] = raw["orchestrator"].get("weights", {}) | {"backend": backend}
    if not reason:
        checked(raw, tmp_path)
        return
    assert problems(raw, tmp_path) == [f"orchestrator.weights.backend: {backend}, but {reason}; set it to auto"]
    # GPUs that are chosen by hand are known to the processes only.
    rollout["runtime_env"] = {"env_vars": {"CUDA_VISIBLE_DEVICES": "6"}}
    checked(raw, tmp_path)
