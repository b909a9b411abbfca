"""The same numbers whatever the layout: DeepSpeed for real, and gloo between spawned processes.

Five optimizer steps of the policy, and of the critic in some layouts, on minibatches of 5, 5, 5, 5 and 1 sequences:
on two ranks shards are uneven, and in the last step rank 1 has no sequence at all. Everything is compared with one
rank at ZeRO 0.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from orchestrator.algorithms.ppo import PPO
from orchestrator.policy.trainer import PolicyTrainer
from quartet.config.learner import LoraConfig, PolicyConfig
from quartet.models.distribution import Distribution
from quartet.ranks.group import RankGroup
from tests.learner_batches import PolicyBatch, train_policy
from tests.plain import furthest
from tests.unit.layouts import BY_LAYERS, OPTIMIZER, STAGES, TIMEOUT_S, Bench, Result
from tests.unit.rows import noise, pairs

pytestmark = pytest.mark.processes

# Sums in another order differ by some 1e-7; AdamW, which divides by their size, makes steps of small gradients of it.
LOSS, NORM, WEIGHT = 1e-6, 1e-5, 5e-5
ACCUMULATED = {"micro_batch_tokens": 40}
PACKED = {"packing": True}
LAYOUTS: dict[str, dict[str, Any]] = {
    **STAGES,
    "zero 3, nothing partitioned": {"zero_stage": 3},
    "accumulation": ACCUMULATED,
    "accumulation, zero 1": ACCUMULATED | {"zero_stage": 1},
    "accumulation, zero 2": ACCUMULATED | {"zero_stage": 2},
    "accumulation, zero 3": ACCUMULATED | BY_LAYERS,
    "checkpointing": {"gradient_checkpointing": True},
    "checkpointing, zero 3": {"gradient_checkpointing": True} | BY_LAYERS,
    "adam offload, zero 1": {"adam_offload": True, "zero_stage": 1},
    "adam offload, zero 2": {"adam_offload": True, "zero_stage": 2},
    "adam offload, zero 3": {"adam_offload": True} | BY_LAYERS,
    "both offloads": {"adam_offload": True, "param_offload": True} | ACCUMULATED | BY_LAYERS,
    "plain attention": {"attn_implementation": "eager"},
    "packing": PACKED,
    "packing, zero 1": PACKED | {"zero_stage": 1},
    "packing, zero 3": PACKED | BY_LAYERS,
    "packing, accumulation": PACKED | ACCUMULATED,
    "packing, accumulation, zero 2": PACKED | ACCUMULATED | {"zero_stage": 2},
    "packing, checkpointing, zero 3": PACKED | {"gradient_checkpointing": True} | ACCUMULATED | BY_LAYERS,
}


@pytest.fixture(scope="module")
async def expected(benches: dict[int, RankGroup]) -> dict[str, Result]:
    """One rank, ZeRO 0."""
    return {kind: await benches[1].call(getattr(Bench, kind), TIMEOUT_S, {}) for kind in ("policy", "critic")}


def numbers(result: Result, name: str) -> list[float]:
    assert len(result["steps"]) == 5
    return [step[name] for step in result["steps"]]


def same_steps(actual: Result, wanted: Result) -> None:
    """Asserts that both were trained alike."""
    assert numbers(actual, "loss") == pytest.approx(numbers(wanted, "loss"), abs=LOSS)
    assert numbers(actual, "grad_norm") == pytest.approx(numbers(wanted, "grad_norm"), rel=NORM)
    assert furthest(actual["weights"], wanted["weights"]) < WEIGHT
    assert furthest(actual["before"], wanted["before"]) < 1e-5
    assert furthest(actual["after"], wanted["after"]) < 1e-4


CASES = [("policy", name) for name in LAYOUTS]
CASES += [("critic", name) for name in ("zero 0", "zero 1", "zero 2", "accumulation, zero 3", "both offloads")]
CASES += [("critic", name) for name in ("packing", "packing, accumulation, zero 2", "packing, zero 3")]


# Of any two settings that occur together in a layout, one of these has both.
ALWAYS = {
    ("policy", 1): {
        *("zero 0", "zero 3, nothing partitioned", "accumulation", "checkpointing", "checkpointing, zero 3"),
        *("adam offload, zero 1", "adam offload, zero 2", "plain attention", "packing, zero 1"),
    },
    ("policy", 2): {
        *("zero 2", "accumulation, zero 1", "adam offload, zero 3", "both offloads", "plain attention"),
        "packing, checkpointing, zero 3",
    },
    ("critic", 1): {"zero 1", "both offloads", "packing, accumulation, zero 2", "packing, zero 3"},
    ("critic", 2): {"packing"},
}
EVERY = [
    pytest.param(kind, name, ranks, marks=() if name in ALWAYS[kind, ranks] else pytest.mark.exhaustive)
    for kind, name in CASES
    for ranks in (1, 2)
]


@pytest.mark.parametrize(("kind", "layout", "ranks"), EVERY)
async def test_five_steps_are_the_same(
    benches: dict[int, RankGroup], expected: dict[str, Result], layout: str, ranks: int, kind: str
) -> None:
    wanted = expected[kind]
    actual = await benches[ranks].call(getattr(Bench, kind), TIMEOUT_S, LAYOUTS[layout])
    same_steps(actual, wanted)
    for step, right in zip(actual["steps"], wanted["steps"], strict=True):
        assert step == pytest.approx(right, abs=1e-4)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("kind", ["policy", "critic"])
async def test_a_prompt_that_is_computed_once_for_its_responses_gives_the_same_steps(
    benches: dict[int, RankGroup], kind: str, ranks: int
) -> None:
    """In rows of up to five responses to three prompts, of which ranks and micro-batches have parts."""
    bench = getattr(Bench, kind)
    wanted = await benches[1].call(bench, TIMEOUT_S, {}, size=7, shared=True)
    layout = PACKED | {"micro_batch_tokens": 120, "zero_stage": ranks - 1, "gradient_checkpointing": ranks == 2}
    actual = await benches[ranks].call(bench, TIMEOUT_S, layout, size=7, shared=True)
    for step, right in zip(actual["steps"], wanted["steps"], strict=True):
        assert step == pytest.approx(right, abs=1e-4)
    assert furthest(actual["weights"], wanted["weights"]) < WEIGHT
    assert furthest(actual["before"], wanted["before"]) < 1e-5
    assert furthest(actual["after"], wanted["after"]) < 1e-4


@pytest.mark.parametrize("kind", ["policy", "critic"])
async def test_tokens_that_are_left_out_are_so_in_every_layout(
    benches: dict[int, RankGroup], expected: dict[str, Result], kind: str
) -> None:
    wanted = await benches[1].call(getattr(Bench, kind), TIMEOUT_S, {}, marked=True)
    layout = PACKED | ACCUMULATED | {"zero_stage": 2}
    actual = await benches[2].call(getattr(Bench, kind), TIMEOUT_S, layout, marked=True)
    for step, right in zip(actual["steps"], wanted["steps"], strict=True):
        assert step == pytest.approx(right, abs=1e-4)
    assert furthest(actual["weights"], wanted["weights"]) < WEIGHT
    assert furthest(wanted["weights"], expected[kind]["weights"]) > 10 * WEIGHT


MORE = pytest.mark.exhaustive
# A mean of whole parameters on one rank and of pieces on two; the rest is one more stage of ZeRO.
AVERAGED = [
    ({}, 1),
    (BY_LAYERS, 2),
    *(pytest.param({}, 2, marks=MORE), pytest.param(BY_LAYERS, 1, marks=MORE)),
    *(pytest.param({"zero_stage": stage}, ranks, marks=MORE) for stage in (2, 3) for ranks in (1, 2)),
]


@pytest.mark.parametrize(("layout", "ranks"), AVERAGED, ids=str)
async def test_the_running_mean_is_saved_and_the_weights_go_on(
    benches: dict[int, RankGroup], layout: dict[str, Any], ranks: int, tmp_path: Path
) -> None:
    averaged = layout | {"ema_decay": 0.75}
    seen, after, later = await benches[ranks].call(Bench.averaged, TIMEOUT_S, averaged, tmp_path / "mean")
    _, _, wanted = await benches[1].call(Bench.averaged, TIMEOUT_S, {}, tmp_path / "no mean")
    saved = load_file(tmp_path / "mean" / "model.safetensors")
    assert furthest(after, seen[-1]) == 0
    assert furthest(later, wanted) < WEIGHT < furthest(later, after)
    for name, tensor in saved.items():
        mean = seen[0][name]
        for weights in seen[1:]:
            mean = 0.75 * mean + 0.25 * weights[name]
        assert float(np.abs(tensor.numpy() - mean).max()) < 1e-6
    assert furthest({name: saved[name].numpy() for name in after}, after) > 1e-3


@pytest.mark.parametrize("layout", [{"zero_stage": 1}, BY_LAYERS, {"gradient_checkpointing": True}], ids=str)
async def test_frozen_attention_stays_bit_for_bit_in_every_layout(
    benches: dict[int, RankGroup], reward_folder: Path, layout: dict[str, Any]
) -> None:
    """On two ranks as on one without ZeRO, whatever AdamW's decay of weights; all other weights are trained."""
    frozen = {"freeze_attention": True}
    wanted = await benches[1].call(Bench.critic, TIMEOUT_S, frozen)
    actual = await benches[2].call(Bench.critic, TIMEOUT_S, frozen | layout)
    same_steps(actual, wanted)
    source = load_file(reward_folder / "model.safetensors")
    for name, weights in actual["weights"].items():
        before = source.get(name.replace("body.", "model."))
        if "self_attn" in name:
            assert before is not None
            assert (weights == before.numpy()).all(), name
        elif before is not None:
            assert float(np.abs(weights - before.numpy()).max()) > 10 * WEIGHT, name
    assert len([name for name in actual["weights"] if "self_attn" in name]) == 2 * 4


