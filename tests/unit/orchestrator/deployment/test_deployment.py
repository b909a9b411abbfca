"""The YAML file as a whole, and the orchestrator's own rules."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from orchestrator.config.run import OrchestratorConfig
from orchestrator.deployment.file import Deployment
from orchestrator.loop.estimate import make_controller
from services.common.config.base import ConfigError
from services.common.security.port import Port


@pytest.fixture
def model(tmp_path: Path) -> str:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    return str(folder)


@pytest.fixture
def section(model: str) -> dict[str, Any]:
    """The least that an `orchestrator:` section needs."""
    policy = {"model": model, "optimizer": {"learning_rate": 1e-4}}
    return {"name": "run", "data": {"path": "prompts"}, "policy": policy}


def refusal(section: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as caught:
        OrchestratorConfig.parse(section, "orchestrator")
    return str(caught.value)


def write(path: Path, content: dict[str, Any]) -> Path:
    path.write_text(yaml.safe_dump(content))
    return path


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
            {"ppo": {"advantages": "reinforce++", "bootstrap_truncated": True}},
            "orchestrator.ppo: bootstrap_truncated adds the critic's values, and advantages reinforce++ has none; "
            "use gae",
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
            "orchestrator.ppo: importance_cap is no part of correction icepop, which has a band; leave it out",
        ),
        (
            {"ppo": {"dual_clip": 3, "correction": "dis"}},
            "orchestrator.ppo: dual_clip bounds a loss that correction dis does not use; leave it out",
        ),
        (
            {"ppo": {"clip_eps_high": 0.3, "correction": "dis"}},
            "orchestrator.ppo: clip_eps_low and clip_eps_high are no part of correction dis; leave them out",
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
    # k1 in a loss that is turned off does no harm.
    OrchestratorConfig.parse(section | {"ppo": {"kl": {"placement": "loss", "coef": 0}}}, "o")


def test_an_adaptive_coefficient_that_is_accepted_survives_the_largest_error(section: dict[str, Any]) -> None:
    values = {"batch_size": 100, "ppo": {"kl": {"target": 6, "horizon": 20.1}}}
    config = OrchestratorConfig.parse(section | values, "o")
    # e is -0.2 at most: 0.1 * (1 - 0.2 * 100 / 20.1) > 0.
    assert make_controller(config.ppo, config.ppo.kl.coef).update(0.0, config.batch_size).coef == pytest.approx(
        0.1 * 0.1 / 20.1
    )


def test_a_file_is_read_whole(tmp_path: Path, section: dict[str, Any]) -> None:
    applications = [{"name": "reward", "import_path": "services.reward.replica:build", "args": {"tokenizer": "no"}}]
    content = {
        "shared": {"x": 1},
        "grpc_options": {"port": 19000},
        "applications": applications,
        "orchestrator": section,
    }
    loaded = Deployment.load(write(tmp_path / "a.yaml", content))
    assert loaded.applications == ("reward",)
    assert loaded.orchestrator.name == "run"
    assert loaded.raw == content
    assert loaded.ports == {"http_options.port": 8000, "grpc_options.port": 19000}


def test_all_problems_are_told_at_once(tmp_path: Path, section: dict[str, Any], model: str) -> None:
    content = {
        "aplications": [],
        "applications": [
            {"name": "critic", "import_path": "services.critic.replica:build", "args": {"modle": "x"}},
            {"name": "mine", "import_path": "elsewhere:build", "args": {"any": "thing"}},
            {"name": "rollout", "import_path": "services.rollout.replica:build", "args": {"model": model, "port": 1}},
            {"name": "reference", "import_path": "services.reference.replica:build"},
            {"name": "reward", "import_path": "services.reward.replica:build", "args": ["scorer"]},
        ],
        "orchestrator": section | {"step": 3},
    }
    path = write(tmp_path / "a.yaml", content)
    with pytest.raises(ConfigError) as caught:
        Deployment.load(path, check_services=True)
    lines = str(caught.value).splitlines()
    expected = [
        f"{path}: aplications: unknown section; known: applications, ",
        "applications.critic.args.model: required",
        "applications.critic.args.optimizer: required",
        "applications.critic.args.modle: unknown field; known: ",
        "applications.rollout.args.port: unknown field; known: ",
        "applications.reference.args.model: required",
        "applications.reward.args: should be a mapping of fields to values, got ['scorer']",
        "orchestrator.step: unknown field; known: ",
    ]
    assert len(lines) == len(expected)
    for line, start in zip(lines, expected, strict=True):
        assert line.startswith(start)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"grpc_options": {"port": 9000}}, "orchestrator.target: 127.0.0.1:19000, but grpc_options.port is 9000"),
        ({"grpc_options": [9000]}, "grpc_options: should be a mapping, got [9000]"),
        ({"http_options": {"port": "web"}}, "http_options.port: should be a port from 1 to 65535, got 'web'"),
    ],
)
def test_options_of_serve_that_cannot_be(
    tmp_path: Path, section: dict[str, Any], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        Deployment.load(write(tmp_path / "a.yaml", options | {"orchestrator": section}))


def test_a_target_elsewhere_has_a_port_of_its_own(tmp_path: Path, section: dict[str, Any]) -> None:
    content = {"grpc_options": {"port": 9000}, "orchestrator": section | {"target": "cluster:443"}}
    assert Deployment.load(write(tmp_path / "a.yaml", content)).orchestrator.target == "cluster:443"


@pytest.mark.parametrize("applications", [3, {"name": "reward"}, ["reward"]])
def test_applications_are_a_list_of_sections(tmp_path: Path, section: dict[str, Any], applications: Any) -> None:
    path = write(tmp_path / "a.yaml", {"applications": applications, "orchestrator": section})
    with pytest.raises(ConfigError, match="applications: should be a list, each with a name and an import_path"):
        Deployment.load(path, check_services=True)


def test_a_file_without_an_orchestrator(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        Deployment.load(write(tmp_path / "a.yaml", {"applications": []}))
    assert str(caught.value).splitlines() == [
        "orchestrator.name: required",
        "orchestrator.data: required",
        "orchestrator.policy: required",
    ]
    with pytest.raises(ConfigError, match="orchestrator: should be a mapping of fields to values, got 5"):
        Deployment.load(write(tmp_path / "a.yaml", {"orchestrator": 5}))


def test_a_file_that_opens_the_port_without_a_policy_is_refused_before_anything_starts(tmp_path: Path) -> None:
    path = write(tmp_path / "open.yaml", {"security": {"host": "0.0.0.0"}})
    with pytest.raises(
        ConfigError, match=r"0\.0\.0\.0 is open to other machines, .*; set security.policy in the YAML"
    ):
        Deployment.load(path, check_services=True)


def test_the_port_of_a_file_without_the_section_is_that_of_the_environment(
    tmp_path: Path, section: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "plain.yaml", {"orchestrator": section})
    assert Deployment.load(path).port == Port("127.0.0.1", None)
    monkeypatch.setenv("QUARTET_GRPC_HOST", "0.0.0.0")
    with pytest.raises(ConfigError, match="is open to other machines"):
        Deployment.load(path, check_services=True)
