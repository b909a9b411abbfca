"""Services that a run finds behind its file, or behind the code of its reward function."""

import copy
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from orchestrator.clients import Infos
from orchestrator.commands.checks.outdated import behind_files_of_run, outdated
from orchestrator.deployment import cluster
from orchestrator.deployment.cluster import Cluster
from orchestrator.deployment.file import Deployment
from orchestrator.deployment.redeployment import scalable
from protos import common_pb2, critic_pb2, reference_pb2, reward_pb2, rollout_pb2
from quartet.wire.identity import model_hash
from services.reward.config import RewardConfig
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


def infos(name: str = OWN.title, digest: str = OWN.code_hash("scorer"), **others: Any) -> Infos:
    """Infos of services, of which the reward has this scorer."""
    return with_scorer(reward_pb2.ScorerIdentity(name=name, model_hash=digest), **others)


def with_scorer(identity: reward_pb2.ScorerIdentity, **others: Any) -> Infos:
    absent: dict[str, Any] = {"reference": None, "critic": None}
    reward = reward_pb2.ScorerInfo(identity=identity)
    return Infos(**{"rollout": rollout_pb2.RolloutInfo(), "reward": reward, **absent, **others})


def section(deployment: Deployment, name: str) -> Any:
    return next(each for each in deployment.raw["applications"] if each["name"] == name)


def test_services_that_are_as_the_file_says_are_not_spoken_of(deployment: Deployment) -> None:
    assert outdated(deployment, infos()) == []


@pytest.mark.parametrize(
    ("written", "key"),
    [
        ({"num_replicas": 3}, "num_replicas"),
        ({"autoscaling_config": {"min_replicas": 3, "max_replicas": 3}}, "num_replicas"),  # as facts are rendered
        ({"autoscaling_config": {"min_replicas": 1, "max_replicas": 2}}, "autoscaling_config"),
        ({"num_replicas": "auto"}, "autoscaling_config"),
    ],
)
def test_another_number_of_replicas_is_named(deployment: Deployment, written: dict[str, Any], key: str) -> None:
    entry = section(deployment, "rollout")["deployments"][0]
    entry.pop("autoscaling_config", None)
    entry |= written
    [line] = outdated(deployment, infos())
    assert line.startswith(f"applications.rollout.deployments.{entry['name']}.{key}: rollout runs with what was ")


def test_what_has_changed_in_the_file_is_named(deployment: Deployment, monkeypatch: pytest.MonkeyPatch) -> None:
    section(deployment, "reward")["args"]["scorer"]["function"] = "my_reward:score"
    section(deployment, "reference")["args"] |= {"dtype": "bfloat16", "batch_tokens": 7}
    reward, reference = sorted(outdated(deployment, infos()), reverse=True)
    assert reward.startswith("applications.reward.args.scorer.function: reward runs with what was deployed before; ")
    assert f"`quartet up {deployment.path}`" in reward
    keys = reference.partition(": ")[0].split(", ")
    assert {*keys} == {f"applications.reference.args.{key}" for key in ("dtype", "batch_tokens")}
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.5:6379")
    assert outdated(deployment, infos()) == []
    monkeypatch.delenv("RAY_ADDRESS")

    def silent(head: Cluster) -> dict[str, Any]:
        raise TimeoutError

    monkeypatch.setattr(cluster, "serve", silent)
    assert outdated(deployment, infos()) == []
    monkeypatch.setattr(cluster, "running", lambda: None)
    assert outdated(deployment, infos()) == []


def test_a_function_whose_module_has_changed_since_it_was_read_is_named(
    deployment: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    [line] = outdated(deployment, infos(digest="another"))
    assert line.startswith(f"applications.reward.args.scorer.function: {FUNCTION} has changed since reward read it")
    assert outdated(deployment, infos("function:another:score", "another")) == []
    with monkeypatch.context() as here:
        here.setitem(sys.modules, FUNCTION.partition(":")[0], None)  # type: ignore[arg-type]  # as where it is not
        assert outdated(deployment, infos(digest="another")) == []
    section(deployment, "reward")["runtime_env"] = {"working_dir": "https://host/code.zip"}
    assert not any("has changed since" in line for line in outdated(deployment, infos(digest="another")))


def test_a_scorer_that_is_elsewhere_is_not_that_of_the_file(deployment: Deployment) -> None:
    services = deployment.orchestrator.services
    at_theirs = services.model_copy(update={"reward": services.reward.model_copy(update={"target": "judge:9000"})})
    run = deployment.orchestrator.model_copy(update={"services": at_theirs})
    assert outdated(replace(deployment, orchestrator=run), infos(digest="of theirs")) == []


def test_each_of_several_scorers_is_compared(deployment: Deployment, tmp_path: Path) -> None:
    model = model_at(tmp_path / "taste")
    of_model = reward_pb2.ScorerIdentity(name="model:taste", model_hash=model_hash(model))
    of_function = reward_pb2.ScorerIdentity(name=OWN.title, model_hash="another")
    parts = {"taste": {"kind": "model", "model": str(model)}, "rules": {"kind": "function", "function": FUNCTION}}
    args = section(deployment, "reward")["args"] | {"scorer": {"kind": "several", "scorers": parts}}
    several = replace(deployment, services={**deployment.services, "reward": RewardConfig.parse(args, "args")})
    told = [*behind_files_of_run(several, with_scorer(scorer_of(of_model, of_function)).by_service)]
    assert [line.partition(": ")[0] for line in told] == ["applications.reward.args.scorer.scorers.rules.function"]
    (model / "model.safetensors").write_bytes(b"trained again")
    told = [*behind_files_of_run(several, with_scorer(scorer_of(of_model, of_function)).by_service)]
    assert [line.partition(" since ")[0] for line in told] == [
        f"applications.reward.args.scorer.scorers.taste.model: {model} has changed",
        f"applications.reward.args.scorer.scorers.rules.function: {FUNCTION} has changed",
    ]


def test_a_model_whose_folder_has_changed_since_it_was_read_is_named(deployment: Deployment, tmp_path: Path) -> None:
    model = model_at(tmp_path / "mine")
    services = {
        name: deployment.services[name].model_copy(update={"model": str(model)}) for name in ("reference", "critic")
    }
    ours = replace(deployment, services={**deployment.services, **services})
    read = common_pb2.ModelInfo(name="mine", model_hash=model_hash(model))
    trained = infos(reference=reference_pb2.ReferenceInfo(model=read), critic=critic_pb2.CriticInfo(model=read))
    assert outdated(ours, trained) == []
    (model / "model.safetensors").write_bytes(b"trained again")
    told = sorted(outdated(ours, trained))
    assert [line.partition(" since ")[0] for line in told] == [
        f"applications.{name}.args.model: {model} has changed" for name in ("critic", "reference")
    ]
    # A critic that was trained has left its folder behind, and another's model is not that of this folder.
    critic = critic_pb2.CriticInfo(model=read, last_step=3)
    other = common_pb2.ModelInfo(name="theirs", model_hash="of theirs")
    assert outdated(ours, infos(reference=reference_pb2.ReferenceInfo(model=other), critic=critic)) == []
    shutil.rmtree(model)
    assert outdated(ours, trained) == []


def model_at(folder: Path) -> Path:
    """A folder with files of a model's names."""
    folder.mkdir()
    for name in ("config.json", "model.safetensors"):
        (folder / name).write_bytes(b"{}")
    return folder


def scorer_of(*parts: reward_pb2.ScorerIdentity) -> reward_pb2.ScorerIdentity:
    return reward_pb2.ScorerIdentity(name="several", parts=parts)
