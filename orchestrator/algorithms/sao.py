"""Single-rollout asynchronous optimisation: a critic instead of groups, for samples of any age."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar, Literal

from pydantic import NonNegativeInt, PositiveFloat

from orchestrator.algorithms.contract import Algorithm, Baseline, Clip, KLConfig, Scale
from quartet.config.base import Count, Fraction


class SAO(Algorithm):
    """SAO (arXiv:2607.07508) with a critic that learns twice from each batch: twice for each update of the policy if
    minibatch_size is the batch_size. The critic's attention layers are frozen: a file of facts fills in
    freeze_attention, which is a key of the critic service, and `quartet check` reminds of it in a whole file."""

    critic_keys: ClassVar[Mapping[str, Any]] = MappingProxyType({"freeze_attention": True})
    kind: Literal["sao"] = "sao"
    """Advantages from the values of a critic, with a lambda for each response by its length; tokens whose ratio to
    the engine's log-probs is far from 1 are left out."""
    baseline: Baseline = "critic"
    scale: Scale = "batch"
    gae_lambda_alpha: PositiveFloat | None = 1.5
    critic_gae_lambda: Fraction | None = 1.0
    critic_epochs: Count | None = 2
    critic_only_steps: NonNegativeInt = 10
    epochs: Count = 1
    clip: Clip = "dis"
    kl: KLConfig = KLConfig(coef=0)
