"""Packed attention by one kernel, against one sequence after the other."""

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.attention.varlen import varlen_attn
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from quartet.config.base import ConfigError
from quartet.models.attention import packed
from quartet.models.attention.packed import Kernel, Pieces, by_kernel, packed_attention
from quartet.models.loading import load_causal
from quartet.models.sequences import concatenate_pairs, pad_pairs
from tests import plain
from tests.families import FAMILIES
from tests.unit.naive import arrays

LENGTHS = (3, 1, 5)
WHOLE = Pieces(LENGTHS)
SHARED = Pieces(LENGTHS, (None, 0, 0))
"""A beginning of three tokens, which two sequences continue, by one token and by five."""
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
    """The computation of torch's kernel, written out: the last query of a piece sees all of its keys. query
    [Q, heads, D], key and value [K, groups, D], each for as many heads as there are more of these."""
    assert (len(query), len(key)) == (cu_seq_q[-1], cu_seq_k[-1])
    assert key.shape == value.shape
    key, value = (state.repeat_interleave(query.shape[1] // state.shape[1], 1) for state in (key, value))
    assert cu_seq_q.dtype == cu_seq_k.dtype == torch.int32
    assert window_size == (-1, 0)  # causal
    assert (max_q, max_k) == (int(cu_seq_q.diff().max()), int(cu_seq_k.diff().max()))
    scale = WIDTH**-0.5 if scale is None else scale
    actual = torch.empty_like(query)
    pairs = zip(itertools.pairwise(cu_seq_q.tolist()), itertools.pairwise(cu_seq_k.tolist()), strict=True)
    for (begin, end), (first, last) in pairs:
        scores = torch.einsum("qhd,khd->hqk", query[begin:end], key[first:last]) * scale
        later = torch.ones(end - begin, last - first, dtype=torch.bool).triu(1 + (last - first) - (end - begin))
        weights = scores.masked_fill(later, -torch.inf).softmax(-1)
        actual[begin:end] = torch.einsum("hqk,khd->qhd", weights, value[first:last])
    return actual


def grouped(*states: torch.Tensor, enable_gqa: bool = False, **options: Any) -> torch.Tensor:
    """A version of the kernel that takes fewer key heads only if asked to, as torch's since 2.13."""
    assert enable_gqa == (states[1].shape[1] < states[0].shape[1])
    return varlen(*states, **options)


def first_rows(query: torch.Tensor, *others: Any, enable_gqa: bool = False, **options: Any) -> torch.Tensor:
    """A kernel that can be compiled."""
    return query * (2 if enable_gqa else 1)


class Attention(nn.Module):
    """A layer, as far as transformers' function looks at it."""

    num_key_value_groups = HEADS // GROUPS
    is_causal = True


def bounds(lengths: tuple[int, ...]) -> torch.Tensor:
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)


@pytest.mark.parametrize("pieces", [WHOLE, SHARED])
@pytest.mark.parametrize("kernel", [varlen, grouped])
@pytest.mark.parametrize("scale", [None, 0.5])
def test_a_kernel_gives_what_the_plain_path_gives(kernel: Kernel, scale: float | None, pieces: Pieces) -> None:
    torch.manual_seed(0)
    inputs = [states(heads).requires_grad_() for heads in (HEADS, GROUPS, GROUPS)]
    others = [state.detach().clone().requires_grad_() for state in inputs]
    plain = attended(*inputs, pieces=pieces, scaling=scale)
    query, key, value = others
    reached, longest = (pieces.reached(key), pieces.reached(value)), (max(pieces.lengths), max(pieces.reaches))
    actual = by_kernel(kernel, query, *reached, (bounds(pieces.lengths), bounds(pieces.reaches)), longest, scale)
    assert actual.shape == plain.shape == (1, 9, HEADS, WIDTH)
    torch.testing.assert_close(actual, plain, atol=1e-5, rtol=0)
    weights = torch.randn(actual.shape)
    actual.backward(weights)
    plain.backward(weights)
    for state, other in zip(inputs, others, strict=True):
        torch.testing.assert_close(state.grad, other.grad, atol=1e-5, rtol=0)


def test_torchs_kernel_takes_the_call() -> None:
    """Goes through its checks and its shapes, in both directions; it computes on a GPU only."""
    query, key, value = (states(heads).to("meta").requires_grad_() for heads in (HEADS, GROUPS, GROUPS))
    ends = bounds(LENGTHS).to("meta")
    actual = by_kernel(varlen_attn, query, key, value, (ends, ends), (5, 5), None)
    assert actual.shape == (1, 9, HEADS, WIDTH)
    gradients = torch.autograd.grad(actual.sum(), (query, key, value))
    assert [gradient.shape for gradient in gradients] == [query.shape, key.shape, value.shape]


def test_a_row_with_a_shared_beginning_gives_what_whole_sequences_give() -> None:
    """In float64, gradients included: the states of the beginning get the sum of what the sequences give them."""
    torch.manual_seed(0)
    row = [states(heads).double().requires_grad_() for heads in (HEADS, GROUPS, GROUPS)]
    actual = attended(*row, pieces=SHARED)
    order = torch.tensor([0, 1, 2, 0, 1, 2, 3, 0, 1, 2, 4, 5, 6, 7, 8])
    sequences = [state[:, :, order] for state in row]
    alone = attended(*sequences, pieces=Pieces((3, 4, 8)))
    torch.testing.assert_close(alone[:, [0, 1, 2, 6, 10, 11, 12, 13, 14]], actual, atol=1e-12, rtol=0)
    torch.testing.assert_close(alone[:, [3, 4, 5]], actual[:, :3], atol=1e-12, rtol=0)
    weights = torch.randn(actual.shape).double()
    given = torch.zeros_like(alone)
    given[:, [0, 1, 2, 6, 10, 11, 12, 13, 14]] = weights
    first = torch.autograd.grad(actual, row, weights)
    second = torch.autograd.grad(alone, row, given)
    for one, other in zip(first, second, strict=True):
        torch.testing.assert_close(one, other, atol=1e-12, rtol=0)


def test_responses_of_one_length_behind_prompts_of_one_length_are_attended_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls = []

    def counted(module: nn.Module, query: torch.Tensor, *rest: Any, **options: Any) -> Any:
        calls.append(tuple(query.shape))
        return sdpa_attention_forward(module, query, *rest, **options)

    monkeypatch.setattr(packed, "sdpa_attention_forward", counted)
    pieces = Pieces((2, 2, 1, 1, 1, 2), (None, None, 0, 1, 0, 1))
    attended(states(HEADS), states(GROUPS), states(GROUPS), pieces=pieces)
    assert calls == [(2, HEADS, 2, WIDTH), (3, HEADS, 1, WIDTH), (1, HEADS, 2, WIDTH)]


def test_the_choice_of_the_kernel_does_not_interrupt_a_compiled_layer() -> None:
    def layer(query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        ends = torch.tensor([0, 9])
        return by_kernel(first_rows, query, key, key, (ends, ends), (9, 9), None)

    query, key = states(HEADS), states(GROUPS)
    compiled = torch.compile(layer, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(query, key), layer(query, key))


def test_packed_pairs_say_where_they_begin_and_padded_ones_do_not() -> None:
    prompts, responses = arrays([[1, 2], [3]]), arrays([[4], [5, 6, 7]])
    inputs = concatenate_pairs(prompts, responses).inputs
    assert inputs["cu_seq_lens_q"].tolist() == inputs["cu_seq_lens_k"].tolist() == [0, 3, 7]
    assert inputs["packed_pieces"].lengths == inputs["packed_pieces"].reaches == (3, 4)
    assert (inputs["max_length_q"], inputs["max_length_k"]) == (4, 4)
    assert not [name for name in pad_pairs(prompts, responses).inputs if "length" in name or "cu_seq" in name]


def attended(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, pieces: Pieces = WHOLE, **options: Any
) -> torch.Tensor:
    ends = {"cu_seq_lens_q": bounds(pieces.lengths), "cu_seq_lens_k": bounds(pieces.reaches)}
    return packed_attention(Attention(), query, key, value, None, packed_pieces=pieces, **ends, **options)[0]


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
        attended(*(state[:, :, end - length : end] for state in (query, key, value)), pieces=Pieces((length,)))
        for length, end in zip(lengths, itertools.accumulate(lengths), strict=True)
    ]
    torch.testing.assert_close(attended(query, key, value, pieces=Pieces(lengths)), torch.cat(alone, dim=1))


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
