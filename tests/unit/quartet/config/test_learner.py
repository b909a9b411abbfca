"""Learners and scorers that cannot be, and what DeepSpeed is told of those that can."""

from pathlib import Path
from typing import Any

import pytest

from orchestrator.config.run import OrchestratorConfig
from quartet.config.base import ConfigError
from quartet.config.learner import (
    GROUP_ELEMENTS,
    LearnerConfig,
    OptimizerConfig,
    PolicyConfig,
    TensorParallelConfig,
    describe,
)
from services.critic.config import CriticConfig
from services.reward.config import RewardConfig
from tests.unit.configs import problems


@pytest.fixture
def model(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text("{}")
    return str(tmp_path)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"optimizer": {"learning_rate": 1, "warmup_steps": 9, "total_steps": 9}},
            "warmup_steps must be less than total_steps",
        ),
        ({"optimizer": {"learning_rate": 0}}, "learning_rate: should be more than 0, got 0"),
        ({"optimizer": {"learning_rate": 1, "betas": [0.9, 1]}}, "betas.1: should be less than 1, got 1"),
        ({"dtype": "bfloat16"}, "dtype bfloat16 with zero_stage 0 drifts from fp32; set zero_stage to 1"),
        ({"dtype": "float16"}, "dtype: should be 'float32' or 'bfloat16', got 'float16'"),
        ({"zero_stage": 9}, "zero_stage: should be 0"),
        ({"lora": {"seed": 2**32}}, "lora.seed: should be less than 4294967296, got 4294967296"),
        ({"ranks": 0}, "ranks: should be 1 or more, got 0"),
        ({"adam_offload": True}, "adam_offload is part of ZeRO; set zero_stage to 1, 2 or 3"),
        ({"param_offload": True, "zero_stage": 2}, "param_offload is part of ZeRO 3; set zero_stage to 3"),
        ({"attn_implementation": "flash"}, "attn_implementation: should be 'sdpa', 'eager' or 'flash_attention_2'"),
        (
            {"attn_implementation": "flash_attention_2"},
            "attn_implementation flash_attention_2 computes in half precision; set dtype to bfloat16",
        ),
        (
            {"attn_implementation": "eager", "packing": True},
            "packing needs attn_implementation sdpa or flash_attention_2; eager mixes the sequences",
        ),
        (
            {"ranks": 3, "tensor_parallel": {"size": 2}},
            "ranks must be a multiple of tensor_parallel.size 2, got 3",
        ),
        (
            {"ranks": 2, "tensor_parallel": {"size": 2}, "lora": {}},
            "lora goes with tensor_parallel.size 1 only; adapters are not divided",
        ),
        ({"freeze_attention": True, "lora": {}}, "freeze_attention: adapters leave all weights as they are"),
        (
            {"freeze_attention": True, "ranks": 2, "tensor_parallel": {"size": 2}},
            "freeze_attention goes with tensor_parallel.size 1 only",
        ),
        (
            {"compile_layers": True, "zero_stage": 3},
            "compile_layers: layers that are divided among ranks are not compiled; set it to false, or "
            "set zero_stage to 2 or lower and tensor_parallel.size to 1",
        ),
        (
            {"compile_layers": True, "ranks": 2, "tensor_parallel": {"size": 2}},
            "compile_layers: layers that are divided among ranks are not compiled",
        ),
        (
            {
                "compile_layers": True,
                "dtype": "bfloat16",
                "zero_stage": 1,
                "attn_implementation": "flash_attention_2",
            },
            "compile_layers goes with attn_implementation sdpa or eager",
        ),
        ({"num_gpus": 2}, "num_gpus (2) must be 1 or less: a rank computes on one GPU; set ranks"),
        ({"num_gpus": 0.5, "ranks": 2}, "num_gpus (0.5) must be more than 0.5 with several ranks"),
        ({"resources": {"policy": 0}}, "resources.policy: should be more than 0, got 0"),
        ({"optimizer": None}, "optimizer: should be a mapping of fields to values, got null"),
    ],
)
def test_learners_that_cannot_be(model: str, values: dict[str, Any], message: str) -> None:
    lines = problems(LearnerConfig, {"model": model, "optimizer": {"learning_rate": 1}} | values)
    assert len(lines) == 1
    assert message in lines[0]


