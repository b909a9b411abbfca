"""The contract of an objective: what a learner minimises, of which it knows nothing else.

A new one is a class in a file, given to `Trainer.train`:

    class Likelihood(Objective):

        def __call__(self, model: Any, micro: Micro) -> Terms:
            logprobs, _ = Distribution().asked_of(model, micro.pairs)
            loss = -micro.reduced(logprobs)
            return Terms(loss, {"loss": loss})
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from torch import Tensor

from quartet.columns import Columns, Schema
from quartet.learner.reductions import Reduction
from quartet.models.numerics import masked_sum
from quartet.models.sequences import PairTensors


class Terms(NamedTuple):
    """An objective's share of one minibatch: what one micro-batch adds to it."""

    loss: Tensor
    """[], with a gradient; a sum divided by a denominator of the whole minibatch, so that the shares of all
    micro-batches and ranks add up to the minibatch's loss."""
    metrics: Mapping[str, Tensor]
    """[] each; shares like the loss, or maxima if they are named `..._max`. Their gradients are not taken."""
    computed: Tensor | None = None
    """[R, C], numbers that the trainer keeps from an update's first step if it is asked to."""


@dataclass(frozen=True, slots=True)
class Micro:
    """One micro-batch: some sequences of a minibatch, as a model takes them, in R rows of C columns. A trajectory is
    one, but for those of agents, which may be several."""

    rows: Sequence[int]
    """The sequences' numbers in the minibatch; none where the pass is computed only because other ranks need it in
    their collectives. Everything that such a pass adds has to be zero."""
    pairs: PairTensors
    """The model's input."""
    sampled: Tensor
    """[R, C] bool, True at sampled tokens."""
    mask: Tensor
    """[R, C] bool, True at sampled tokens that are trained on; nowhere if `rows` is empty."""
    columns: Mapping[str, Tensor]
    """float32 by name, those of the batch that the objective names: [R, C], zeros at tokens that were not sampled; or
    in the order of `pairs` one number for each trajectory."""
    tokens: int
    """Tokens that are trained on in the whole minibatch."""
    trajectories: int
    """Trajectories of the whole minibatch of which a token is trained on."""
    factors: Tensor | None
    """[R, C] factor of each token's loss by the reduction; None where all are 1."""

    def mean(self, values: Tensor) -> Tensor:
        """Share of the minibatch's mean over its trained tokens of one number per token. [R, C] -> []."""
        return masked_sum(values, self.mask) / self.tokens

    def reduced(self, values: Tensor, coefficient: float = 1.0) -> Tensor:
        """Share of the minibatch's reduction of one loss per token, times a coefficient. [R, C] -> []."""
        total = masked_sum(values if self.factors is None else values * self.factors, self.mask)
        return coefficient * total / self.tokens


class Objective(ABC):
    """A loss and its metrics, over the outputs of a model and the columns of a batch. Calls do not change it."""

    columns: ClassVar[Schema] = {}
    """The columns of the batch that it reads; `trained` is read for all objectives."""
    reduction: Reduction = "tokens"
    """Mean of the tokens' losses over a minibatch."""
    group: ClassVar[int] = 1
    """Trajectories that are compared with one another. They follow each other in the batch and stay together."""
    last: ClassVar[bool] = False
    """True if the model has to see the last token of a trajectory, from which nothing is predicted."""
    firsts: ClassVar[tuple[str, ...]] = ()
    """Metrics that are also reported as `first_...`, of the update's first step alone."""

    @abstractmethod
    def __call__(self, model: Any, micro: Micro) -> Terms:
        """The terms of one micro-batch.

        Args:
            model: callable for a forward pass.
            micro: the micro-batch.
        """

    @classmethod
    def select(cls, batch: Columns) -> Columns:
        """The batch with the columns that are read here, and no others. ValueError if one of them is missing."""
        wanted = {name: field for name, field in cls.columns.items() if name in batch or not field.optional}
        if missing := [name for name in wanted if name not in batch]:
            raise ValueError(f"{', '.join(missing)}: no such column in the batch, and {cls.__name__} needs it")
        return batch.select(*wanted, *(["trained"] if "trained" in batch else []))
