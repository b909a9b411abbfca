"""Layers divided among ranks give the numbers of one rank that has them whole: AutoTP for real, over gloo."""

from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from deepspeed.checkpoint.constants import DS_AUTOTP_UC_META
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, MixtralConfig, Phi3Config

from quartet.config.base import ConfigError
from quartet.learner.layout import LAYOUT, Layout
from quartet.learner.tensor_parallel import check_divided, check_divisible
from quartet.ranks.group import RankGroup
from tests.models import ROWS, make_policy
from tests.plain import furthest
from tests.unit.layouts import BY_LAYERS, STAGES, TIMEOUT_S, Bench, Result
from tests.unit.quartet.learner.test_learner_layouts import ACCUMULATED, PACKED, numbers, same_steps
from tests.unit.rank_processes import spawned

pytestmark = pytest.mark.processes

Call = Callable[..., Awaitable[Any]]
LAYOUTS: dict[str, dict[str, Any]] = {
    **STAGES,
    "adam offload, zero 2": {"adam_offload": True, "zero_stage": 2},
    "both offloads": {"adam_offload": True, "param_offload": True} | BY_LAYERS,
    "accumulation, checkpointing": ACCUMULATED | {"gradient_checkpointing": True},
    "packing, accumulation, zero 1": PACKED | ACCUMULATED | {"zero_stage": 1},
}


@pytest.fixture(scope="module")
async def whole(policy_folder: Path, reward_folder: Path) -> AsyncIterator[RankGroup]:
    """One rank."""
    async with spawned(Bench, policy_folder, reward_folder, ranks=1) as (group, _):
        yield group


# Two copies of a divided model, on four ranks, are data parallelism once more.
@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.exhaustive)])
async def divided(request: pytest.FixtureRequest, policy_folder: Path, reward_folder: Path) -> AsyncIterator[Call]:
    """Calls a method of Bench under a layout: one copy of the model on two ranks, and two copies on four."""
    async with spawned(Bench, policy_folder, reward_folder, ranks=request.param) as (group, _):

        def call(method: str, layout: dict[str, Any], *arguments: Any) -> Awaitable[Any]:
            tensor_parallel = {"tensor_parallel": {"size": 2}, "ranks": request.param}
            return group.call(getattr(Bench, method), TIMEOUT_S, layout | tensor_parallel, *arguments)

        yield call


@pytest.fixture(scope="module")
async def expected(whole: RankGroup) -> dict[str, Result]:
    """One rank, ZeRO 0, nothing divided."""
    return {kind: await whole.call(getattr(Bench, kind), TIMEOUT_S, {}) for kind in ("policy", "critic")}


MORE = pytest.mark.exhaustive
# Each stage, offload, accumulation, checkpointing and packing once, and either model.
ALWAYS = {("zero 0", "policy"), ("zero 3", "critic"), ("adam offload, zero 2", "policy"), ("both offloads", "policy")}
ALWAYS |= {("accumulation, checkpointing", "critic"), ("packing, accumulation, zero 1", "policy")}
CASES = [
    pytest.param(layout, kind, marks=() if (layout, kind) in ALWAYS else MORE)
    for layout in LAYOUTS
    for kind in ("policy", "critic")
]


@pytest.mark.parametrize(("layout", "kind"), CASES)
async def test_five_steps_are_the_same(divided: Call, expected: dict[str, Result], layout: str, kind: str) -> None:
    wanted, actual = expected[kind], await divided(kind, LAYOUTS[layout])
    same_steps(actual, wanted)


