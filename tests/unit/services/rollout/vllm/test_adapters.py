"""Adapters of an engine between pushes: where each push's are put, and which of them one that fails leaves."""

from dataclasses import asdict
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from quartet.weight_transfer.manifest import Manifest
from services.rollout.vllm import adapters
from services.rollout.vllm.adapters import Adapters
from tests.unit.services.rollout.vllm.test_vllm_loading import Worker

SHAPES = {"q_proj.lora_A.weight": (2, 3), "q_proj.lora_B.weight": (4, 2)}


Loaded = list[tuple[int, dict[str, torch.Tensor]]]


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> Loaded:
    """Records what vLLM is given, each time, and for which place."""
    made: Loaded = []

    def load(runner: Any, tensors: dict[str, torch.Tensor], rank: int, place: int) -> list[str]:
        assert (runner, rank) == ("runner", 2)
        made.append((place, tensors))
        return ["k_proj"]

    monkeypatch.setattr(adapters, "load_adapters", load)
    monkeypatch.setattr(adapters, "keep_adapters", lambda runner: None)
    return made


@pytest.mark.parametrize(("versions", "place"), [(1, 0), (3, 2)])
def test_a_push_that_changed_while_it_was_loaded_leaves_other_versions_if_any_and_the_next_one_heals(
    loaded: Loaded, versions: int, place: int
) -> None:
    manifest = Manifest.of({name: torch.empty(shape) for name, shape in SHAPES.items()}, 32)  # two buckets
    data = [torch.full((size,), 1.5).view(torch.uint8) for size in (6, 8)]
    made = Adapters("runner", 2, SHAPES, versions, torch.device("cpu"))
    assert made.stale == ["k_proj"]
    assert made.discard()

    made.place = place

    received = Mock()
    received.buckets = lambda: zip(manifest.buckets(), data, strict=True)
    received.check.side_effect = [RuntimeError("changed"), None]
    with pytest.raises(RuntimeError, match="changed"):
        made.replace(manifest, received)
    assert made.discard() == (versions > 1)
    made.replace(manifest, received)
    assert made.discard()
    assert [at for at, _ in loaded] == [0, place, place]
    for (_, tensors), value in zip(loaded, (0.0, 1.5, 1.5), strict=True):
        assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == SHAPES
        assert all(bool((tensor == value).all()) for tensor in tensors.values())


def test_a_worker_is_told_where_the_next_pushs_adapters_go(loaded: Loaded) -> None:
    worker = Worker()
    worker.model_runner = "runner"
    worker.take_adapters(2, SHAPES, 3)
    worker.put_adapters_at(2)
    assert worker.stale_weights() == ["k_proj"]
    assert not worker.knows_pieces(asdict(worker.receiver.manifest))
    worker.receiver.sent = {name: torch.full(shape, 1.5) for name, shape in SHAPES.items()}
    worker.receiver.manifest = Manifest.of(worker.receiver.sent, 64)
    worker.push()
    assert [at for at, _ in loaded] == [0, 2]
    assert worker.abort_weight_update()
