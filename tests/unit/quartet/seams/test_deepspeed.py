"""The seam with DeepSpeed, against its engine. Marks of divided weights: learner/test_tensor_parallel.py."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers.integrations.tensor_parallel import ALL_PARALLEL_STYLES

from quartet.config.learner import OptimizerConfig, PolicyConfig
from quartet.learner.learner import RankLearner
from quartet.models.loading import load_causal
from quartet.seams import deepspeed


@pytest.fixture(scope="module")
def engine(policy_folder: Path) -> Any:
    config = PolicyConfig(model=str(policy_folder), optimizer=OptimizerConfig(learning_rate=1e-3))
    return RankLearner(load_causal(str(policy_folder), "float32"), config)._engine


def test_the_engine_saves_by_what_it_was_given(engine: Any, tmp_path: Path) -> None:
    saved: list[str] = []
    given = SimpleNamespace(
        makedirs=lambda path, exist_ok=False: None,
        create=lambda info: None,
        commit=lambda info: True,
        save=lambda state_dict, path: saved.append(Path(path).name),
        is_data_parallel_writer=lambda rank: rank == 0,
        is_decoupled=lambda: False,
        preserves_storage_sharing=lambda: True,
    )
    before = engine.checkpoint_engine
    deepspeed.save_by(engine, given)
    try:
        engine.save_checkpoint(str(tmp_path), tag="x", save_latest=False)
    finally:
        engine.checkpoint_engine = before
    assert saved
    assert list(tmp_path.iterdir()) == []


def test_one_rank_without_zero_averages_nothing(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    reduced: list[int] = []
    monkeypatch.setattr(engine, "allreduce_gradients", lambda *_, **__: reduced.append(1))
    assert engine.enable_backward_allreduce is False  # by without_reduction, as RankLearner asks
    engine.backward(engine(torch.ones(1, 2, dtype=torch.long)).logits.sum())
    assert reduced == []
    monkeypatch.setattr(engine, "enable_backward_allreduce", True)
    engine.backward(engine(torch.ones(1, 2, dtype=torch.long)).logits.sum())
    assert reduced == [1]
    engine.zero_grad()


def test_the_kernel_that_is_not_compiled_is_one_of_deepspeeds() -> None:
    import deepspeed as library

    deepspeed.without_shared_memory_kernel()
    assert library.ops.__compatible_ops__["deepspeed_shm_comm"] is False
    assert library.ops.__compatible_ops__.keys() > {"deepspeed_shm_comm"}


def test_plans_are_written_in_styles_of_transformers() -> None:
    assert {"colwise", "rowwise"} <= deepspeed.divisible_styles() & set(ALL_PARALLEL_STYLES.keys())
    assert deepspeed.division_of(torch.nn.Parameter(torch.ones(1))) is None
