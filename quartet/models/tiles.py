"""Log-probs and entropy of a linear head, from hidden states: a tile of the vocabulary at a time.

Neither the logits [N, V] nor their gradient exist as a whole. Letters in shapes: N positions, H numbers of a hidden
state, V entries of the vocabulary.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear

from quartet.models.numerics import LEAST_LOGPROB, check_temperature, widen

TILE_ELEMENTS = {"cpu": 2**22, "cuda": 2**27}
"""Logits of a tile: 16 MiB and 512 MiB in float32."""
LEAST_WIDTH = 256
"""Least columns of a tile: narrower products are slow."""
ALIGNED = 128
"""Columns of a tile are a multiple of this: a GPU's fast products need rows that begin at 16 bytes."""
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


def tile_elements(device: torch.device) -> int:
    """Logits of a tile on this device."""
    return TILE_ELEMENTS.get(device.type, TILE_ELEMENTS["cuda"])


def tile_width(rows: int, device: torch.device) -> int:
    """Columns of a tile of so many rows on this device."""
    return max(LEAST_WIDTH, tile_elements(device) // max(1, rows) // ALIGNED * ALIGNED)


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
    kernels: "Kernels | None" = None,
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
        kernels: the functions of a tile's numbers; None: the plain ones.

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
    width = tile or tile_width(len(rows), hidden.device)
    own = None if early is None or not softmax.ends else early.reshape(-1, 1)
    ends = filled(softmax.ends, ids.device)
    head = _Head(softmax, ids.reshape(-1), own, ends, width, len(weight), kernels or PLAIN)
    joined: Tensor = _LinearLogprobs.apply(rows, weight, bias, head, entropy)
    return joined.view(*ids.shape, -1)


class Sums(NamedTuple):
    """Sums over the columns so far, [N, 1] each, at least in float32."""

    largest: Tensor
    """The largest score."""
    total: Tensor
    """Sum of exp(score - largest)."""
    mean: Tensor
    """Sum of exp(score - largest) * (score - largest), for the entropy."""
    chosen: Tensor
    """The score of the id."""


class Tile(NamedTuple):
    """The columns of a tile, [N, W]."""

    logits: Tensor
    """[N, W]"""
    at: Tensor
    """[N, 1] int64, the columns of the ids; arbitrary where they are not in this tile."""
    inside: Tensor
    """[N, 1] bool, True where they are."""
    early: Tensor | None
    """[N, 1] bool, True where `blocked` have no probability; None: nowhere."""
    blocked: Tensor
    """[E] int64, columns; those below 0 or from W on are not in this tile."""
    never: Tensor | None
    """[W] bool, True for columns that have no probability anywhere; None: each has one."""


def joined(sums: Sums, tile: Tile, softmax: Softmax, entropy: bool) -> Sums:
    """The sums with those of one more tile."""
    scores = _scores(tile.logits, softmax)
    chosen = torch.where(tile.inside, scores.gather(-1, tile.at), sums.chosen)
    scores = _blocked(scores, tile)
    largest = torch.maximum(sums.largest, scores.amax(-1, keepdim=True))
    scores, past = scores.sub_(largest), (sums.largest - largest).exp()
    mean = sums.mean
    if entropy:
        exponentials = scores.exp()
        mean = (mean + sums.total * (sums.largest - largest)) * past
        mean = mean + (exponentials * scores.clamp_(min=LEAST_LOGPROB)).sum(-1, keepdim=True)
    else:
        exponentials = scores.exp_()
    return Sums(largest, sums.total * past + exponentials.sum(-1, keepdim=True), mean, chosen)


def changed(sums: Sums, tile: Tile, softmax: Softmax, gradient: Tensor, entropies: Tensor | None) -> Tensor:
    """The gradient of a tile's logits, in their type.

    Args:
        sums: the sums over all tiles.
        tile: the tile.
        softmax: the distribution.
        gradient: [N, 1], that of the log-probs, or [N, 2], with that of the entropies.
        entropies: [N, 1]; None if they were not asked for.
    """
    scores = _scores(tile.logits, softmax)
    slope, of_logprob = _slope(scores, softmax), gradient[:, :1]
    scores = _blocked(scores, tile).sub_(sums.largest)
    if entropies is None:
        change = scores.exp_().mul_(-of_logprob / sums.total)
    else:
        # d entropy / d score_j = -p_j (log p_j + entropy)
        inner = scores.clamp(min=LEAST_LOGPROB).add_(entropies - sums.total.log())
        inner = inner.mul_(gradient[:, 1:]).add_(of_logprob)
        change = scores.exp_().div_(-sums.total).mul_(inner)
    own = torch.where(tile.inside, of_logprob, 0.0)
    if torch.compiler.is_compiling():  # a comparison is a part of the one kernel that is made of all this
        change = change + torch.where(_columns(change) == tile.at, own, 0.0)
    else:
        change.scatter_add_(-1, tile.at, own)
    return (change if slope is None else change.mul_(slope)).to(tile.logits.dtype)


@dataclass(frozen=True, slots=True)
class Kernels:
    """The two functions of a tile's numbers: as they are here, a pass over the tile for each operation, or compiled,
    where each is one kernel or two."""

    joined: Callable[[Sums, Tile, Softmax, bool], Sums] = joined
    changed: Callable[[Sums, Tile, Softmax, Tensor, Tensor | None], Tensor] = changed

    @classmethod
    def compiled(cls, backend: str) -> "Kernels":
        """Compiles them at their first use by torch's compiler of that name, for tiles of any size."""
        made = (torch.compile(function, backend=backend, dynamic=True) for function in (joined, changed))
        return cls(*made)


PLAIN = Kernels()


def filled(ids: tuple[int, ...], device: torch.device) -> Tensor:
    """[N] int64 on the device, without a copy from the host, which would wait for the device."""
    return torch.cat(
        [torch.full((1,), token, device=device) for token in ids] or [torch.empty(0, dtype=torch.long, device=device)]
    )


@dataclass(frozen=True, slots=True)
class _Head:
    """The parts on which a tile's scores depend besides states and weights."""

    softmax: Softmax
    ids: Tensor
    """[N]"""
    early: Tensor | None
    """[N, 1]"""
    ends: Tensor
    """[E], softmax.ends."""
    width: int
    vocabulary: int
    kernels: Kernels

    def tiles(self, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Iterator[tuple[slice, Tile]]:
        """The columns of each tile and their numbers."""
        for first in range(0, self.vocabulary, self.width):
            columns = slice(first, min(first + self.width, self.vocabulary))
            yield columns, self._tile(hidden, weight, bias, columns)

    def _tile(self, hidden: Tensor, weight: Tensor, bias: Tensor | None, columns: slice) -> Tile:
        width, at = columns.stop - columns.start, (self.ids - columns.start).unsqueeze(-1)
        size = self.vocabulary if self.softmax.size is None else self.softmax.size
        return Tile(
            linear(hidden, weight[columns], None if bias is None else bias[columns]),
            at.clamp(0, width - 1),
            (at >= 0) & (at < width),
            self.early,
            self.ends - columns.start,
            torch.arange(columns.start, columns.stop, device=at.device) >= size if columns.stop > size else None,
        )


class _LinearLogprobs(torch.autograd.Function):
    """hidden [N, H], weight [V, H], bias [V] or None -> [N, 1] or [N, 2], as linear_logprobs returns them."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, head: _Head, entropy: bool) -> Tensor:
        column = widen(hidden.new_empty(0)).new_zeros(len(hidden), 1)
        # Never the same tensor: kernels would be compiled for one that is all of these, and again for the next tile.
        sums = Sums(column + _LEAST_SCORE, column.clone(), column.clone(), column.clone())
        for _, tile in head.tiles(hidden, weight, bias):
            sums = head.kernels.joined(sums, tile, head.softmax, entropy)
        parts = [sums.chosen - sums.largest - sums.total.log()]
        if entropy:
            parts.append(sums.total.log() - sums.mean / sums.total)
        ctx.head = head
        ctx.save_for_backward(hidden, weight, bias, *sums, parts[1] if entropy else None)
        return torch.cat(parts, dim=-1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, *kept, entropies = ctx.saved_tensors
        head, sums = ctx.head, Sums(*kept)
        of_hidden, of_weight, of_bias = ctx.needs_input_grad[:3]
        hidden_grad = widen(torch.zeros_like(hidden)) if of_hidden else None
        weight_grad = torch.empty_like(weight) if of_weight else None
        bias_grad = torch.empty_like(bias) if of_bias else None
        for columns, tile in head.tiles(hidden, weight, bias):
            change = head.kernels.changed(sums, tile, head.softmax, gradient, entropies)
            if hidden_grad is not None:
                hidden_grad += linear(change, weight[columns].t())
            if weight_grad is not None:
                torch.mm(change.t(), hidden, out=weight_grad[columns])
            if bias_grad is not None:
                bias_grad[columns] = change.sum(0)
        return (None if hidden_grad is None else hidden_grad.to(hidden.dtype)), weight_grad, bias_grad, None, None


def _scores(logits: Tensor, softmax: Softmax) -> Tensor:
    """[N, W]: the capped logits / temperature, in a tensor of its own unless they are in float32."""
    scores = widen(logits)
    if softmax.cap is not None:
        scores = scores.div_(softmax.cap).tanh_().mul_(softmax.cap)
    return scores if softmax.temperature == 1 else scores.div_(softmax.temperature)


def _blocked(scores: Tensor, tile: Tile) -> Tensor:
    """The scores with -inf for tokens without probability."""
    if tile.never is not None:
        scores = scores.masked_fill_(tile.never, -torch.inf)
    if tile.early is None:
        return scores
    if torch.compiler.is_compiling():
        ends = (_columns(scores).unsqueeze(-1) == tile.blocked).any(-1)
        return torch.where(tile.early & ends, -torch.inf, scores)
    inside = (tile.blocked >= 0) & (tile.blocked < scores.shape[-1])
    never = torch.zeros_like(scores[:, :1]).masked_fill(tile.early & inside, -torch.inf)
    return scores.index_add_(-1, tile.blocked.clamp(0, scores.shape[-1] - 1), never)


def _columns(scores: Tensor) -> Tensor:
    """[W] int64, the numbers of the columns."""
    return torch.arange(scores.shape[-1], device=scores.device)


def _slope(scores: Tensor, softmax: Softmax) -> Tensor | float | None:
    """d score / d logit at these scores; None if it is 1."""
    if softmax.cap is None:
        return None if softmax.temperature == 1 else 1 / softmax.temperature
    return (1 - (scores * (softmax.temperature / softmax.cap)).square()) / softmax.temperature
