"""The sums of a learner's host memory, with those of its GPU, against what DeepSpeed allocates on two ranks."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen2Config

from quartet.config.learner import PolicyConfig
from quartet.learner import host_memory, memory
from quartet.learner.host_memory import copied_bytes, held_bytes
from quartet.learner.memory import kept_bytes, learner_bytes
from quartet.models.size import BYTES, ModelSize
from quartet.models.tiles import TILE_ELEMENTS
from tests.unit.memory_bench import OPTIMIZER, SMALL_BUCKET, SMALL_GROUP, SMALL_TILE, Held, MemoryBench
from tests.unit.rank_processes import SpawnedRank, spawned

pytestmark = pytest.mark.processes

RANKS, TOKENS = 2, 64
BF16: dict[str, Any] = {"dtype": "bfloat16"}
OFFLOADED = {
    "adam offload, zero 1": BF16 | {"zero_stage": 1, "adam_offload": True},
    "adam offload, zero 2": BF16 | {"zero_stage": 2, "adam_offload": True},
    "both offloads": BF16 | {"zero_stage": 3, "adam_offload": True, "param_offload": True},
    "adam offload, zero 3, float32": {"zero_stage": 3, "adam_offload": True},
}
LAYOUTS: dict[str, dict[str, Any]] = OFFLOADED | {
    "zero 0": {},
    "zero 1": BF16 | {"zero_stage": 1},
    "zero 2 and a mean": BF16 | {"zero_stage": 2, "ema_decay": 0.9},
    "zero 3 and a mean": BF16 | {"zero_stage": 3, "ema_decay": 0.9},
}
CONFIG = Qwen2Config(
    vocab_size=2000,
    hidden_size=256,
    intermediate_size=1024,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    tie_word_embeddings=False,
)


@pytest.fixture(scope="module")
async def ranks(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[list[SpawnedRank]]:
    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(CONFIG).to(torch.bfloat16).save_pretrained(folder)
    async with spawned(MemoryBench, folder, ranks=RANKS) as (_, processes):
        yield processes


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sizes that the ranks use. On a CPU nothing is pinned, thus nothing rounded."""
    monkeypatch.setattr(memory, "REDUCE_ELEMENTS", SMALL_BUCKET)
    monkeypatch.setattr(memory, "GROUP_ELEMENTS", SMALL_GROUP)
    monkeypatch.setattr(host_memory, "pinned", lambda size: size)
    for device in TILE_ELEMENTS:
        monkeypatch.setitem(TILE_ELEMENTS, device, SMALL_TILE)


@pytest.mark.parametrize("name", LAYOUTS)
async def test_the_sums_of_two_ranks(
    name: str, ranks: list[SpawnedRank], policy_folder: Path, tmp_path: Path
) -> None:
    layout, size = LAYOUTS[name], ModelSize.of(CONFIG)
    calls = [rank.call("run", "MemoryBench.held", layout, TOKENS, tmp_path / "snapshot") for rank in ranks]
    measured: list[Held] = await asyncio.gather(*calls)
    given: dict[str, Any] = {"optimizer": OPTIMIZER, "ranks": RANKS, "micro_batch_tokens": TOKENS} | layout
    config = PolicyConfig(model=str(policy_folder), **given)
    host = sum(held_bytes(config, size).values())
    for rank, held in enumerate(measured):
        assert learner_bytes(config, size, logits=True) + host == pytest.approx(held.peak, rel=0.1)
        assert copied_bytes(config, size, exported=True, rank=rank) == pytest.approx(
            held.copies, rel=0.02, abs=10_000
        )
        if name in OFFLOADED:
            # Between updates most of it is the host's: stage 1 has no gradients left on the GPU then.
            gone = size.parameters * BYTES[config.dtype] if config.zero_stage == 1 else 0
            assert host + kept_bytes(config, size) - gone == pytest.approx(held.rest, rel=0.05)
            assert host > 0.7 * held.rest


@pytest.mark.parametrize(("stage", "each"), [(1, 2 + 2 + 6), (2, 2 + 1 + 6), (3, 1 + 1 + 6)])
def test_two_ranks_keep_what_the_zero_paper_says(stage: Any, each: int, policy_folder: Path) -> None:
    """Bytes of weights, gradients and optimizer for each parameter (arXiv:1910.02054, section 5)."""
    config = PolicyConfig(model=str(policy_folder), optimizer=OPTIMIZER, ranks=RANKS, zero_stage=stage, **BF16)
    size = ModelSize.of(CONFIG)
    assert kept_bytes(config, size) - SMALL_BUCKET * BYTES[config.dtype] == each * size.parameters