# The critic has the same adapters.
@pytest.mark.parametrize("kind", ["policy", pytest.param("critic", marks=MORE)])
async def test_adapters_are_the_same_in_pieces(benches: dict[int, RankGroup], kind: str) -> None:
    lora: dict[str, Any] = {"lora": LoraConfig(rank=4)}
    wanted = await benches[1].call(getattr(Bench, kind), TIMEOUT_S, lora)
    actual = await benches[2].call(getattr(Bench, kind), TIMEOUT_S, lora | ACCUMULATED | BY_LAYERS)
    same_steps(actual, wanted)


@pytest.mark.parametrize(("checkpointing", "forwards"), [(False, 1), (True, 2)])
def test_checkpointing_runs_a_layer_again_in_the_backward_pass(
    policy_folder: Path, checkpointing: bool, forwards: int
) -> None:
    config = PolicyConfig(model=str(policy_folder), optimizer=OPTIMIZER, gradient_checkpointing=checkpointing)
    trainer = PolicyTrainer(config, PPO(epochs=1, minibatch_size=3), Distribution(1.0))
    prompts, responses = pairs(3)
    ran: list[int] = []
    layer = trainer.learner.module.model.layers[0]  # type: ignore[index, union-attr]
    layer.self_attn.register_forward_pre_hook(lambda *_: ran.append(1))  # type: ignore[union-attr]
    rows = noise(responses, 1)
    train_policy(trainer, PolicyBatch(prompts, responses, rows, rows, rows, rows, 0.0), seed=0)
    assert len(ran) == forwards


