"""The rules of the `orchestrator:` section."""

from typing import Any

import pytest

from orchestrator.config.run import OrchestratorConfig
from orchestrator.loop.estimate import make_controller
from quartet.config.base import ConfigError


def refusal(section: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as caught:
        OrchestratorConfig.parse(section, "orchestrator")
    return str(caught.value)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"batch_size": 16, "ppo": {"minibatch_size": 17}},
            "orchestrator: ppo.minibatch_size (17) must not exceed batch_size (16)",
        ),
        (
            {"ppo": {"kl": {"placement": "loss"}}},
            "orchestrator.ppo.kl: estimator k1 in the loss has an expected gradient of zero; choose k2 or k3",
        ),
        *(
            (
                {"ppo": {"kl": {"estimator": kind}}},
                f"orchestrator.ppo.kl: estimator {kind} in the reward does not pull to the reference, as a reward is "
                "not differentiated; choose k1, or placement loss",
            )
            for kind in ("k2", "k3")
        ),
        (
            {"ppo": {"kl": {"target": 6, "coef": 0}}},
            "orchestrator.ppo.kl: target adapts the coefficient by factors, so coef must be more than 0",
        ),
        (
            {"services": {"reference": None}, "ppo": {"kl": {"coef": 0.25}}},
            "orchestrator: services.reference: null, but ppo.kl.coef 0.25 penalises the KL to it; give the service, "
            "or set ppo.kl.coef to 0",
        ),
        (
            {"services": {"critic": None}},
            "orchestrator: services.critic: null, but ppo.advantages gae takes its values; give the service, or set "
            "ppo.advantages to rloo or reinforce++",
        ),
        (
            {"services": {"critic": {"application": "mine"}}, "ppo": {"advantages": "reinforce++"}},
            "orchestrator: services.critic: given, but ppo.advantages reinforce++ trains none; leave it out",
        ),
        (
            {"ppo": {"advantages": "rloo"}},
            "orchestrator.ppo: advantages rloo compares the responses to one prompt, so samples_per_prompt must be 2 "
            "or more, got 1",
        ),
        (
            {"ppo": {"advantages": "rloo", "samples_per_prompt": 2, "gamma": 0.9}},
            "orchestrator.ppo: advantages rloo takes a response as one action, so gamma must be 1, got 0.9",
        ),
        (
            {"ppo": {"advantages": "reinforce++", "whiten_advantages": False}},
            "orchestrator.ppo: advantages reinforce++ has the batch's mean as baseline; whiten_advantages must be "
            "true",
        ),
        (
            {"ppo": {"advantages": "reinforce++", "critic_epochs": 2}},
            "orchestrator.ppo: critic_epochs is for a critic, and advantages reinforce++ has none; leave it out, or "
            "use gae",
        ),
        (
            {"batch_size": 32, "ppo": {"samples_per_prompt": 3}},
            "orchestrator: batch_size (32) must be a multiple of ppo.samples_per_prompt (3), so that a batch holds "
            "all responses to its prompts",
        ),
        ({"ppo": {"advantages": "grpo"}}, "orchestrator.ppo.advantages: should be 'gae', 'rloo' or 'reinforce++'"),
        (
            {"batch_size": 100, "ppo": {"kl": {"target": 6, "horizon": 20}}},
            "orchestrator: ppo.kl.horizon (20) must be more than 0.2 * batch_size (100)",
        ),
        (
            {"sampling": {"min_new_tokens": 9, "max_new_tokens": 8}},
            "orchestrator.sampling: min_new_tokens (9) must not exceed max_new_tokens (8)",
        ),
        (
            {"weights": {"stage": "gpu", "backend": "ipc"}},
            "orchestrator: weights.stage: gpu is for weights that NCCL brings; weights.backend ipc has its own place "
            "for them; leave it out",
        ),
        (
            {"weights": {"senders": 2}},
            "orchestrator: weights.senders (2) must not exceed policy.ranks (1)",
        ),
        ({"seed": -1}, "orchestrator.seed: should be 0 or more, got -1"),
        ({"sampling": {"temperature": 0}}, "orchestrator.sampling.temperature: should be 0.01 or more, got 0"),
        (
            {"ppo": {"importance_band": [0.5, 2]}},
            "orchestrator.ppo: importance_band is for icepop, geometric, dis, and correction is tis; leave it out",
        ),
        (
            {"ppo": {"importance_cap": 3, "correction": "icepop"}},
            "orchestrator.ppo: importance_cap does not belong to correction icepop, which has a band; leave it out",
        ),
        (
            {"ppo": {"dual_clip": 3, "correction": "dis"}},
            "orchestrator.ppo: dual_clip bounds a loss that correction dis does not use; leave it out",
        ),
        (
            {"ppo": {"clip_eps_high": 0.3, "correction": "dis"}},
            "orchestrator.ppo: clip_eps_low and clip_eps_high do not belong to correction dis; leave them out",
        ),
        (
            {"ppo": {"old_logprobs": "rollout", "correction": "icepop"}},
            "orchestrator.ppo: correction icepop compares the learner's log-probs with the engine's, and "
            "old_logprobs: rollout takes the engine's for both; leave it out, or set old_logprobs to learner",
        ),
        (
            {"ppo": {"old_logprobs": "rollout", "importance_cap": None}},
            "orchestrator.ppo: importance_cap bounds the learner's log-probs over the engine's, and old_logprobs: "
            "rollout takes the engine's for both; leave it out, or set old_logprobs to learner",
        ),
        ({"loop": {"max_staleness": 1_000}}, "orchestrator.loop.max_staleness: should be 100 or less, got 1000"),
        (
            {"loop": {"depth": 2, "max_staleness": 1}},
            "orchestrator.loop: depth (2) must not exceed max_staleness (1), as a batch that is sampled so far ahead "
            "would be too old to train on: set max_staleness to 2 or more, or a lower depth",
        ),
        ({"ppo": {"dual_clip": 1}}, "orchestrator.ppo.dual_clip: should be more than 1, got 1"),
        ({"ppo": {"importance_cap": 0.5}}, "orchestrator.ppo.importance_cap: should be 1 or more, got 0.5"),
        (
            {"sampling": {"temperature": 0.001}},
            "orchestrator.sampling.temperature: should be 0.01 or more, got 0.001",
        ),
        (
            {"name": "../up"},
            "orchestrator.name: should be letters, digits, `_`, `-`, `.`, a letter or digit first",
        ),
        ({"target": "localhost"}, "orchestrator.target: should be host:port, got 'localhost'"),
        ({"target": "a:65536"}, "orchestrator.target: should end in a port from 1 to 65535, got 'a:65536'"),
        ({"target": "a:0"}, "orchestrator.target: should end in a port from 1 to 65535, got 'a:0'"),
        ({"steps": 0}, "orchestrator.steps: should be 1 or more, got 0"),
        ({"ppo": 3}, "orchestrator.ppo: should be a mapping of fields to values, got 3"),
    ],
)
def test_runs_that_cannot_be(section: dict[str, Any], values: dict[str, Any], message: str) -> None:
    said = refusal(section | values)
    assert said.startswith(message)
    assert "\n" not in said


def test_runs_that_can_be(section: dict[str, Any]) -> None:
    kl = {"placement": "loss", "estimator": "k2"}
    config = OrchestratorConfig.parse(section | {"batch_size": 16, "ppo": {"minibatch_size": 16, "kl": kl}}, "o")
    assert (config.ppo.minibatch_size, config.ppo.kl.estimator) == (16, "k2")
    # A penalty that is turned off does no harm; what is estimated is measured.
    OrchestratorConfig.parse(section | {"ppo": {"kl": {"placement": "loss", "coef": 0}}}, "o")
    OrchestratorConfig.parse(section | {"ppo": {"kl": {"estimator": "k3", "coef": 0}}}, "o")


def test_an_adaptive_coefficient_that_is_accepted_survives_the_largest_error(section: dict[str, Any]) -> None:
    values = {"batch_size": 100, "ppo": {"kl": {"target": 6, "horizon": 20.1}}}
    config = OrchestratorConfig.parse(section | values, "o")
    # e is -0.2 at most: 0.1 * (1 - 0.2 * 100 / 20.1) > 0.
    assert make_controller(config.ppo, config.ppo.kl.coef).update(0.0, config.batch_size).coef == pytest.approx(
        0.1 * 0.1 / 20.1
    )
