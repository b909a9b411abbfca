"""The algorithm's facts as the `ppo:` section of the orchestrator, the only place that knows how kinds are written
there."""

from typing import Any

from orchestrator.config.algorithm import PPOConfig
from orchestrator.deployment.facts.facts import AlgorithmFacts
from quartet.config.base import ConfigError

KINDS: dict[str, dict[str, Any]] = {
    "ppo": {},
    "rloo": {"advantages": "rloo", "samples_per_prompt": 4},
    "reinforce++": {"advantages": "reinforce++"},
}
"""Kind of the algorithm -> its keys of the section `ppo:`, unless the facts set them."""


def section(facts: AlgorithmFacts) -> dict[str, Any]:
    """The keys of the section `ppo:`. ConfigError if there is not such a kind."""
    if facts.kind not in KINDS:
        raise ConfigError(f"algorithm.kind: should be one of {', '.join(KINDS)}, got {facts.kind!r}")
    if "advantages" in facts.settings:
        raise ConfigError("algorithm.advantages: is stated by algorithm.kind; set that, and leave this out")
    return KINDS[facts.kind] | facts.settings


def parsed(ppo: dict[str, Any]) -> PPOConfig:
    """The section, checked. ConfigError for wrong keys."""
    return PPOConfig.parse(ppo, "orchestrator.ppo")
