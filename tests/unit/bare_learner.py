"""A policy that is a table of log-probs in float64, trained by the training loop itself, for laws of the loss."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from orchestrator.algorithms.contract import Algorithm
from orchestrator.policy.clipped import ClippedPolicy
from quartet.columns import Columns
from quartet.learner.shards import Pass
from quartet.learner.trainer import Schedule, Trainer
from quartet.models.sequences import PairTensors, pair_tensors

Division = Callable[[int], Sequence[Sequence[int]]]
"""Number of trajectories of a minibatch -> those of each pass."""
NAN = float("nan")


def whole(count: int) -> Sequence[Sequence[int]]:
    """One pass."""
    return [range(count)]


class Table:
    """A distribution whose log-prob of a token is the model's entry at the token's id."""

    def asked_of(self, model: Tensor, pairs: PairTensors, *, entropy: bool = False) -> tuple[Tensor, None]:
        """The entries, [R, C]."""
        return model[pairs.response_ids], None


@dataclass
class BareLearner:
    """The part of a rank's learner that the training loop uses. Its steps add up gradients and change nothing."""

    model: Tensor
    packing: bool
    division: Division
    losses: list[float] = field(default_factory=list)
    optimizer_state: Any = None
    skipped_in_a_row: int = 0

    def __post_init__(self) -> None:
        self.optimizer_state = self

    def resident(self) -> AbstractContextManager[None]:
        """Nothing."""
        return nullcontext()

    def check_weights(self) -> None:
        """Nothing."""

    def passes(self, prompts: Sequence[Any], responses: Sequence[Any], group: int = 1) -> list[Pass]:
        """The passes of the division; one that is empty counts as a rank's without a sequence of its own."""
        return [Pass(tuple(rows)) if rows else Pass((0,), counts=False) for rows in self.division(len(prompts))]

    def tensors(self, trajectories: Columns, *, last: bool = False) -> PairTensors:
        """The model's input, padded or packed."""
        return pair_tensors(trajectories, torch.device("cpu"), packing=self.packing, last=last)

    def step(self, micros: Sequence[Any], loss: Callable[[Any], tuple[Tensor, Any]]) -> dict[str, float]:
        """Adds the gradient of one minibatch."""
        totals: dict[str, float] = {}
        for micro in micros:
            value, metrics = loss(micro)
            value.backward()  # type: ignore[no-untyped-call]
            for name, number in metrics.items():
                totals[name] = totals.get(name, 0.0) + float(number.detach())
        self.losses.append(totals["loss"])
        return totals


@dataclass
class Case:
    """B responses of T tokens each, with the numbers that their loss needs: lists of [T]."""

    new: list[list[float]]
    """Log-probs of the policy that trains."""
    numbers: Mapping[str, list[list[float]]]
    """logprobs, old_logprobs, ref_logprobs and advantages."""
    trained: list[list[bool]]
    """True at the tokens that are trained on."""

    @property
    def columns(self) -> Columns:
        """The batch. A token's id is its place in the table. Responses have one of two prompts in turn, so that
        packed rows hold groups behind a prompt that they share."""
        lengths = [len(row) for row in self.new]
        ends = np.cumsum(lengths)
        ids = [
            np.arange(end - length + 1, end + 1, dtype=np.int32) for end, length in zip(ends, lengths, strict=True)
        ]
        flat = {
            name: np.concatenate([np.asarray(r, np.float32) for r in rows]) for name, rows in self.numbers.items()
        }
        columns = Columns.of_pairs([np.full(6, row % 2, np.int32) for row in range(len(ids))], ids)
        return columns.with_sampled(**flat, trained=np.concatenate([np.asarray(r, np.bool_) for r in self.trained]))

    def table(self) -> Tensor:
        """The policy: NaN at the padding's id 0, and at tokens that are not trained on."""
        flat = [value if use else NAN for row in self._marked() for value, use in row]
        return torch.tensor([NAN, *flat], dtype=torch.float64, requires_grad=True)

    def _marked(self) -> list[list[tuple[float, bool]]]:
        return [list(zip(values, marks, strict=True)) for values, marks in zip(self.new, self.trained, strict=True)]


def trained(
    case: Case,
    algorithm: Algorithm,
    *,
    kl_coef: float = 0.0,
    packing: bool = False,
    ranks: Sequence[Division] = (whole,),
    minibatch: int | None = None,
    order: Sequence[int] | None = None,
) -> tuple[float, Tensor]:
    """The loss and its gradient by the training loop, summed over ranks and minibatches: number, [N + 1].

    Args:
        case: the batch.
        algorithm: the loss.
        kl_coef: coefficient of the penalty in the loss.
        packing: True packs the responses of a pass into one row.
        ranks: the passes of each rank.
        minibatch: trajectories of an optimizer step; None: all.
        order: order of the responses in the batch; None: as in the case.
    """
    batch, model = case.columns, case.table()
    batch = batch if order is None else batch.take(list(order))
    objective = ClippedPolicy(algorithm, Table(), kl_coef)  # type: ignore[arg-type]
    schedule, loss = Schedule(1, minibatch or len(batch), seed=0), 0.0
    for division in ranks:
        learner = BareLearner(model, packing, division)
        Trainer(learner).train(batch, objective, schedule)  # type: ignore[arg-type]
        loss += sum(learner.losses)
    assert model.grad is not None
    return loss, model.grad
