"""The rules of the `orchestrator:` section."""

from typing import Any

import pytest

from orchestrator.algorithms.kl import adapted
from orchestrator.algorithms.registry import algorithms, kinds
from orchestrator.config.run import OrchestratorConfig
from quartet.config.base import ConfigError


def refusal(section: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as caught:
        OrchestratorConfig.parse(section, "orchestrator")
    return str(caught.value)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"batch_size": 16, "algorithm": {"minibatch_size": 17}},
            "orchestrator: algorithm.minibatch_size (17) must not exceed batch_size (16)",
        ),
        (
            {"algorithm": {"kl": {"placement": "loss"}}},
            "orchestrator.algorithm.kl: estimator k1 in the loss has an expected gradient of zero; choose k2 or k3",
        ),
        *(
            (
                {"algorithm": {"kl": {"estimator": kind}}},
                f"orchestrator.algorithm.kl: estimator {kind} in the reward does not pull to the reference, as a "
                "reward is not differentiated; choose k1, or placement loss",
            )
            for kind in ("k2", "k3")
        ),
        (
            {"algorithm": {"kl": {"target": 6, "coef": 0}}},
            "orchestrator.algorithm.kl: target adapts the coefficient by factors, so coef must be more than 0",
        ),
        (
            {"services": {"reference": None}, "algorithm": {"kl": {"coef": 0.25}}},
            "orchestrator: services.reference: null, but algorithm.kl.coef 0.25 penalises the KL to it; give the "
            "service, or set algorithm.kl.coef to 0",
        ),
        *(
            (
                {"evaluation": {"judges": {name: "recipes.reviews.gold:score"}}},
                f"orchestrator.evaluation.judges: {name}: {why}",
            )
            for name, why in {
                "kl": "measured by every evaluation; call the judge something else",
                "score_low": "the name of a judge cannot begin with score/ or task/, nor end in _low or _high, as "
                "other measures do",
                "task/sums": "the name of a judge cannot begin with score/ or task/, nor end in _low or _high, as "
                "other measures do",
            }.items()
        ),
        (
            {"services": {"critic": None}},
            "orchestrator: services.critic: null, but algorithm.kind ppo takes its values; give the service, or set "
            f"algorithm.kind to {kinds(critic=False)}",
        ),
        (
            {"services": {"critic": {"application": "mine"}}, "algorithm": {"kind": "reinforce++"}},
            "orchestrator: services.critic: given, but algorithm.kind reinforce++ trains none; leave it out",
        ),
        (
            {"batch_size": 32, "algorithm": {"samples_per_prompt": 3}},
            "orchestrator: batch_size (32) must be a multiple of algorithm.samples_per_prompt (3), so that a batch "
            "holds all responses to its prompts",
        ),
        (
            {"algorithm": {"kind": "pppo"}},
            f"orchestrator.algorithm.kind: should be one of {', '.join(map(repr, algorithms()))}, got 'pppo'",
        ),
        (
            {"batch_size": 100, "algorithm": {"kl": {"target": 6, "horizon": 20}}},
            "orchestrator: algorithm.kl.horizon (20) must be more than 0.2 * batch_size (100)",
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
        ({"batch_size": 10**11}, "orchestrator.batch_size: should be 16777216 or less, got 100000000000"),
        (
            {"sampling": {"temperature": 0.001}},
            "orchestrator.sampling.temperature: should be 0.01 or more, got 0.001",
        ),
        (
            {"algorithm": {"importance_band": [0.5, 2]}},
            "orchestrator.algorithm: importance_band is for correction icepop, geometric and for clip dis, and "
            "correction is tis; leave it out",
        ),
        (
            {"algorithm": {"importance_cap": 3, "correction": "icepop"}},
            "orchestrator.algorithm: importance_cap does not belong to correction icepop, which has a band; leave it "
            "out",
        ),
        (
            {"algorithm": {"correction": "icepop", "clip": "dis"}},
            "orchestrator.algorithm: correction has no effect with clip dis, which corrects by itself; leave it out",
        ),
        (
            {"algorithm": {"kind": "dapo", "samples_per_prompt": 8, "overlong_buffer": 257}},
            "orchestrator: algorithm.overlong_buffer (257) must not exceed sampling.max_new_tokens (256), of which "
            "it is the last part",
        ),
        (
            {"algorithm": {"old_logprobs": "rollout", "correction": "icepop"}},
            "orchestrator.algorithm: correction icepop compares the learner's log-probs with the engine's, and "
            "old_logprobs: rollout takes the engine's for both; leave it out, or set old_logprobs to learner",
        ),
        (
            {"algorithm": {"old_logprobs": "rollout", "importance_cap": None}},
            "orchestrator.algorithm: importance_cap bounds the learner's log-probs over the engine's, and "
            "old_logprobs: rollout takes the engine's for both; leave it out, or set old_logprobs to learner",
        ),
        ({"loop": {"max_staleness": 1_000}}, "orchestrator.loop.max_staleness: should be 100 or less, got 1000"),
        (
            {"loop": {"depth": 2, "max_staleness": 1}},
            "orchestrator.loop: depth (2) must not exceed max_staleness (1), as a batch that is sampled so far ahead "
            "would be too old to train on: set max_staleness to 2 or more, or a lower depth",
        ),
        ({"algorithm": {"dual_clip": 1}}, "orchestrator.algorithm.dual_clip: should be more than 1, got 1"),
        (
            {"algorithm": {"importance_cap": 0.5}},
            "orchestrator.algorithm.importance_cap: should be 1 or more, got 0.5",
        ),
        (
            {"name": "../up"},
            "orchestrator.name: should be letters, digits, `_`, `-`, `.`, a letter or digit first",
        ),
        ({"target": "localhost"}, "orchestrator.target: should be host:port, got 'localhost'"),
        ({"target": "a:65536"}, "orchestrator.target: should end in a port from 1 to 65535, got 'a:65536'"),
        ({"target": "a:0"}, "orchestrator.target: should end in a port from 1 to 65535, got 'a:0'"),
        ({"steps": 0}, "orchestrator.steps: should be 1 or more, got 0"),
        ({"algorithm": 3}, "orchestrator.algorithm: should be a mapping of fields to values, got 3"),
    ],
)
def test_runs_that_cannot_be(section: dict[str, Any], values: dict[str, Any], message: str) -> None:
    said = refusal(section | values)
    assert said.startswith(message)
    assert "\n" not in said