async def test_each_rank_has_a_half_of_what_is_divided(divided: Call, whole: RankGroup) -> None:
    # Two layers of 64 x 64 (q, k, v, o) and 64 x 128 (gate, up, down). Of the policy's head, ROWS x 64, the first
    # rank has the odd row.
    layers = 2 * (4 * 64 * 64 + 3 * 64 * 128)
    for kind, others in {"policy": layers // 2 + ROWS // 2 * 64, "critic": layers // 2}.items():
        everything = await whole.call(Bench.held, TIMEOUT_S, {}, kind)
        assert await divided("held", {}, kind) == everything - others


@pytest.mark.parametrize("kind", ["policy", pytest.param("critic", marks=MORE)])  # the same engine
async def test_bfloat16_stays_near_float32(divided: Call, expected: dict[str, Result], kind: str) -> None:
    actual = await divided(kind, {"zero_stage": 1, "dtype": "bfloat16"})
    assert numbers(actual, "loss") == pytest.approx(numbers(expected[kind], "loss"), abs=5e-3)
    assert numbers(actual, "grad_norm") == pytest.approx(numbers(expected[kind], "grad_norm"), rel=0.05)


@pytest.mark.parametrize(
    ("kind", "shape"),
    [
        # biases; embedding and head are one, and stay whole
        ("qwen2", {"tied": True}),
        # two query heads to each of keys and values
        pytest.param("qwen2", {"tied": False, "num_attention_heads": 4}, marks=MORE),
        # norms that every rank has, of heads that it has not
        pytest.param("qwen3", {"tied": False}, marks=MORE),
        # pieces of 34 and 33 words
        pytest.param("llama", {"tied": False, "vocab_size": 67}, marks=MORE),
    ],
)
async def test_other_models_too(reward_folder: Path, tmp_path: Path, kind: Any, shape: dict[str, Any]) -> None:
    folder = make_policy(tmp_path / kind, kind=kind, **shape)
    results = []
    for ranks, layout in ((1, {}), (2, {"ranks": 2, "tensor_parallel": {"size": 2}})):
        async with spawned(Bench, folder, reward_folder, ranks=ranks) as (group, _):
            results.append(await group.call(Bench.policy, TIMEOUT_S, layout))
    wanted, actual = results
    same_steps(actual, wanted)


# Weights that are whole beside those in pieces are one stage of ZeRO more.
PUSHED = [pytest.param({}, marks=MORE), pytest.param({"zero_stage": 2}, marks=MORE), BY_LAYERS]


@pytest.mark.parametrize("layout", PUSHED, ids=str)
async def test_whole_weights_are_pushed_and_saved(
    divided: Call, whole: RankGroup, policy_folder: Path, reward_folder: Path, tmp_path: Path, layout: dict[str, Any]
) -> None:
    pushed = await whole.call(Bench.pushed, TIMEOUT_S, {})
    assert len(pushed) > 5
    assert await divided("pushed", layout) == pushed
    await divided("saved", layout, tmp_path)
    saved, source = (
        AutoModelForCausalLM.from_pretrained(folder).state_dict() for folder in (tmp_path / "policy", policy_folder)
    )
    assert saved.keys() == source.keys()
    assert all(torch.equal(saved[name], source[name]) for name in source)
    body, reward = (load_file(f / "model.safetensors") for f in (tmp_path / "critic", reward_folder))
    assert all(torch.equal(tensor, reward[f"model.{name}"]) for name, tensor in body.items())


@pytest.mark.parametrize("layout", PUSHED, ids=str)
async def test_the_running_mean_is_saved_whole(divided: Call, layout: dict[str, Any], tmp_path: Path) -> None:
    seen, after, _ = await divided("averaged", layout | {"ema_decay": 0.75}, tmp_path / "mean")
    assert furthest(after, seen[-1]) == 0
    for name, tensor in load_file(tmp_path / "mean" / "model.safetensors").items():
        mean = seen[0][name]
        for weights in seen[1:]:
            mean = 0.75 * mean + 0.25 * weights[name]
        assert float(np.abs(tensor.numpy() - mean).max()) < 1e-6


RESUMED = [
    pytest.param({}, marks=MORE),
    pytest.param({"zero_stage": 1, "dtype": "bfloat16"}, marks=MORE),
    pytest.param({"zero_stage": 2, "ema_decay": 0.9}, marks=MORE),
    BY_LAYERS,
]


@pytest.mark.parametrize("which", ["policy", pytest.param("critic", marks=MORE)])
@pytest.mark.parametrize("layout", RESUMED, ids=str)
async def test_a_snapshot_goes_on_bit_for_bit(
    divided: Call, tmp_path: Path, layout: dict[str, Any], which: str
) -> None:
    straight, again = await divided("resumed", layout, tmp_path, which)
    assert again["steps"] == straight["steps"]
    assert furthest(again["weights"], straight["weights"]) == 0
    assert all((a == b).all() for a, b in zip(again["averages"], straight["averages"], strict=True))
    assert Layout.read(tmp_path / which / LAYOUT).tensor_parallel == 2


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (GPT2Config(), "DeepSpeed has no plan by which to divide gpt2; set it to 1"),
        (Phi3Config(), "DeepSpeed has no plan by which to divide phi3; set it to 1"),
        (MixtralConfig(), "DeepSpeed has no plan by which to divide mixtral; set it to 1"),
        (
            LlamaConfig(num_attention_heads=3, hidden_size=96),
            "should divide the model's num_attention_heads 3, got 2",
        ),
        (LlamaConfig(num_attention_heads=4, num_key_value_heads=1), "the model's num_key_value_heads 1, got 2"),
        (LlamaConfig(intermediate_size=127), "the model's intermediate_size 127, got 2"),
    ],
)
def test_models_that_cannot_be_divided(config: Any, message: str) -> None:
    module = nn.Module()
    module.config = config
    with pytest.raises(ConfigError, match=f"tensor_parallel.size: .*{message}"):
        check_divisible(module, 2)


def test_a_model_that_was_divided_otherwise_is_refused() -> None:
    module = nn.Linear(4, 4)
    with pytest.raises(ConfigError, match="DeepSpeed cannot divide this model; set it to 1"):
        check_divided(module)
    plain = {"replicated": False, "partition_sizes": (2, 2), "sub_param_sizes": None}
    setattr(module.weight, DS_AUTOTP_UC_META, plain)
    check_divided(module)
    setattr(module.bias, DS_AUTOTP_UC_META, plain | {"sub_param_sizes": (1, 1)})
    with pytest.raises(ConfigError, match="DeepSpeed divides bias along more than one dimension; set it to 1"):
        check_divided(module)
