"""Adapters of an engine between pushes: which of them a push that fails leaves."""

from typing import Any

import pytest
import torch

from quartet.weight_transfer.manifest import Manifest
from services.rollout.vllm import adapters
from services.rollout.vllm.adapters import Adapters

SHAPES = {"q_proj.lora_A.weight": (2, 3), "q_proj.lora_B.weight": (4, 2)}


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, torch.Tensor]]:
    """Records what vLLM is given, each time."""
    made: list[dict[str, torch.Tensor]] = []

    def load(runner: Any, tensors: dict[str, torch.Tensor], rank: int) -> list[str]:
        assert (runner, rank) == ("runner", 2)
        made.append(tensors)
        return ["k_proj"]

    monkeypatch.setattr(adapters, "load_adapters", load)
    monkeypatch.setattr(adapters, "keep_adapters", lambda runner: None)
    return made


def test_a_push_that_changed_while_it_was_loaded_leaves_none_and_the_next_one_heals(
    loaded: list[dict[str, torch.Tensor]],
) -> None:
    manifest = Manifest.of({name: torch.empty(shape) for name, shape in SHAPES.items()}, 32)  # two buckets
    data = [torch.full((size,), 1.5).view(torch.uint8) for size in (6, 8)]
    made = Adapters("runner", 2, SHAPES, torch.device("cpu"))
    assert made.stale == ["k_proj"]
    assert made.discard()

    def changed() -> None:
        raise RuntimeError("changed")

    def buckets() -> Any:
        return zip(manifest.buckets(), data, strict=True)

    with pytest.raises(RuntimeError, match="changed"):
        made.replace(manifest, buckets, changed)
    assert not made.discard()
    made.replace(manifest, buckets, lambda: None)
    assert made.discard()
    for tensors, value in zip(loaded, (0.0, 1.5, 1.5), strict=True):
        assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == SHAPES
        assert all(bool((tensor == value).all()) for tensor in tensors.values())
