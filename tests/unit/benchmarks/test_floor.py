"""The arithmetic that benchmarks/vs_trl counts is that of the models it makes."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.vs_trl.cases import CASES
from benchmarks.vs_trl.floor import operations, rate


@pytest.mark.parametrize("name", CASES)
def test_operations_follow_from_the_models_weights(name: str) -> None:
    case = CASES[name]
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**case.shape()))
    matrices = {key: weight.numel() for key, weight in model.named_parameters() if weight.dim() == 2}
    head, body = matrices["lm_head.weight"], sum(matrices.values()) - 2 * matrices["lm_head.weight"]
    every, answered = case.batch * (case.prompt + 10), case.batch * 10
    actual = operations(case, response=10)
    assert actual["generate"] == actual["logprobs"] == 2 * (body * every + head * answered)
    # A critic and a reward model have no head; training does three forward passes' work in each epoch. Without a
    # critic there is no reference either here.
    others = case.algorithm == "ppo"
    assert actual["score"] == (1 + 2 * others) * 2 * body * every + others * 2 * head * answered
    assert actual["train"] == case.epochs * 3 * (actual["logprobs"] + others * 2 * body * every)


def test_the_cores_do_more_than_a_million_operations_a_second() -> None:
    threads = torch.get_num_threads()
    assert all(rate(1, dtype) > 1e6 for dtype in ("float32", "bfloat16"))
    assert torch.get_num_threads() == threads
