"""Scorers without a run: the whole file that follows from their facts, and the checks of such files."""

from collections.abc import Callable
from pathlib import Path
from shutil import copytree
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from orchestrator.commands.checks.preflight import checked
from orchestrator.commands.checks.startable import beyond_this_machine, unstartable
from orchestrator.deployment.facts.read import derived
from orchestrator.deployment.facts.render import render
from orchestrator.deployment.facts.scorers import ScorersFacts, derive
from orchestrator.deployment.file import Deployment, ServicesFile, load_file
from orchestrator.deployment.redeployment import scalable
from quartet.config.base import ConfigError
from services.reward.config import RewardConfig
from tests.configuration import REPO

FUNCTION = "tests.scorers:count"


def loaded(raw: dict[str, Any], folder: Path) -> ServicesFile:
    path = folder / "alone.yaml"
    path.write_text(yaml.safe_dump(raw, sort_keys=False))
    return load_file(path, check_services=True)


def packs_at(packs: bool) -> Any:
    """Gives every folder a model whose sequences may be packed, or not."""
    return lambda folder, field: SimpleNamespace(packs=packs)


def problems(call: Callable[[], object]) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        call()
    return str(caught.value).splitlines()


def deployments(file: ServicesFile) -> dict[str, dict[str, Any]]:
    [application] = file.raw["applications"]
    return {entry["name"]: entry for entry in application["deployments"]}


def test_a_file_without_a_run_follows_from_scorers_alone(reward_folder: Path, tmp_path: Path) -> None:
    limited = {"kind": "function", "function": FUNCTION, "limits": {"batch_s": 2}, "num_replicas": 3}
    file = loaded({"scorers": {"taste": str(reward_folder), "rules": FUNCTION, "limited": limited}}, tmp_path)
    assert not isinstance(file, Deployment)
    assert (file.applications, file.target) == (("reward",), "127.0.0.1:19000")
    section = file.services["reward"]
    assert isinstance(section, RewardConfig)
    hosted = section.hosted
    assert {name: each.tokenizer for name, each in hosted.items()} == {
        "taste": str(reward_folder),
        "rules": None,
        "limited": None,
    }
    assert hosted["limited"].limits.batch_s == 2
    entries = deployments(file)
    assert [*entries] == ["Reward", "taste", "rules", "limited"]
    assert [entry["autoscaling_config"]["max_replicas"] for entry in entries.values()] == [1, 1, 1, 3]
    assert entries["Reward"]["ray_actor_options"] == {"num_cpus": 0}
    assert [(placed.name, placed.gpus) for placed in file.placed()] == [
        ("reward.taste", 0),
        ("reward.rules", 0),
        ("reward.limited", 0),
    ]
    assert "orchestrator" not in file.raw
    same, notes = checked(file)
    assert same is file
    assert notes[-1] == "services alone, without a run: reward"
    assert list(beyond_this_machine(file, 1, 0)) == []


@pytest.mark.parametrize(
    ("gpus", "models", "share"),
    [(0, 2, 0), (1, 1, 1), (1, 3, 0.3333), (1, 6, 0.1666), (2, 3, 1 / 2), (4, 3, 1), (2, 0, 0)],
)
def test_models_share_the_gpus_so_that_all_have_a_place(gpus: int, models: int, share: float) -> None:
    scorers: dict[str, Any] = {f"model-{index}": {"kind": "model", "model": "."} for index in range(models)}
    if models > 1:  # one of several in one counts as well
        scorers["model-0"] = {"kind": "several", "scorers": {"a": scorers["model-0"]}}
        scorers["model-1"]["ray_actor_options"] = {"resources": {"judges": 1}}
    facts = ScorersFacts.parse({"scorers": {"rules": FUNCTION} | scorers, "gpus": gpus}, "")
    [application] = derive(facts, packs_at(True))["applications"]
    asked = [entry["ray_actor_options"].get("num_gpus", 0) for entry in application["deployments"]]
    assert sorted(asked, reverse=True)[:models] == [share] * models
    assert sum(1 for each in asked if each) == (models if gpus else 0)
    assert {entry["ray_actor_options"]["num_cpus"] for entry in application["deployments"]} <= {0, 1 if gpus else 0.2}


