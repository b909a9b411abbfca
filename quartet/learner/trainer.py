"""The training loop: passes over a batch, minibatches, micro-batches and optimizer steps, for any objective."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quartet.columns import Columns
from quartet.learner.learner import RankLearner
from quartet.learner.minibatches import Means, minibatches, weight_of
from quartet.learner.objective import Micro, Objective, Terms
from quartet.learner.reductions import factors, units
from quartet.learner.shards import Pass
from quartet.models.device import on_device
from quartet.models.sequences import PairTensors
from quartet.wire.codec import Floats


@dataclass(frozen=True, slots=True)
class Schedule:
    """The optimizer steps of an update."""

    epochs: int
    """Passes over the batch."""
    minibatch_size: int
    """Trajectories of a step, a multiple of those that the objective compares with one another."""
    seed: int
    """Seed of their order."""


@dataclass(frozen=True, slots=True)
class Kept:
    """Numbers that the first step of an update computed, if they are kept."""

    batch: Columns
    """The batch, without further columns."""
    rows: list[int]
    """The trajectories of that step."""
    passes: list[tuple[Sequence[int], PairTensors, Tensor]] = field(default_factory=list)
    """This rank's passes: sequences of these, the model's input, and the numbers, [R, C]."""


class Trainer:
    """A model that learns by objectives, or one rank's share of it: the policy in actors of the orchestrator, the
    critic in its service. Calls must not overlap, and all ranks get the same calls in the same order."""

    def __init__(self, learner: RankLearner) -> None:
        self.learner = learner
        self._kept = Kept(Columns.of_pairs([], []), [])

    @torch.no_grad()
    def evaluate(
        self, batch: Columns, outputs: Callable[[Any, PairTensors], Tensor], *, last: bool = False
    ) -> Floats:
        """The model's numbers for the sampled tokens of a batch: `outputs(model, pairs)`, [R, C] -> [M]. With `last`
        the model sees the last token of each trajectory too."""
        bare, by_row = batch.select().apart(), dict[int, Floats]()
        for each in self.learner.passes(bare.prompts, bare.responses):
            pairs = self.learner.tensors(bare.take(each.rows), last=last)
            numbers = outputs(self.learner.model, pairs)
            if each.counts:
                by_row |= dict(zip(each.rows, pairs.unpad(numbers), strict=True))
        return self.learner.shared(by_row, bare.responses.lengths.tolist())[bare.response_mask]

    def train(
        self, batch: Columns, objective: Objective, schedule: Schedule, *, keep: bool = False
    ) -> dict[str, float]:
        """Trains on one batch; returns the mean metrics over its optimizer steps, the number of steps skipped for a
        gradient that was not finite (`skipped_steps`), and how many were skipped in a row up to now.

        A minibatch of which no token is trained on is left out and counted (`empty_steps`).

        Args:
            batch: the columns that the objective reads, and perhaps `trained`, True at the sampled tokens that are
                trained on; without it all are.
            objective: what is minimised.
            schedule: passes, steps and their order.
            keep: True keeps what the objective computed in the first step, for `computed`.

        Raises:
            NotFinite: a weight is not finite.
            ValueError: a column is missing, or a number of trajectories does not fit those that are compared.
        """
        batch = objective.select(batch)
        self._kept = Kept(batch.select(), [])
        means, counts = Means(), _counts(batch)
        weighing = units(objective.reduction, counts)
        with self.learner.optimizer_state.resident():
            for chosen in _minibatches(len(batch), schedule, objective.group):
                own = [counts[i] for i in chosen]
                if not sum(own):
                    means.leave_out()
                    continue
                keeping, keep = keep, False
                if keeping:
                    self._kept.rows.extend(chosen)
                micros = self._micro_batches(batch, chosen, own, objective)
                weight = weight_of(chosen, weighing, schedule.minibatch_size)
                loss = partial(self._loss, objective, weight, keeping)
                means.add(self.learner.step(micros, loss), weight)
        self.learner.check_weights()
        first = {f"first_{name}": means.first[name] for name in objective.firsts if name in means.first}
        return means.result() | first | {"skipped_in_a_row": float(self.learner.skipped_in_a_row)}

    def computed(self) -> list[Floats]:
        """Numbers that the first optimizer step of the last update computed before it changed the weights, and kept:
        one per sampled token of each trajectory of that step, [0] of others. Every rank calls it, once."""
        kept, self._kept = self._kept, Kept(Columns.of_pairs([], []), [])
        numbers: list[Floats] = [np.empty(0, np.float32)] * len(kept.batch)
        part, by_row = kept.batch.take(kept.rows), dict[int, Floats]()
        for rows, pairs, computed in kept.passes:
            by_row |= zip(rows, pairs.unpad(computed), strict=True)
        apart = part.apart()
        flat = self.learner.shared(by_row, apart.responses.lengths.tolist())[apart.response_mask]
        for row, own in zip(kept.rows, np.split(flat, np.cumsum(part.counts)[:-1]), strict=False):
            numbers[row] = own
        return numbers

    def _loss(
        self, objective: Objective, weight: float, keeping: bool, micro: Micro
    ) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Loss and metrics of a micro-batch, of a minibatch whose loss has this weight in the update."""
        terms: Terms = objective(self.learner.model, micro)
        if keeping and micro.rows and terms.computed is not None:
            self._kept.passes.append((micro.rows, micro.pairs, terms.computed))
        return terms.loss * weight, terms.metrics

    def _micro_batches(
        self, batch: Columns, chosen: Sequence[int], counts: Sequence[int], objective: Objective
    ) -> list[Micro]:
        """This rank's micro-batches of a minibatch: the sequences of those trajectories of the batch, of which so
        many tokens are trained on."""
        part, scales = batch.take(chosen), factors(objective.reduction, counts)
        tokens, trajectories = sum(counts), sum(units("trajectories", counts))
        apart = part.apart()
        shares = None if scales is None else [scales[owner] for owner in part.sequence_owners]

        def micro(one: Pass) -> Micro:
            rows = list(one.rows)
            own = apart.take(rows)
            pairs = self.learner.tensors(own, last=objective.last)
            sampled = None if own.single_turn else _rows(own, own.response_mask)
            marks = sampled if "trained" not in own else _rows(own, own.on_responses(own["trained"]))
            weights = None if shares is None else _constant([shares[i] for i in rows], pairs.lengths)
            return Micro(
                rows=rows if one.counts else (),
                pairs=pairs,
                sampled=pairs.trained(sampled),
                mask=pairs.trained(marks, counts=one.counts),
                columns={name: _placed(own, name, pairs) for name in own.columns if name != "trained"},
                tokens=tokens,
                trajectories=trajectories,
                factors=None if weights is None else pairs.spread(weights),
            )

        return [micro(one) for one in self.learner.passes(apart.prompts, apart.responses, group=objective.group)]


