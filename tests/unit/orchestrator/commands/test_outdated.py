"""Services that a run finds behind its file, or behind the code of its reward function."""

import copy
import sys
from pathlib import Path
from typing import Any

import pytest

from orchestrator.commands.checks.outdated import outdated
from orchestrator.deployment import cluster
from orchestrator.deployment.cluster import Cluster
from orchestrator.deployment.file import Deployment
from orchestrator.deployment.redeployment import scalable
from protos import reward_pb2
from services.reward.kinds import FunctionScorerConfig
from tests.gpu_requests import DEPLOY, load

HEAD = Cluster(1, 0.0, "127.0.0.1:1", "http://127.0.0.1:2", "token", "folder", "secret")
FUNCTION = "recipes.addition.reward:score"
OWN = FunctionScorerConfig(kind="function", function=FUNCTION)


@pytest.fixture
def deployment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Deployment:
    """deploy/ppo-addition.yaml, as it is deployed here."""
    loaded = load(DEPLOY / "ppo-addition.yaml", tmp_path)
    sections = [scalable(copy.deepcopy(section)) for section in loaded.raw["applications"]]
    described = {section["name"]: {"deployed_app_config": section, "deployments": {}} for section in sections}
    described["judge"] = {"deployed_app_config": {"name": "judge", "import_path": "judges:build"}}
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(cluster, "running", lambda: HEAD)
    monkeypatch.setattr(cluster, "serve", lambda head: {"applications": described})
    return loaded


def scorer(name: str = OWN.title, digest: str = OWN.code_hash("scorer")) -> reward_pb2.ScorerIdentity:
    return reward_pb2.ScorerIdentity(name=name, model_hash=digest)


def section(deployment: Deployment, name: str) -> Any:
    return next(each for each in deployment.raw["applications"] if each["name"] == name)


def test_services_that_are_as_the_file_says_are_not_spoken_of(deployment: Deployment) -> None:
    assert outdated(deployment, scorer()) == []
    section(deployment, "rollout")["deployments"][0]["num_replicas"] = 3  # which `up` would change in place
    assert outdated(deployment, scorer()) == []


def test_what_has_changed_in_the_file_is_named(deployment: Deployment, monkeypatch: pytest.MonkeyPatch) -> None:
    section(deployment, "reward")["args"]["scorer"]["function"] = "my_reward:score"
    section(deployment, "reference")["args"] |= {"dtype": "bfloat16", "batch_tokens": 7}
    reward, reference = sorted(outdated(deployment, scorer()), reverse=True)
    assert reward.startswith("applications.reward.args.scorer.function: reward runs with what was deployed before; ")
    assert f"`quartet up {deployment.path}`" in reward
    keys = reference.partition(": ")[0].split(", ")
    assert {*keys} == {f"applications.reference.args.{key}" for key in ("dtype", "batch_tokens")}
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.5:6379")
    assert outdated(deployment, scorer()) == []
    monkeypatch.delenv("RAY_ADDRESS")

    def silent(head: Cluster) -> dict[str, Any]:
        raise TimeoutError

    monkeypatch.setattr(cluster, "serve", silent)
    assert outdated(deployment, scorer()) == []
    monkeypatch.setattr(cluster, "running", lambda: None)
    assert outdated(deployment, scorer()) == []


def test_a_function_whose_module_has_changed_since_it_was_read_is_named(
    deployment: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    [line] = outdated(deployment, scorer(digest="another"))
    assert line.startswith(f"applications.reward.args.scorer.function: {FUNCTION} has changed since ")
    assert outdated(deployment, scorer("function:another:score", "another")) == []
    with monkeypatch.context() as here:
        here.setitem(sys.modules, FUNCTION.partition(":")[0], None)  # type: ignore[arg-type]  # as where it is not
        assert outdated(deployment, scorer(digest="another")) == []
    section(deployment, "reward")["runtime_env"] = {"working_dir": "https://host/code.zip"}
    assert not any("has changed since" in line for line in outdated(deployment, scorer(digest="another")))