@pytest.mark.parametrize(
    ("gpus", "options", "share"),
    [
        (1, {"num_replicas": 2}, 0.3333),
        (1, {"autoscaling_config": {"min_replicas": 1, "max_replicas": 3}}, 0.25),
        (2, {"num_replicas": 3}, 0.5),
        (4, {"num_replicas": 3}, 1),
    ],
)
def test_replicas_share_the_gpus_so_that_all_have_a_place(gpus: int, options: dict[str, Any], share: float) -> None:
    model = {"kind": "model", "model": "."}
    scorers = {"taste": ".", "safety": model | options, "rules": {"kind": "function", "function": FUNCTION} | options}
    facts = ScorersFacts.parse({"scorers": scorers, "gpus": gpus}, "")
    [application] = derive(facts, packs_at(True))["applications"]
    asked = {entry["name"]: entry["ray_actor_options"].get("num_gpus", 0) for entry in application["deployments"]}
    assert asked == {"Reward": 0, "taste": share, "safety": share, "rules": 0}


@pytest.mark.parametrize("packs", [True, False])
@pytest.mark.parametrize(
    ("facts", "dtype", "tokens"),
    [({}, "float32", 2048), ({"gpus": 1}, "bfloat16", None), ({"gpus": 1, "dtype": "float32"}, "float32", None)],
)
def test_the_keys_of_a_model_follow_from_the_facts_however_it_is_given(
    facts: dict[str, Any], dtype: str, tokens: int | None, packs: bool
) -> None:
    model = {"kind": "model", "model": "."}
    scorers = {
        "short": ".",
        "whole": model | {"normalise": False},
        "within": {"kind": "several", "scorers": {"a": model, "b": {"kind": "function", "function": FUNCTION}}},
        "own": model | {"dtype": "float16", "batch_tokens": 7, "packing": False},
    }
    [application] = derive(ScorersFacts.parse({"scorers": scorers} | facts, ""), packs_at(packs))["applications"]
    made = application["args"]["scorers"]
    derived_keys = {"dtype": dtype, "packing": packs} | ({"batch_tokens": tokens} if tokens else {})
    assert made["short"] == model | derived_keys
    assert made["whole"] == model | derived_keys | {"normalise": False}
    assert made["within"]["scorers"] == {"a": model | derived_keys, "b": {"kind": "function", "function": FUNCTION}}
    assert made["own"] == scorers["own"]


def test_a_single_scorer_takes_its_calls_itself(tmp_path: Path) -> None:
    file = loaded({"scorers": {"rules": {"kind": "function", "function": FUNCTION, "num_replicas": 2}}}, tmp_path)
    [(name, entry)] = deployments(file).items()
    assert (name, entry["autoscaling_config"]) == ("Reward", {"min_replicas": 2, "max_replicas": 2})


@pytest.mark.parametrize(
    ("change", "lines"),
    [
        ({"scorers": {}}, ["scorers: should have 1 or more items"]),
        (
            {"scorers": {"a b": FUNCTION}},
            ["scorers.a b: should be letters, digits, `_` and `-`, a letter first; "],
        ),
        ({"scorers": {"rules": {"kind": "oracle"}}}, ["scorers.rules.kind: should be one of "]),
        (
            {"scorers": {"rules": "/no/such/model"}},
            ["scorers.rules: should be a model's folder, but /no/such/model does not exist"],
        ),
        (
            {"scorers": {"rules": {"kind": "function", "function": FUNCTION, "num_replica": 2}}},
            ["scorers.rules.num_replica: unknown field; known: "],
        ),
        ({"steps": 3}, ["steps: unknown field; known: "]),
        ({"model": "models/policy"}, ["scorers: unknown field; known: "]),
        ({"applications": []}, ["scorers are facts, from which applications are derived"]),
    ],
)
def test_wrong_facts_are_named_by_their_keys(change: dict[str, Any], lines: list[str], tmp_path: Path) -> None:
    actual = problems(lambda: loaded({"scorers": {"rules": FUNCTION}} | change, tmp_path))
    for line in lines:
        assert any(given.removeprefix(f"{tmp_path}/alone.yaml: ").startswith(line) for given in actual), actual