def test_runs_that_can_be(section: dict[str, Any]) -> None:
    kl = {"placement": "loss", "estimator": "k2"}
    config = OrchestratorConfig.parse(
        section | {"batch_size": 16, "algorithm": {"minibatch_size": 16, "kl": kl}}, "o"
    )
    assert (config.algorithm.minibatch_size, config.algorithm.kl.estimator) == (16, "k2")
    # A penalty that is turned off does no harm; what is estimated is measured.
    OrchestratorConfig.parse(section | {"algorithm": {"kl": {"placement": "loss", "coef": 0}}}, "o")
    OrchestratorConfig.parse(section | {"algorithm": {"kl": {"estimator": "k3", "coef": 0}}}, "o")


def test_an_adaptive_coefficient_that_is_accepted_survives_the_largest_error(section: dict[str, Any]) -> None:
    values = {"batch_size": 100, "algorithm": {"kl": {"target": 6, "horizon": 20.1}}}
    config = OrchestratorConfig.parse(section | values, "o")
    # e is -0.2 at most: 0.1 * (1 - 0.2 * 100 / 20.1) > 0.
    least = adapted(0.1, 0.0, config.batch_size, target=6, horizon=config.algorithm.kl.horizon)
    assert least == pytest.approx(0.1 * 0.1 / 20.1)
