"""Slots of the KV cache for running requests: as vLLM's own manager gives them, asked for at ends of blocks only."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, SlidingWindowSpec

from services.rollout.vllm import scheduler as scheduler_module
from services.rollout.vllm.slots import blocks_fill_alike
from tests.unit.queued_engine import BLOCK, QueuedEngine


def blocks(engine: QueuedEngine) -> tuple[Any, ...]:
    """All of the KV cache's manager: the requests' blocks, those kept for later prompts, and the free ones."""
    manager = engine.core.scheduler.kv_cache_manager
    kept = {block.block_id: block.block_hash for block in manager.block_pool.blocks if block.block_hash is not None}
    return {name: manager.get_block_ids(name) for name in engine.core.scheduler.requests}, kept, engine.free_blocks()


@pytest.mark.parametrize("kind", ["V1", "V2", "in step"])
def test_blocks_are_those_that_vllms_own_manager_gives(
    policy_folder: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    def made() -> QueuedEngine:
        engine = QueuedEngine(policy_folder, v2=kind == "V2", queued=kind != "in step")
        engine.core.scheduler.max_num_scheduled_tokens = BLOCK + 5  # prompts are read in pieces
        return engine

    skipping = made()
    monkeypatch.setattr(scheduler_module, "blocks_fill_alike", lambda config: False)
    engines = [skipping, made()]
    drawn, asked, version = random.Random(7), 0, 0
    for _ in range(400):
        act = drawn.random()
        name, prompt, new = f"r{asked}", drawn.randint(1, 3 * BLOCK), drawn.randint(1, 3 * BLOCK)
        gone, cleared = f"r{drawn.randint(0, asked)}", drawn.random() < 0.5
        asked += act < 0.15
        version += 0.18 < act < 0.22
        for engine in engines:
            if act < 0.15:
                engine.ask(name, prompt, new)
            elif act < 0.18:
                engine.abort(gone)
            elif act < 0.22:
                engine.pause(clear_cache=cleared)
                engine.change_weights(version)
                engine.resume()
            engine.turn()
        assert blocks(engines[0]) == blocks(engines[1])
    assert asked > 40
    ours, theirs = (engine.received() for engine in engines)
    assert [(name, ids, last) for name, ids, *_, last in ours] == [
        (name, ids, last) for name, ids, *_, last in theirs
    ]


def test_layers_are_asked_where_a_block_begins_or_is_full(
    policy_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = QueuedEngine(policy_folder, queued=False)
    coordinator = engine.core.scheduler.kv_cache_manager.coordinator
    asked = {"allocate_new_blocks": 0, "cache_blocks": 0}
    for name in asked:
        own = getattr(coordinator, name)

        def counted(*args: Any, own: Any = own, name: str = name, **kwargs: Any) -> Any:
            asked[name] += 1
            return own(*args, **kwargs)

        monkeypatch.setattr(coordinator, name, counted)
    engine.ask("a", BLOCK, 4 * BLOCK)
    engine.turn(5 * BLOCK)
    assert not engine.core.has_work()
    # Of 64 tokens: four begin a block, four fill one (the last one ends the response), and the prompt's own slots.
    assert asked["allocate_new_blocks"] <= 9
    assert asked["cache_blocks"] <= 14


def test_layers_that_forget_tokens_are_left_to_vllm() -> None:
    shape: Any = {"block_size": BLOCK, "num_kv_heads": 2, "head_size": 32, "dtype": torch.float32}
    full = KVCacheGroupSpec(["full"], FullAttentionSpec(**shape))
    window = KVCacheGroupSpec(["window"], SlidingWindowSpec(**shape, sliding_window=64))
    made = {
        count: KVCacheConfig(65, [], groups) for count, groups in enumerate([[], [full], [window], [full, window]])
    }
    assert [blocks_fill_alike(config) for config in made.values()] == [False, True, False, False]
