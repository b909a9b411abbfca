"""The seam with DeepSpeed, against its engine. Marks of divided weights: learner/test_tensor_parallel.py."""

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers.integrations.tensor_parallel import ALL_PARALLEL_STYLES

from quartet.config.learner import GROUP_ELEMENTS, OptimizerConfig, PolicyConfig
from quartet.learner import module
from quartet.learner.learner import RankLearner
from quartet.models.loading import load_causal
from quartet.seams import deepspeed

UNREAD = {"empty", "empty_like", "detach"}
"""Operators that neither read nor write numbers."""


@pytest.fixture(scope="module")
def engine(policy_folder: Path) -> Any:
    return made(policy_folder)


def made(folder: Path, **options: Any) -> Any:
    config = PolicyConfig(model=str(folder), optimizer=OptimizerConfig(learning_rate=1e-3), **options)
    return RankLearner(load_causal(str(folder), config.dtype), config)._engine


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


@pytest.fixture(scope="module", params=[1, 2])
def zero(request: pytest.FixtureRequest, policy_folder: Path) -> Any:
    """The engine of a single rank with ZeRO, in half precision."""
    return made(policy_folder, dtype="bfloat16", zero_stage=request.param, packing=True)


class Moved(TorchDispatchMode):
    """Counts operators, and the bytes that they read and write."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0
        self.count = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket.__name__ in UNREAD or any(_views(given) for given in func._schema.returns):
            return result
        self.count += 1
        for field, given in zip(func._schema.arguments, args, strict=False):
            written = field.alias_info is not None and field.alias_info.is_write
            read = func.overloadpacket.__name__ != "copy_" or not written
            self.bytes += (written + read) * sum(map(_bytes, tree_leaves(given)))
        if not any(given.alias_info for given in func._schema.returns):
            self.bytes += sum(map(_bytes, tree_leaves(result)))
        return result


def _views(given: Any) -> bool:
    return given.alias_info is not None and not given.alias_info.is_write


def _bytes(leaf: Any) -> int:
    return leaf.numel() * leaf.element_size() if isinstance(leaf, torch.Tensor) else 0


def backward(engine: Any, factor: float = 1.0) -> list[torch.Tensor]:
    """One backward pass; the gradients that torch gave the parameters."""
    gradients: list[torch.Tensor] = []
    hooks = [
        parameter.register_hook(lambda gradient: gradients.append(gradient.detach().double().clone()))
        for parameter in engine.module.parameters()
    ]
    engine.backward(engine(torch.ones(1, 2, dtype=torch.long)).logits.float().sum() * factor)
    for hook in hooks:
        hook.remove()
    return gradients


def test_one_rank_with_zero_averages_nothing(zero: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from deepspeed.runtime.zero import stage_1_and_2

    reduced: list[int] = []
    monkeypatch.setattr(stage_1_and_2.dist, "all_reduce", lambda *_, **__: reduced.append(1))
    backward(zero)
    assert reduced == []
    zero.step()
    reduced.clear()
    monkeypatch.delattr(zero.optimizer, "average_tensor")
    backward(zero)
    assert len(reduced) == len(list(zero.module.parameters()))
    zero.step()


def test_zero_finds_the_norm_in_one_pass(zero: Any) -> None:
    gradients = backward(zero)
    with Moved() as moved:
        zero.step()
    assert zero.was_step_applied()
    expected = torch.stack([gradient.square().sum() for gradient in gradients]).sum().sqrt()
    assert float(zero.get_global_grad_norm()) == pytest.approx(float(expected), rel=1e-6)
    count = sum(parameter.numel() for parameter in zero.module.parameters())
    # Norm 2, flat copy 4, fp32 copy 6, clipping 8, AdamW 32, weights 6.
    assert moved.bytes / count == pytest.approx(58, rel=0.02)


def test_a_group_of_parameters_takes_few_kernels(policy_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counts = {}
    for most in (GROUP_ELEMENTS, 2000):
        monkeypatch.setattr(module, "GROUP_ELEMENTS", most)
        engine = made(policy_folder, dtype="bfloat16", zero_stage=1)
        for _ in range(2):
            backward(engine)
            with Moved() as moved:
                engine.step()
        counts[len(engine.optimizer.bit16_groups)] = moved.count
    (one, fewest), (several, most) = counts.items()
    assert one == 1
    assert several > 5
    # A flat copy, one in float32, five for the factor by which it is clipped, AdamW, its count, and the weights.
    assert (most - fewest) / (several - 1) <= 13


def test_gradients_of_one_number_are_kept_apart(policy_folder: Path) -> None:
    """DeepSpeed copies what fits into a bucket of one number there."""
    config = PolicyConfig(model=str(policy_folder), optimizer=OptimizerConfig(learning_rate=1e-3), zero_stage=1)
    engine: Any = RankLearner(torch.nn.Linear(1, 1), config)._engine
    engine.backward(engine(torch.tensor([[3.0]])).sum())
    assert [float(each) for each in engine.optimizer.averaged_gradients[0] if each.any()] == [3, 1]


@pytest.mark.parametrize("factor", [float("nan"), float("inf")])
def test_zero_skips_a_step_whose_norm_is_not_finite(zero: Any, factor: float) -> None:
    before = [parameter.detach().clone() for parameter in zero.module.parameters()]
    backward(zero, factor)
    zero.step()
    assert not zero.was_step_applied()
    assert all(map(torch.equal, before, zero.module.parameters()))


def test_the_kernel_that_is_not_compiled_is_one_of_deepspeeds() -> None:
    import deepspeed as library

    deepspeed.without_shared_memory_kernel()
    assert library.ops.__compatible_ops__["deepspeed_shm_comm"] is False
    assert library.ops.__compatible_ops__.keys() > {"deepspeed_shm_comm"}


def test_plans_are_written_in_styles_of_transformers() -> None:
    assert {"colwise", "rowwise"} <= deepspeed.divisible_styles() & set(ALL_PARALLEL_STYLES.keys())
    assert deepspeed.division_of(torch.nn.Parameter(torch.ones(1))) is None
