"""The distribution that responses are sampled from, read from the configuration and the policy's folder."""

from typing import Any

from orchestrator.config.run import OrchestratorConfig
from quartet.models.distribution import Distribution, end_ids
from quartet.models.loading import load_tokenizer
from quartet.wire.identity import vocabulary_size


def sampled_from(config: OrchestratorConfig, tokenizer: Any = None) -> Distribution:
    """The distribution in which engine, reference and learner take log-probs.

    Raises:
        ConfigError: the policy's folder has no tokenizer.
    """
    folder, sampling = config.policy.model, config.sampling
    tokenizer = tokenizer or load_tokenizer(folder)
    return Distribution(
        temperature=sampling.temperature,
        vocabulary=vocabulary_size(tokenizer),
        min_new_tokens=sampling.min_new_tokens,
        end_ids=tuple(sorted({*end_ids(folder, tokenizer), *sampling.stop_token_ids})),
    )
