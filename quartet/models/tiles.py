"""Log-probs and entropy of a linear head, from hidden states: a tile of the vocabulary at a time.

Neither the logits [N, V] nor their gradient exist as a whole. Letters in shapes: N positions, H numbers of a hidden
state, V entries of the vocabulary.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear

from quartet.models.numerics import LEAST_LOGPROB, check_temperature, widen

TILE_ELEMENTS = {"cpu": 2**22, "cuda": 2**27}
"""Logits of a tile: 16 MiB and 512 MiB in float32."""
LEAST_WIDTH = 256
"""Least columns of a tile: narrower products are slow."""
_LEAST_SCORE = -1e30  # a maximum of none: finite, so that the difference to a score of -inf is no NaN


@dataclass(frozen=True, slots=True)
class Softmax:
    """The distribution over the V logits of a position: softmax of capped logits / temperature without some tokens.

    Attributes:
        temperature: more than 0 and finite.
        cap: a logit x counts as cap * tanh(x / cap), as in Gemma 2; None: as x.
        size: ids from here on have probability 0; None: V.
        ends: ids that have probability 0 at positions that are early.
    """

    temperature: float = 1.0
    cap: float | None = None
    size: int | None = None
    ends: tuple[int, ...] = ()

    def capped(self, cap: float | None) -> "Softmax":
        """The same with this cap."""
        return replace(self, cap=cap)


def tile_elements(device: torch.device) -> int:
    """Logits of a tile on this device."""
    return TILE_ELEMENTS.get(device.type, TILE_ELEMENTS["cuda"])


def linear_logprobs(
    hidden: Tensor,
    weight: Tensor,
    ids: Tensor,
    softmax: Softmax | None = None,
    *,
    bias: Tensor | None = None,
    early: Tensor | None = None,
    entropy: bool = False,
    tile: int | None = None,
) -> Tensor:
    """Log-probs of given tokens under the logits `hidden @ weight.T + bias`, with gradients for these three.

    Logits are rounded to the states' type, as a linear layer rounds them; all sums over the vocabulary are at least
    in float32. The forward pass keeps the largest score and the sum of exponentials so far, as Milakov and
    Gimelshein (2018, arXiv:1805.02867) do; the backward pass computes each tile again.

    Args:
        hidden: [*same, H].
        weight: [V, H].
        ids: [*same] int64, each 0..V-1. The log-prob of one without probability is its score minus the normaliser of
            the others.
        softmax: the distribution; None: that of the logits as they are.
        bias: [V].
        early: [*same] bool, True where `softmax.ends` have probability 0; None: nowhere.
        entropy: whether to compute Shannon's entropy of the whole distribution too, in nats.
        tile: columns of a tile; None: as many as make TILE_ELEMENTS.

    Returns:
        [*same, 1], the log-probs, or with entropy [*same, 2], log-probs and entropies; at least in float32.

    Raises:
        ValueError: the temperature is not positive, or the shapes do not fit.
    """
    softmax = softmax or Softmax()
    check_temperature(softmax.temperature)
    if hidden.shape[:-1] != ids.shape or hidden.shape[-1:] != weight.shape[1:] or weight.dim() != 2:
        raise ValueError(
            f"hidden {list(hidden.shape)}, weight {list(weight.shape)} and ids {list(ids.shape)} should be [*, H], "
            "[V, H] and [*]"
        )
    if early is not None and early.shape != ids.shape:
        raise ValueError(f"early is {list(early.shape)}, should be {list(ids.shape)} like the ids")
    rows = hidden.reshape(-1, hidden.shape[-1])
    width = tile or max(LEAST_WIDTH, tile_elements(hidden.device) // max(1, len(rows)))
    head = _Head(softmax, ids.reshape(-1), None if early is None else early.reshape(-1, 1), width, len(weight))
    joined: Tensor = _LinearLogprobs.apply(rows, weight, bias, head, entropy)
    return joined.view(*ids.shape, -1)


@dataclass(frozen=True, slots=True)
class _Head:
    """The parts on which a tile's scores depend besides states and weights."""

    softmax: Softmax
    ids: Tensor
    """[N]"""
    early: Tensor | None
    """[N, 1]"""
    width: int
    vocabulary: int

    @property
    def size(self) -> int:
        """Columns with a probability."""
        size = self.softmax.size
        return self.vocabulary if size is None else min(size, self.vocabulary)

    def spans(self) -> Iterator[tuple[int, int]]:
        """First and last + 1 column of each tile: those of columns with a probability, then the others."""
        for first, end in ((0, self.size), (self.size, self.vocabulary)):
            yield from ((at, min(at + self.width, end)) for at in range(first, end, self.width))

    def scores(self, hidden: Tensor, weight: Tensor, bias: Tensor | None, first: int, end: int) -> Tensor:
        """[N, end - first]: the capped logits of these columns / temperature, in a tensor of its own."""
        scores = widen(linear(hidden, weight[first:end], None if bias is None else bias[first:end]))
        if self.softmax.cap is not None:
            scores = scores.div_(self.softmax.cap).tanh_().mul_(self.softmax.cap)
        return scores if self.softmax.temperature == 1 else scores.div_(self.softmax.temperature)

    def chosen(self, first: int, end: int) -> tuple[Tensor, Tensor]:
        """[N, 1] twice: the columns of the ids in this tile, and whether they are in it."""
        at = (self.ids - first).unsqueeze(-1)
        return at.clamp(0, end - first - 1), (at >= 0) & (at < end - first)

    def forbid(self, scores: Tensor, first: int, end: int) -> None:
        """Sets the scores of tokens without probability to -inf, for a tile of columns with one."""
        for token in self.softmax.ends if self.early is not None else ():
            if first <= token < end:
                scores[:, token - first].masked_fill_(self.early[:, 0], -torch.inf)  # type: ignore[index]


