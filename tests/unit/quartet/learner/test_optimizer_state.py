"""The optimizer's state away from the device between updates, with DeepSpeed's own optimizers."""

from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum as State

from quartet.config.base import ConfigError
from quartet.config.learner import LearnerConfig
from quartet.learner import module
from quartet.learner.learner import RankLearner
from tests.unit.quartet.learner.test_learner import batches, make_learner, parts, squared_error

pytestmark = pytest.mark.processes  # they train for seconds

BOTH = {State.hp_params, State.optim_states}
MORE = pytest.mark.exhaustive  # one more of DeepSpeed's two optimizers
LAYOUTS = [
    pytest.param({"zero_stage": 1}, marks=MORE),
    {"zero_stage": 2},
    pytest.param({"zero_stage": 1, "dtype": "bfloat16"}, marks=MORE),
]


@pytest.fixture(autouse=True)
def groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three groups of parameters that the optimizer steps one after the other."""
    monkeypatch.setattr(module, "GROUP_ELEMENTS", 9)


def cast(learner: RankLearner, batch: Any) -> list[Any]:
    dtype = next(learner.module.parameters()).dtype
    return [(x.to(dtype), target) for x, target in parts(batch, 2, 4)]


def train(learner: RankLearner, steps: slice) -> None:
    for batch in batches(4)[steps]:
        with learner.optimizer_state.resident():
            learner.step(cast(learner, batch), squared_error(learner.model))


def state(learner: RankLearner) -> list[torch.Tensor]:
    """Weights, their fp32 masters, and both moments."""
    optimizer = learner._engine.optimizer
    moments = [t for held in optimizer.optimizer.state.values() for t in held.values() if torch.is_tensor(t)]
    tensors = [*learner.module.parameters(), *optimizer.single_partition_of_fp32_groups, *moments]
    return [tensor.detach().clone() for tensor in tensors]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_training_is_the_same_bit_for_bit_and_the_state_is_away_between_updates(
    policy_folder: Path, layout: dict[str, Any]
) -> None:
    away, kept = (make_learner(policy_folder, **layout, colocate=colocate) for colocate in (True, False))
    optimizer = away._engine.optimizer
    assert optimizer.offloaded_states == BOTH
    for step in range(4):
        for learner in (away, kept):
            train(learner, slice(step, step + 1))
        assert optimizer.offloaded_states == BOTH
        # Views of the state on the device would keep its memory there.
        for parameter in away.module.parameters():
            assert parameter._hp_mapping.hp_fragment is None
            assert not parameter._hp_mapping.optim_fragment
        pinned = [buffer.data_ptr() for buffer in optimizer.hp_params_pin_buffers]
        assert [master.data_ptr() for master in optimizer.single_partition_of_fp32_groups] == pinned
    assert kept._engine.optimizer.offloaded_states == set()
    with away.optimizer_state.resident():
        assert optimizer.offloaded_states == set()
    for mine, theirs in zip(state(away), state(kept), strict=True):
        assert torch.equal(mine, theirs)


def test_it_goes_away_after_an_update_that_failed(policy_folder: Path) -> None:
    learner = make_learner(policy_folder, zero_stage=1, colocate=True)
    with pytest.raises(ZeroDivisionError), learner.optimizer_state.resident():
        raise ZeroDivisionError
    assert learner._engine.optimizer.offloaded_states == BOTH
    train(learner, slice(0, 1))


@pytest.mark.parametrize(
    ("colocate", "copies"),
    [(True, True), (False, False), pytest.param(True, False, marks=MORE), pytest.param(False, True, marks=MORE)],
)
def test_a_snapshot_taken_while_it_is_away_is_whole(
    policy_folder: Path, tmp_path: Path, colocate: bool, copies: bool
) -> None:
    layout: dict[str, Any] = {"zero_stage": 1, "dtype": "bfloat16"}
    first = make_learner(policy_folder, **layout, colocate=True)
    train(first, slice(0, 2))
    folder = tmp_path / "snapshot"
    folder.mkdir()
    first.take_snapshot(folder, 2, copies=copies)
    first.write_snapshot()
    train(first, slice(2, 4))
    second = make_learner(policy_folder, **layout, colocate=colocate)
    assert second.restore(folder) == 2
    assert bool(second._engine.optimizer.offloaded_states) == colocate
    train(second, slice(2, 4))
    for mine, theirs in zip(state(second), state(first), strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"zero_stage": 0}, "colocate needs zero_stage 1 or 2; it is 0"),
        ({"zero_stage": 3}, "colocate needs zero_stage 1 or 2; it is 3"),
        ({"zero_stage": 1, "adam_offload": True}, "colocate: adam_offload always keeps the same state"),
    ],
)
def test_where_it_cannot_be_done_it_is_refused(policy_folder: Path, fields: dict[str, Any], reason: str) -> None:
    given = {"model": str(policy_folder), "optimizer": {"learning_rate": 1e-4}, "colocate": True} | fields
    with pytest.raises(ConfigError, match=reason):
        LearnerConfig.parse(given, "policy")