@pytest.mark.parametrize(("seed", "right"), [(-1, "0 or more"), (2**64, "less than 4294967296")])
def test_a_critics_seed_is_one_that_torch_takes(model: str, seed: int, right: str) -> None:
    [line] = problems(CriticConfig, {"model": model, "optimizer": {"learning_rate": 1}, "seed": seed})
    assert line.endswith(f"seed: should be {right}, got {seed}")


def test_what_deepspeed_is_told(model: str) -> None:
    config = PolicyConfig(
        model=model,
        dtype="bfloat16",
        zero_stage=1,
        optimizer=OptimizerConfig(learning_rate=0.01, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.1, max_grad_norm=3),
    )
    told = describe(config)
    assert told["bf16"] == {"enabled": True}
    assert told["gradient_accumulation_steps"] == 1
    assert told["zero_optimization"] == {"stage": 1, "reduce_bucket_size": 1}
    several = config.model_copy(update={"ranks": 2})
    assert describe(several)["zero_optimization"] == {"stage": 1, "reduce_bucket_size": 50_000_000}
    assert told["gradient_clipping"] == 3
    assert told["optimizer"]["type"] == "AdamW"
    assert told["optimizer"]["params"] == {
        "lr": 0.01,
        "betas": [0.8, 0.9],
        "eps": 1e-6,
        "weight_decay": 0.1,
        "torch_adam": True,
        "fused": True,
    }


def test_what_deepspeed_is_told_of_tensor_parallelism(model: str) -> None:
    config = LearnerConfig(model=model, optimizer=OptimizerConfig(learning_rate=0.01), ranks=4)
    assert "tensor_parallel" not in describe(config)
    told = describe(config.model_copy(update={"tensor_parallel": TensorParallelConfig(size=2)}))
    assert told["tensor_parallel"] == {"autotp_size": 2, "vocab_parallel_lm_head": False}


def test_what_deepspeed_is_told_of_zero_3_with_offload(model: str) -> None:
    config = PolicyConfig(
        model=model,
        zero_stage=3,
        zero_persist_below=7,
        adam_offload=True,
        param_offload=True,
        optimizer=OptimizerConfig(learning_rate=0.01),
    )
    assert describe(config)["zero_optimization"] == {
        "stage": 3,
        "reduce_bucket_size": 50_000_000,
        "stage3_param_persistence_threshold": 7,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "offload_param": {"device": "cpu", "pin_memory": True},
    }
    # On the GPU a step copies the gradient of a group of weights, which are then small ones.
    kept = describe(config.model_copy(update={"adam_offload": False}))["zero_optimization"]
    assert kept["sub_group_size"] == GROUP_ELEMENTS


def test_scorers_nest(model: str) -> None:
    function = {"kind": "function", "function": "a.b:c"}
    rules = {"kind": "several", "scorers": {"right": function, "form": function | {"names": ("brief", "plain")}}}
    outer = {"kind": "several", "scorers": {"rules": rules, "taste": function}}
    config = RewardConfig.parse({"tokenizer": model, "scorer": outer}, "reward.args")
    assert config.model_dump(exclude_unset=True)["scorer"] == outer
    assert config.hosted[""].scorer.names == ("rules.right", "rules.form.brief", "rules.form.plain", "taste")
    assert problems(RewardConfig, {"tokenizer": model, "scorer": {"kind": "several", "scorers": {}}})[0].startswith(
        "root.scorer.scorers: should have 1 or more items"
    )
    rules["scorers"]["right"] = {"kind": "function", "function": "no path", "funktion": 1}  # type: ignore[index]
    lines = problems(RewardConfig, {"tokenizer": model, "scorer": outer}, "reward.args")
    inner = "reward.args.scorer.scorers.rules.scorers.right"
    assert lines[0].startswith(f"{inner}.function: should be package.module:function, got 'no path'")
    assert lines[1:] == [
        f"{inner}.funktion: unknown field; known: batch_tokens, concurrency, environment, function, kind, limits, "
        "max_length, memory_gib, names, pair_timeout_s, process, tokenizer, workers; did you mean function?"
    ]


