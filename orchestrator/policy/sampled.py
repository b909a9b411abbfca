"""The distribution that responses are sampled from, read from the configuration and the policy's folder."""

from typing import Any

from orchestrator.config.run import OrchestratorConfig
from quartet.models.distribution import Distribution, end_ids
from quartet.wire.identity import vocabulary_size


def sampled_from(config: OrchestratorConfig, tokenizer: Any) -> Distribution:
    """The distribution in which engine, reference and learner take log-probs, given the policy's tokenizer.
    ConfigError as for `end_ids`."""
    sampling = config.sampling
    return Distribution(
        temperature=sampling.temperature,
        vocabulary=vocabulary_size(tokenizer),
        min_new_tokens=sampling.min_new_tokens,
        end_ids=tuple(sorted({*end_ids(config.policy.model, tokenizer), *sampling.stop_token_ids})),
    )
