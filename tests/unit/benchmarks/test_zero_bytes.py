"""The bytes that ZeRO's stages save, on a model of 4.5 million parameters and two ranks."""

from pathlib import Path

import pytest
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.zero_bytes import STAGES, formula, measure

# Exhaustive, as it is the command of docs/learner.md on a model of some size; the formula is part of it.
pytestmark = [pytest.mark.processes, pytest.mark.exhaustive]


def test_each_stage_holds_what_the_zero_paper_says(tmp_path: Path) -> None:
    shape = {"vocab_size": 500, "hidden_size": 256, "intermediate_size": 1024, "num_attention_heads": 4}
    LlamaForCausalLM(LlamaConfig(**shape, num_hidden_layers=4)).save_pretrained(tmp_path)
    # By hand for two ranks: 2 + 2 + 6, 2 + 1 + 6, 1 + 1 + 6 bytes for each parameter, 16 without ZeRO.
    assert [formula(stage, 2).total for stage in STAGES] == [10, 9, 8]
    for held in measure(tmp_path):
        for stage in STAGES:
            wanted = formula(stage, 2)
            assert held[stage].total == pytest.approx(wanted.total, rel=0.15)
            assert held[stage].parameters == pytest.approx(wanted.parameters, rel=0.15)
            assert held[stage].gradients == pytest.approx(wanted.gradients, rel=0.15)
            assert held[stage].optimizer == pytest.approx(wanted.optimizer, rel=0.15)