@pytest.mark.parametrize("samples", [1, 21])
async def test_logprobs_of_one_step_come_from_all_ranks(benches: dict[int, RankGroup], samples: int) -> None:
    """Rank 1 has no part of a single sample."""
    before, computed = await benches[2].call(Bench.on_policy, TIMEOUT_S, ACCUMULATED, samples)
    assert len(computed) == samples
    for row, expected in zip(computed, before, strict=True):
        assert row.tolist() == pytest.approx(expected.tolist(), abs=LOSS)


@pytest.mark.parametrize(("trained", "known"), [(True, 5), (False, 0)])
async def test_logprobs_of_the_first_step_come_from_all_ranks(
    benches: dict[int, RankGroup], trained: bool, known: int
) -> None:
    """Five of 21 samples are in the first minibatch; no step is taken where no token is trained on."""
    options: dict[str, Any] = {"old_logprobs": "rollout", "minibatch_size": 5, "epochs": 2}
    before, computed = await benches[2].call(Bench.on_policy, TIMEOUT_S, ACCUMULATED, 21, options, trained)
    told = [index for index, row in enumerate(computed) if len(row)]
    assert (len(computed), len(told)) == (21, known)
    for index in told:
        assert computed[index].tolist() == pytest.approx(before[index].tolist(), abs=LOSS)


async def test_the_steps_move_the_weights_far_beyond_the_tolerance(expected: dict[str, Result]) -> None:
    for result in expected.values():
        assert furthest(result["after"], result["before"]) > 100 * WEIGHT
        assert min(numbers(result, "grad_norm")) > 0.05
        assert np.ptp(numbers(result, "loss")) > 1000 * LOSS


# Each stage once, on each number of ranks and for either model at least once.
BFLOAT16 = [
    pytest.param(zero, ranks, kind, marks=() if (zero, ranks, kind) in {(1, 1, "critic"), (2, 2, "policy")} else MORE)
    for zero in (1, 2, 3)
    for ranks in (1, 2)
    for kind in ("policy", "critic")
]


@pytest.mark.parametrize(("zero", "ranks", "kind"), BFLOAT16)
async def test_bfloat16_stays_near_float32(
    benches: dict[int, RankGroup], expected: dict[str, Result], zero: int, ranks: int, kind: str
) -> None:
    layout = BY_LAYERS | {"zero_stage": zero, "dtype": "bfloat16"}
    actual = await benches[ranks].call(getattr(Bench, kind), TIMEOUT_S, layout)
    assert numbers(actual, "loss") == pytest.approx(numbers(expected[kind], "loss"), abs=5e-3)
    assert numbers(actual, "grad_norm") == pytest.approx(numbers(expected[kind], "grad_norm"), rel=0.05)


async def test_what_zero_3_saves_on_two_ranks_is_the_model(
    benches: dict[int, RankGroup], policy_folder: Path, reward_folder: Path, tmp_path: Path
) -> None:
    await benches[2].call(Bench.saved, TIMEOUT_S, BY_LAYERS, tmp_path)
    saved, source = (
        AutoModelForCausalLM.from_pretrained(folder).state_dict() for folder in (tmp_path / "policy", policy_folder)
    )
    assert saved.keys() == source.keys()
    assert all(torch.equal(saved[name], source[name]) for name in source)
    body = load_file(tmp_path / "critic" / "model.safetensors")
    reward = load_file(reward_folder / "model.safetensors")
    assert {f"model.{name}" for name in body} == reward.keys() - {"score.weight"}
    assert all(torch.equal(tensor, reward[f"model.{name}"]) for name, tensor in body.items())
    head = load_file(tmp_path / "critic" / "value_head.safetensors")
    assert {name: tuple(tensor.shape) for name, tensor in head.items()} == {
        "value_head.weight": (1, 64),
        "value_head.bias": (1,),
    }
