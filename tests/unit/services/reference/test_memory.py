"""The sum of a frozen model's memory, against the bytes that torch allocates in a pass of a small model."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedConfig, Qwen3Config

from orchestrator.deployment.memory import CONTEXT, frozen_bytes
from quartet.columns import Columns
from quartet.models.distribution import Distribution
from quartet.models.size import ModelSize
from quartet.models.tiles import TILE_ELEMENTS
from services.reference.config import ReferenceConfig
from services.reference.model import FrozenModel
from tests.unit.allocations import Allocations

LENGTH = 64
# In the proportions of 1.5B parameters.
SIZES: dict[str, Any] = {
    "vocab_size": 2000,
    "hidden_size": 192,
    "intermediate_size": 1024,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "tie_word_embeddings": False,
}


@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize(("kind", "dtype"), [(LlamaConfig, "bfloat16"), (Qwen3Config, "float32")])
def test_a_frozen_model_allocates_its_sum(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: type[PreTrainedConfig], dtype: str, packing: bool
) -> None:
    for device in TILE_ELEMENTS:
        monkeypatch.setitem(TILE_ELEMENTS, device, 1 << 18)  # so that no tile is larger than a layer's states
    described = kind(**SIZES)
    AutoModelForCausalLM.from_config(described).to(torch.bfloat16).save_pretrained(tmp_path)
    tokens = 4096
    config = ReferenceConfig(model=str(tmp_path), dtype=dtype, batch_tokens=tokens, packing=packing)  # type: ignore[arg-type]
    rows = [np.full(LENGTH, 2 + row, np.int32) for row in range(tokens // LENGTH)]
    asked = Columns.of_pairs([row[:2] for row in rows], [row[2:] for row in rows])
    before = Allocations().now
    model = FrozenModel(config, torch.device("cpu"))
    with Allocations() as counted:
        model.logprobs(asked, Distribution())
    held, expected = counted.peak - before, frozen_bytes(ModelSize.of(described), config, logits=True) - CONTEXT
    assert held == pytest.approx(expected, rel=0.05)
    passing = counted.peak - counted.now
    assert passing == pytest.approx(ModelSize.of(described).passing(tokens, 4 if dtype == "float32" else 2), rel=0.05)