def test_what_would_not_start_is_named_by_its_fact(tmp_path: Path) -> None:
    file = loaded({"scorers": {"rules": "math:no"}}, tmp_path)
    [line] = problems(lambda: checked(file))
    assert file.worded(line).startswith("scorers.rules.function: 'math:no' should be package.module:name, but ")


def test_a_model_whose_tokenizer_is_another_is_named(reward_folder: Path, tmp_path: Path) -> None:
    other = copytree(reward_folder, tmp_path / "other")
    (other / "tokenizer.json").write_text((other / "tokenizer.json").read_text().replace('"w4"', '"v4"'))
    model = {"kind": "model", "model": str(reward_folder)}
    scorers = {"own": model | {"tokenizer": str(reward_folder)}, "other": model, "rules": FUNCTION}
    file = loaded({"scorers": scorers, "tokenizer": str(other)}, tmp_path)
    [line] = problems(lambda: checked(file))
    assert file.worded(line) == (
        f"scorers.other.model: the tokenizer of {reward_folder} is not {other}, which the scorer is given; set "
        "scorers.other.tokenizer to that of the model"
    )


def test_a_run_is_told_that_the_file_has_none(tmp_path: Path) -> None:
    path = tmp_path / "alone.yaml"
    path.write_text(yaml.safe_dump({"scorers": {"rules": FUNCTION}}))
    [line] = problems(lambda: Deployment.load(path))
    assert (
        line
        == f"{path}: has services alone, which `quartet up` starts; a run needs the section orchestrator, or facts"
    )


def test_deployments_of_a_whole_file_are_those_of_its_scorers(tmp_path: Path) -> None:
    raw = derived({"scorers": {"rules": FUNCTION, "other": FUNCTION}}, tmp_path / "alone.yaml")
    [application] = raw["applications"]
    application["deployments"] = [{"name": "rules", "num_replicas": 2}]
    loaded(raw, tmp_path)
    sent = scalable(application)["deployments"]
    assert {entry["name"]: entry["autoscaling_config"]["max_replicas"] for entry in sent} == {
        "rules": 2,
        "Reward": 1,
        "other": 1,
    }
    application["deployments"] = [{"name": "rulse"}, {"name": "other"}, {"name": "other"}]
    where = "applications.reward.deployments"
    lines = problems(lambda: loaded(raw, tmp_path))
    assert lines[:2] == [
        f"{where}.rulse: no such deployment; those here are Reward, rules, other",
        f"{where}: should hold other once",
    ]


@pytest.mark.parametrize(("host", "target"), [("0.0.0.0", "127.0.0.1"), ("10.0.0.5", "10.0.0.5"), ("::1", "::1")])
def test_the_services_are_asked_where_they_listen(host: str, target: str, tmp_path: Path) -> None:
    path = tmp_path / "alone.yaml"
    path.write_text(yaml.safe_dump({"scorers": {"rules": FUNCTION}, "port": 7, "security": {"host": host}}))
    assert load_file(path).target == f"{target}:7"


def test_the_shipped_file_starts_anywhere() -> None:
    """Without a model, data or a GPU."""
    facts, shipped = REPO / "deploy/facts/reward.yaml", REPO / "deploy/reward.yaml"
    file = load_file(shipped, check_services=True)
    assert list(unstartable(file)) == list(beyond_this_machine(file, 1, 0)) == []
    assert render(facts).partition("\nhttp_options")[2] == shipped.read_text().partition("\nhttp_options")[2]
    assert load_file(facts).raw == file.raw
