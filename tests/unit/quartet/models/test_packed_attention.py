"""Packed attention by one kernel, against one sequence after the other."""

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from quartet.config.base import ConfigError
from quartet.models.attention.packed import Kernel, Lengths, by_kernel, packed_attention
from quartet.models.loading import load_causal
from quartet.models.sequences import concatenate_pairs, pad_pairs
from tests import plain
from tests.families import FAMILIES
from tests.unit.naive import arrays

LENGTHS = (3, 1, 5)
ROPES: dict[str, dict[str, Any]] = {
    "dynamic": {"factor": 2.0},
    "longrope": {"short_factor": [1.0] * 16, "long_factor": [2.0] * 16, "original_max_position_embeddings": 64},
}
"""Rotary embeddings with other frequencies in passes of more than 64 positions."""
HEADS, GROUPS, WIDTH = 4, 2, 8


def states(groups: int) -> torch.Tensor:
    return torch.randn(1, groups, sum(LENGTHS), WIDTH)


def varlen(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seq_q: torch.Tensor,
    cu_seq_k: torch.Tensor,
    max_q: int,
    max_k: int,
    *,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
) -> torch.Tensor:
    """The computation of torch's kernel, written out. query, key, value [L, heads, D]."""
    assert query.shape == key.shape == value.shape
    assert cu_seq_q.dtype == cu_seq_k.dtype == torch.int32
    assert window_size == (-1, 0)  # causal
    assert max_q == max_k == max(LENGTHS)
    scale = WIDTH**-0.5 if scale is None else scale
    actual = torch.empty_like(query)
    bounds = cu_seq_q.tolist()
    for begin, end in itertools.pairwise(bounds):
        scores = torch.einsum("qhd,khd->hqk", query[begin:end], key[begin:end]) * scale
        later = torch.ones(end - begin, end - begin, dtype=torch.bool).triu(1)
        weights = scores.masked_fill(later, -torch.inf).softmax(-1)
        actual[begin:end] = torch.einsum("hqk,khd->qhd", weights, value[begin:end])
    return actual


def grouped(*states: torch.Tensor, enable_gqa: bool = False, **options: Any) -> torch.Tensor:
    """A version of the kernel that takes fewer key heads, if asked to."""
    query, key, value, *rest = states
    assert enable_gqa == (key.shape[1] < query.shape[1])
    assert key.shape == value.shape
    groups = query.shape[1] // key.shape[1]
    return varlen(query, key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1), *rest, **options)


def first_rows(query: torch.Tensor, *others: Any, enable_gqa: bool = False, **options: Any) -> torch.Tensor:
    """A kernel that can be compiled."""
    return query * (2 if enable_gqa else 1)


class Attention(nn.Module):
    """A layer, as far as transformers' function looks at it."""

    num_key_value_groups = HEADS // GROUPS
    is_causal = True


@pytest.mark.parametrize("kernel", [varlen, grouped])
@pytest.mark.parametrize("scale", [None, 0.5])
def test_a_kernel_gives_what_the_plain_path_gives(kernel: Kernel, scale: float | None) -> None:
    torch.manual_seed(0)
    query, key, value = states(HEADS), states(GROUPS), states(GROUPS)
    boundaries = torch.tensor([0, 3, 4, 9], dtype=torch.int32)
    plain, _ = packed_attention(
        Attention(), query, key, value, None, packed_lengths=Lengths(LENGTHS), cu_seq_lens_q=boundaries, scaling=scale
    )
    actual = by_kernel(kernel, query, key, value, boundaries, max(LENGTHS), scale)
    assert actual.shape == plain.shape == (1, 9, HEADS, WIDTH)
    torch.testing.assert_close(actual, plain, atol=1e-5, rtol=0)


def test_the_choice_of_the_kernel_does_not_interrupt_a_compiled_layer() -> None:
    def layer(query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return by_kernel(first_rows, query, key, key, torch.tensor([0, 9]), 9, None)

    query, key = states(HEADS), states(GROUPS)
    compiled = torch.compile(layer, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(query, key), layer(query, key))


def test_packed_pairs_say_where_they_begin_and_padded_ones_do_not() -> None:
    prompts, responses = arrays([[1, 2], [3]]), arrays([[4], [5, 6, 7]])
    inputs = concatenate_pairs(prompts, responses).inputs
    assert inputs["cu_seq_lens_q"].tolist() == inputs["cu_seq_lens_k"].tolist() == [0, 3, 7]
    assert inputs["packed_lengths"].each == (3, 4)
    assert (inputs["max_length_q"], inputs["max_length_k"]) == (4, 4)
    assert not [name for name in pad_pairs(prompts, responses).inputs if "length" in name or "cu_seq" in name]


def attended(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, lengths: tuple[int, ...] = LENGTHS
) -> torch.Tensor:
    boundaries = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
    return packed_attention(
        Attention(), query, key, value, None, packed_lengths=Lengths(lengths), cu_seq_lens_q=boundaries
    )[0]


def test_half_precision_is_computed_in_float32_on_a_cpu() -> None:
    torch.manual_seed(0)
    half = [states(heads).half().requires_grad_() for heads in (HEADS, GROUPS, GROUPS)]
    wide = [state.detach().float().requires_grad_() for state in half]
    actual, expected = attended(*half), attended(*wide)
    assert torch.equal(actual, expected.half())
    weights = torch.randn(actual.shape).half()
    actual.backward(weights)
    expected.backward(weights.float())
    for state, other in zip(half, wide, strict=True):
        assert state.grad is not None
        assert other.grad is not None
        assert torch.equal(state.grad, other.grad.half())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("lengths", [(2, 2, 5), (3, 3, 3), (4, 1, 4)])
def test_sequences_of_one_length_attend_each_to_itself(lengths: tuple[int, ...], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    query, key, value = (states(heads).to(dtype) for heads in (HEADS, GROUPS, GROUPS))
    alone = [
        attended(*(state[:, :, end - length : end] for state in (query, key, value)), lengths=(length,))
        for length, end in zip(lengths, itertools.accumulate(lengths), strict=True)
    ]
    torch.testing.assert_close(attended(query, key, value, lengths=lengths), torch.cat(alone, dim=1))


@pytest.mark.parametrize("rope", ROPES)
def test_packing_is_refused_where_frequencies_depend_on_the_longest_position(rope: str, tmp_path: Path) -> None:
    options = {"max_position_embeddings": 64, "rope_parameters": ROPES[rope] | {"rope_type": rope, "rope_theta": 1e4}}
    family = FAMILIES["bos"]
    folder = replace(family, options=family.options | options).make(tmp_path / "model")
    model = plain.language_model(folder)
    short, long = np.arange(4, 34)[None], np.arange(100)[None] % 60
    with torch.no_grad():
        alone = model(torch.from_numpy(short)).logits[0]
        beside = model(torch.from_numpy(np.concatenate([np.resize(short, (1, 100)), long]))).logits[0, :30]
    assert (alone - beside).abs().max() > 0.01
    said = rf"^packing: \S+ \(llama\) has rotary frequencies \({rope}\) that depend on the longest position of a pass"
    with pytest.raises(ConfigError, match=f"{said}; set packing to false$"):
        load_causal(str(folder), "float32", packing=True)