def _counts(batch: Columns) -> list[int]:
    """[B] sampled tokens of each trajectory that are trained on."""
    owners = batch.owners[batch["trained"]] if "trained" in batch else batch.owners
    return [int(count) for count in np.bincount(owners, minlength=len(batch))]


def _minibatches(count: int, schedule: Schedule, group: int) -> Iterator[list[int]]:
    """Indices of each minibatch, whole groups together."""
    size = schedule.minibatch_size
    if count % group or size % group:
        raise ValueError(f"a batch of {count} and minibatches of {size} do not hold groups of {group} trajectories")
    for chosen in minibatches(count // group, epochs=schedule.epochs, size=size // group, seed=schedule.seed):
        yield [group * index + member for index in chosen for member in range(group)]


def _placed(batch: Columns, name: str, pairs: PairTensors) -> Tensor:
    """A column where the model has its outputs, [R, C]; one of a number for each trajectory as [rows]."""
    kind, numbers = batch.columns[name]
    if kind == "row":
        return on_device(numbers.astype(np.float32), pairs.input_ids.device)
    return pairs.spread(_rows(batch, batch.on_responses(numbers)))


def _rows(batch: Columns, numbers: np.ndarray) -> list[np.ndarray]:
    """One number for each token of `responses`, as views: [T] of each trajectory."""
    return np.split(numbers, batch.responses.ends[:-1])


def _constant(numbers: Sequence[float], lengths: Sequence[int]) -> list[Floats]:
    """One number per trajectory, at each token of its response."""
    return [np.full(length, number, np.float32) for number, length in zip(numbers, lengths, strict=True)]