class _LinearLogprobs(torch.autograd.Function):
    """hidden [N, H], weight [V, H], bias [V] or None -> [N, 1] or [N, 2], as linear_logprobs returns them."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, head: _Head, entropy: bool) -> Tensor:
        column = widen(hidden.new_empty(0)).new_zeros(len(hidden), 1)
        largest, total, chosen = column + _LEAST_SCORE, column.clone(), column.clone()
        mean = column.clone()  # sum of exp(score - largest) * (score - largest)
        for first, end in head.spans():
            scores = head.scores(hidden, weight, bias, first, end)
            at, inside = head.chosen(first, end)
            chosen = torch.where(inside, scores.gather(-1, at), chosen)
            if first >= head.size:
                continue
            head.forbid(scores, first, end)
            now = torch.maximum(largest, scores.amax(-1, keepdim=True))
            scores = scores.sub_(now)
            past = (largest - now).exp()
            if entropy:
                exponentials = scores.exp()
                mean = (mean + total * (largest - now)) * past
                mean += (exponentials * scores.clamp_(min=LEAST_LOGPROB)).sum(-1, keepdim=True)
            else:
                exponentials = scores.exp_()
            total = total * past + exponentials.sum(-1, keepdim=True)
            largest = now
        parts = [chosen - largest - total.log()]
        if entropy:
            parts.append(total.log() - mean / total)
        ctx.head = head
        ctx.save_for_backward(hidden, weight, bias, largest, total, parts[1] if entropy else None)
        return torch.cat(parts, dim=-1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, largest, total, entropies = ctx.saved_tensors
        head: _Head = ctx.head
        of_hidden, of_weight, of_bias = ctx.needs_input_grad[:3]
        of_logprob = gradient[:, :1]
        hidden_grad = widen(torch.zeros_like(hidden)) if of_hidden else None
        weight_grad = torch.empty_like(weight) if of_weight else None
        bias_grad = torch.empty_like(bias) if of_bias else None
        for first, end in head.spans():
            scores = head.scores(hidden, weight, bias, first, end)
            slope = _slope(scores, head.softmax)
            at, inside = head.chosen(first, end)
            if first >= head.size:
                change = scores.zero_()
            else:
                head.forbid(scores, first, end)
                scores = scores.sub_(largest)
                if entropies is None:
                    change = scores.exp_().mul_(-of_logprob / total)
                else:
                    # d entropy / d score_j = -p_j (log p_j + entropy)
                    inner = scores.clamp(min=LEAST_LOGPROB).add_(entropies - total.log())
                    inner = inner.mul_(gradient[:, 1:]).add_(of_logprob)
                    change = scores.exp_().div_(-total).mul_(inner)
            change.scatter_add_(-1, at, torch.where(inside, of_logprob, 0.0))
            change = (change if slope is None else change.mul_(slope)).to(hidden.dtype)
            if hidden_grad is not None:
                hidden_grad += linear(change, weight[first:end].t())
            if weight_grad is not None:
                torch.mm(change.t(), hidden, out=weight_grad[first:end])
            if bias_grad is not None:
                bias_grad[first:end] = change.sum(0)
        return (None if hidden_grad is None else hidden_grad.to(hidden.dtype)), weight_grad, bias_grad, None, None


def _slope(scores: Tensor, softmax: Softmax) -> Tensor | float | None:
    """d score / d logit at these scores; None if it is 1."""
    if softmax.cap is None:
        return None if softmax.temperature == 1 else 1 / softmax.temperature
    return (1 - (scores * (softmax.temperature / softmax.cap)).square()) / softmax.temperature