def test_scorers_by_name_have_settings_of_their_own_or_those_of_all(model: str, tmp_path: Path) -> None:
    other = str(tmp_path / "other")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "config.json").write_text("{}")
    rules = {"kind": "function", "function": "a.b:c"}
    taste = {"kind": "model", "model": other}
    scorers: dict[str, Any] = {"rules": rules | {"max_length": 9, "limits": {"batch_s": 1}}, "taste": taste}

    def hosted(**section: Any) -> dict[str, Any]:
        named = RewardConfig.parse(section, "args").hosted
        return {name: (each.tokenizer, each.max_length, each.limits.batch_s) for name, each in named.items()}

    assert hosted(scorers=scorers, max_length=99) == {"rules": (None, 9, 1), "taste": (other, 99, 20)}
    assert hosted(scorers=scorers, tokenizer=model)["taste"] == (model, 4096, 20)
    several = {"kind": "several", "scorers": {"rules": rules, "taste": taste}, "max_length": 7}
    assert hosted(scorer=several) == {"": (other, 7, 20)}
    several["scorers"] = scorers
    for section, problem in (
        (
            {"scorer": several},
            "args.scorer: scorers.rules.limits: belongs to the whole; set it beside `kind: several`",
        ),
        ({"scorer": rules, "scorers": scorers}, "args: scorer: give this or scorers, one of them"),
        ({}, "args: scorer: give this or scorers, one of them"),
        (
            {"scorers": {"Reward": rules}},
            "args.scorers.Reward: should be letters, digits, `_` and `-`, a letter",
        ),
        ({"scorers": {"a": {"kind": "oracle"}}}, "args.scorers.a.kind: should be one of"),
        ({"scorer": {"kind": "oracle"}}, "args.scorer.kind: should be one of"),
        (
            {"scorer": rules | {"funktion": 1}},
            "args.scorer.funktion: unknown field; known: batch_tokens, concurrency, environment",
        ),
    ):
        [line] = problems(RewardConfig, section, "args")
        assert line.startswith(problem)


@pytest.mark.parametrize("name", ["score", "right_low", "a.b", "", "7", "with space", "ends-"])
def test_scores_are_named_so_that_their_metrics_can_be_told_apart(model: str, name: str) -> None:
    function = {"kind": "function", "function": "a.b:c"}
    for scorer in (function | {"names": [name]}, {"kind": "several", "scorers": {name: function}}):
        [line] = problems(RewardConfig, {"tokenizer": model, "scorer": scorer})
        assert "should be letters, digits, `_` and `-`" in line
    [line] = problems(RewardConfig, {"tokenizer": model, "scorer": function | {"names": ["right", "right"]}})
    assert "names: right, right has one twice" in line


def test_a_policys_cosine_ends_with_its_run_and_a_critics_is_told_when(model: str) -> None:
    cosine = {"learning_rate": 1e-4, "schedule": "cosine"}
    section = {"name": "run", "data": {"path": "prompts"}, "policy": {"model": model, "optimizer": cosine}}
    run = OrchestratorConfig.parse(
        section | {"steps": 3, "batch_size": 100, "algorithm": {"epochs": 2}}, "orchestrator"
    )
    assert run.optimizer_steps == run.critic_optimizer_steps == 3 * 2 * 4
    more = OrchestratorConfig.parse(
        section | {"steps": 3, "batch_size": 100, "algorithm": {"epochs": 2, "critic_epochs": 5}}, "orchestrator"
    )
    assert (more.optimizer_steps, more.critic_optimizer_steps) == (3 * 2 * 4, 3 * 5 * 4)
    assert run.scheduled_policy.optimizer.total_steps == 24
    later = section | {"steps": 3, "batch_size": 100, "algorithm": {"epochs": 2, "critic_only_steps": 1}}
    pretrained = OrchestratorConfig.parse(later, "orchestrator")
    assert (pretrained.optimizer_steps, pretrained.critic_optimizer_steps) == (2 * 2 * 4, 3 * 2 * 4)
    never = later | {"algorithm": {"critic_only_steps": 3}}
    with pytest.raises(ConfigError, match=r"algorithm.critic_only_steps \(3, .*\) must be less than steps \(3\)"):
        OrchestratorConfig.parse(never, "orchestrator")
    late = section | {"policy": {"model": model, "optimizer": cosine | {"warmup_steps": 300}}}
    with pytest.raises(ConfigError, match=r"policy.optimizer.warmup_steps \(300\) must be less than the run's 24"):
        OrchestratorConfig.parse(late | {"steps": 3, "batch_size": 100, "algorithm": {"epochs": 2}}, "orchestrator")
    with pytest.raises(ConfigError, match=r"optimizer.total_steps is required by schedule: cosine"):
        CriticConfig.parse({"model": model, "optimizer": cosine}, "critic.args")
