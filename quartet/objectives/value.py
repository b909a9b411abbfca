"""The objective of a value function: the returns."""

from dataclasses import dataclass
from typing import Any, ClassVar

from quartet.columns import Field, Schema
from quartet.learner.objective import Micro, Objective, Terms
from quartet.models.numerics import value_loss
from quartet.models.scalar import values_of


@dataclass(frozen=True)
class Value(Objective):
    """Half the squared distance of values from returns, clipped as in PPO2, see `value_loss`. The model is a
    ScalarModel; `values` are those from before the update."""

    columns: ClassVar[Schema] = {"values": Field("sampled"), "returns": Field("sampled")}

    value_clip_eps: float | None
    """Distance from the old value beyond which a value gets no gradient. None: no clip."""

    def __call__(self, model: Any, micro: Micro) -> Terms:
        """`loss`; `clip_fraction`, the share of tokens at which the clip decides; and `mean`, that of the values."""
        new_values = values_of(model, micro.pairs)
        loss, clipped = value_loss(
            new_values,
            micro.columns["values"],
            micro.columns["returns"],
            micro.mask,
            value_clip_eps=self.value_clip_eps,
            denominator=micro.tokens,
        )
        return Terms(loss, {"loss": loss, "clip_fraction": clipped, "mean": micro.mean(new_values)})
