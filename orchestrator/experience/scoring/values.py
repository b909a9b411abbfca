"""The critic's values of responses, and of the continuation of those that were cut off."""

from dataclasses import dataclass, replace

import numpy as np

from orchestrator.config.run import OrchestratorConfig
from orchestrator.experience.checks import check_rows
from orchestrator.experience.scoring.pairs import Pairs
from services.common.wire.codec import Floats
from services.common.wire.ragged import Ragged
from services.critic.client import CriticClient
from services.rollout.sample import FinishReason, Sample


@dataclass(frozen=True, slots=True)
class Valued:
    """The critic's values of one response of T tokens."""

    values: Floats
    """Values before each token, [T]."""
    after: float
    """Value after the last token, if the response was cut off and bootstrapping is on; else 0, since nothing
    follows."""


async def ask_values(
    critic: CriticClient,
    config: OrchestratorConfig,
    pairs: Pairs,
    critic_step: int,
) -> list[Valued]:
    """Values of these samples, by the critic after `critic_step` or a later step.

    Raises:
        InvalidReply: the critic answers with another number of values, or with values that are not finite.
    """
    asked = pairs.samples
    responses = pairs.responses
    if config.ppo.bootstrap_truncated:
        asked = [_extended(sample) for sample in asked]
        responses = Ragged.of([sample.response_ids for sample in asked])
    answer = await critic.values(pairs.prompt_ids, responses, min_step=critic_step, timeout_s=config.timeouts.score_s)
    check_rows("critic.Values", "values", pairs.prompts, answer.rows, asked)
    valued = []
    for sample, row in zip(pairs.samples, answer.rows, strict=True):
        length = len(sample.response_ids)
        valued.append(Valued(row[:length], float(row[length]) if len(row) > length else 0.0))
    return valued


def _extended(sample: Sample) -> Sample:
    """A cut-off sample with one more token: the value before that token, whatever it is, is the value after the
    last."""
    if sample.finish_reason is not FinishReason.LENGTH:
        return sample
    return replace(sample, response_ids=np.append(sample.response_ids, sample.response_ids[-1:]))
