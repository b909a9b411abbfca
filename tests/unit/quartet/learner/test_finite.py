"""A gradient that is not finite changes nothing on any rank, in any layout; weights that are not leave no learner."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from quartet.config.learner import LoraConfig, TensorParallelConfig
from quartet.learner.finite import check_weights
from quartet.ranks.group import RankGroup
from quartet.ranks.ranks import Ranks
from quartet.wire.errors import NotFinite
from tests.plain import furthest
from tests.unit.layouts import BY_LAYERS, STAGES, TIMEOUT_S, Bench

pytestmark = pytest.mark.processes

LAYOUTS: dict[str, dict[str, Any]] = {
    **STAGES,
    "bfloat16, zero 1": {"zero_stage": 1, "dtype": "bfloat16"},
    "bfloat16, zero 2": {"zero_stage": 2, "dtype": "bfloat16"},
    "bfloat16, zero 3": {"dtype": "bfloat16"} | BY_LAYERS,
    "running mean, zero 0": {"ema_decay": 0.9},
    "running mean, zero 3": {"ema_decay": 0.9} | BY_LAYERS,
    "adapters, zero 0": {"lora": LoraConfig(rank=4)},
    "adam offload": {"adam_offload": True, "zero_stage": 2},
    "both offloads": {"adam_offload": True, "param_offload": True} | BY_LAYERS,
}


async def check_skipping(bench: RankGroup, layout: dict[str, Any], which: str) -> None:
    actual, wanted, said = await bench.call(Bench.skipping, TIMEOUT_S, layout, which)
    assert said[:2] == [{"skipped_steps": 1, "skipped_in_a_row": n} for n in (1, 2)]
    assert said[2] == {"skipped_in_a_row": 0}
    assert actual["steps"] == wanted["steps"]
    assert furthest(actual["weights"], wanted["weights"]) == 0
    assert all((a == b).all() for a, b in zip(actual["averages"], wanted["averages"], strict=True))


MORE = pytest.mark.exhaustive
# Of each kind of optimizer one is in `make test`; fp32 at ZeRO 0, which is ours to skip, on one rank.
ALWAYS = {("zero 0", 1), ("zero 2", 2), ("zero 3", 2), ("both offloads", 2)}
CASES = [
    pytest.param(name, ranks, marks=() if (name, ranks) in ALWAYS else MORE) for name in LAYOUTS for ranks in (1, 2)
]


@pytest.mark.parametrize(("name", "ranks"), CASES)
async def test_a_gradient_that_is_not_finite_changes_nothing(
    benches: dict[int, RankGroup], name: str, ranks: int
) -> None:
    for which in ("policy", "critic"):
        await check_skipping(benches[ranks], LAYOUTS[name] | {"ranks": ranks}, which)


# The optimizer has no part in it.
@pytest.mark.parametrize("ranks", [pytest.param(1, marks=MORE), 2])
@pytest.mark.parametrize(
    "name", ["zero 0", "zero 3", *(pytest.param(name, marks=MORE) for name in ("bfloat16, zero 1", "both offloads"))]
)
async def test_weights_that_are_not_finite_on_one_rank_are_refused_on_all(
    benches: dict[int, RankGroup], tmp_path: Path, name: str, ranks: int
) -> None:
    said = await benches[ranks].call(Bench.refusing, TIMEOUT_S, LAYOUTS[name] | {"ranks": ranks}, tmp_path)
    assert len(said) == 3
    assert all("weights are not finite" in text for text in said)
    assert not (tmp_path / "model").exists()
    assert not (tmp_path / "snapshot").exists()


PADDED = ["both offloads", *(pytest.param(name, marks=MORE) for name in LAYOUTS if name.endswith("zero 3"))]


# The critic's bias is a single number, of which all ranks but one hold padding.
@pytest.mark.parametrize("name", PADDED)
async def test_padding_is_part_of_no_weight(benches: dict[int, RankGroup], tmp_path: Path, name: str) -> None:
    layout = LAYOUTS[name] | {"ranks": 2}
    wanted, actual = await benches[2].call(Bench.in_garbage, TIMEOUT_S, layout, tmp_path, "critic")
    assert actual["steps"] == wanted["steps"]
    assert furthest(actual["weights"], wanted["weights"]) == 0
    assert all((a == b).all() for a, b in zip(actual["averages"], wanted["averages"], strict=True))


# Last: DeepSpeed remembers in a process that layers were divided.
@pytest.mark.parametrize("layout", [{}, pytest.param({"zero_stage": 2}, marks=MORE)], ids=["zero 0", "zero 2"])
async def test_nor_where_layers_are_divided(benches: dict[int, RankGroup], layout: dict[str, Any]) -> None:
    divided = {"ranks": 2, "tensor_parallel": TensorParallelConfig(size=2)} | layout
    await check_skipping(benches[2], divided, "policy")


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
def test_one_weight_of_any_wrong_kind_is_found_and_its_tensor_named(wrong: float) -> None:
    module = torch.nn.Linear(3, 2)
    check_weights(module, Ranks(), torch.device("cpu"))
    with torch.no_grad():
        module.bias[1] = wrong
    with pytest.raises(NotFinite, match="weights are not finite, here in bias and 0 more"):
        check_weights(module, Ranks(), torch.device("cpu"))
