"""A file that is deployed while services run: the form in which Serve gets it, and what a user reads before."""

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import yaml

from orchestrator.deployment.redeployment import changes, fixed, scalable
from quartet.config.restarts import restarting

SHIPPED = Path(__file__).parents[4] / "deploy" / "ppo.yaml"
ACTOR = {"ray_actor_options": {"num_cpus": 0.2}}


@pytest.fixture
def sections() -> list[dict[str, Any]]:
    """The applications of deploy/ppo.yaml, with plain numbers of replicas."""
    applications: list[dict[str, Any]] = deepcopy(yaml.safe_load(SHIPPED.read_text()))["applications"]
    for application in applications:
        application["deployments"][0].pop("autoscaling_config", None)
        application["deployments"][0]["num_replicas"] = 1
    return applications


def running(sections: list[dict[str, Any]], replicas: int = 1) -> dict[str, Any]:
    """Serve's description of these sections after `quartet up`."""
    return {
        section["name"]: {
            "deployed_app_config": scalable(section),
            "deployments": {"D": {"replicas": [{"state": "RUNNING"}] * replicas}},
        }
        for section in deepcopy(sections)
    }


def told(sections: list[dict[str, Any]], wanted: list[dict[str, Any]], replicas: int = 1) -> list[str]:
    return [change.text for change in changes(running(sections, replicas), wanted)]


@pytest.mark.parametrize(
    ("entry", "scaling"),
    [
        ({"num_replicas": 3}, {"min_replicas": 3, "max_replicas": 3}),
        ({}, {"min_replicas": 1, "max_replicas": 1}),
        ({"num_replicas": "auto"}, {}),
        ({"num_replicas": None, "autoscaling_config": {"max_replicas": 4}}, {"max_replicas": 4}),
        ({"num_replicas": "auto", "autoscaling_config": {"max_replicas": 4}}, {"max_replicas": 4}),
        ({"num_replicas": 2, "autoscaling_config": None}, {"min_replicas": 2, "max_replicas": 2}),
    ],
)
def test_every_form_of_a_number_is_deployed_as_an_autoscaling_config(
    sections: list[dict[str, Any]], entry: dict[str, Any], scaling: dict[str, Any]
) -> None:
    """No two of them may differ in code for Serve."""
    rollout = sections[0]
    rollout["deployments"] = [{"name": "Rollout", **ACTOR, **entry}]
    deployed = scalable(rollout)
    [kept] = deployed["deployments"]
    assert kept["autoscaling_config"] == scaling
    assert kept["ray_actor_options"] == ACTOR["ray_actor_options"]
    assert scalable(deployed) == deployed
    other = rollout | {"deployments": [{"name": "Rollout", **ACTOR, **fixed(7)}]}
    assert restarting(deployed, scalable(other)) == []


def test_a_section_without_deployments_can_scale_too(sections: list[dict[str, Any]]) -> None:
    del sections[0]["deployments"]
    assert scalable(sections[0])["deployments"] == [{"name": "Rollout", **fixed(1)}]
    assert scalable(sections[0] | {"deployments": []}) == scalable(sections[0])


def test_critics_and_other_applications_stay_as_they_are(sections: list[dict[str, Any]]) -> None:
    critic = sections[3]
    assert scalable(critic) == critic
    other = {"name": "mine", "import_path": "mine:app", "deployments": [{"name": "Mine", "num_replicas": 2}]}
    assert scalable(other) == other


def test_the_same_file_changes_nothing(sections: list[dict[str, Any]]) -> None:
    assert told(sections, sections) == []
    assert changes({}, sections) == []


def test_a_first_autoscaling_config_restarts_nothing(sections: list[dict[str, Any]]) -> None:
    wanted = deepcopy(sections)
    entry = wanted[0]["deployments"][0]
    del entry["num_replicas"]
    entry["autoscaling_config"] = {"min_replicas": 1, "max_replicas": 3, "look_back_period_s": 60}
    wanted[1]["deployments"][0]["num_replicas"] = 4
    assert told(sections, wanted) == [
        "rollout: from 1 replica to 1 to 3 replicas; those that stay are not restarted",
        "reward: from 1 replica to 4 replicas; those that stay are not restarted",
    ]
    again = deepcopy(wanted)
    again[0]["deployments"][0]["autoscaling_config"]["look_back_period_s"] = 90
    assert told(wanted, again) == ["rollout: changes in place; no replica is restarted"]


def test_other_settings_restart_replicas(sections: list[dict[str, Any]]) -> None:
    wanted = deepcopy(sections)
    wanted[0]["args"]["max_length"] = 128
    wanted[0]["deployments"][0]["num_replicas"] = 3
    wanted[3]["runtime_env"]["env_vars"]["OMP_NUM_THREADS"] = "2"
    assert told(sections, wanted, replicas=2) == [
        "rollout: its 2 replicas will be restarted, because of args.max_length",
        "critic: its 2 replicas will be restarted, because of runtime_env.env_vars.OMP_NUM_THREADS",
    ]
    wanted = [deepcopy(section) for section in sections if section["name"] != "reward"]
    wanted[0]["deployments"][0]["ray_actor_options"] = {"num_cpus": 0.5}
    assert told(sections, wanted) == [
        "reward: not in the file, so its 1 replica will be stopped",
        "rollout: its 1 replica will be restarted, because of deployments.Rollout.ray_actor_options.num_cpus",
    ]


def test_each_of_several_scorers_scales_and_moves_by_itself() -> None:
    function = {"kind": "function", "function": "tests.scorers:count"}
    section = {
        "name": "reward",
        "import_path": "services.reward.replica:build",
        "args": {"scorers": {"a": function, "b": function}},
        "deployments": [{"name": "b", "num_replicas": 2, "ray_actor_options": {"num_cpus": 1}}],
    }
    described = running([section])
    replicas: dict[str, Any] = {
        name: {"replicas": [{}] * count} for name, count in (("Reward", 1), ("a", 1), ("b", 2))
    }
    described["reward"]["deployments"] = replicas

    def said(**entry: Any) -> list[str]:
        entries = [{"name": "b", "num_replicas": 2, "ray_actor_options": {"num_cpus": 1}} | entry]
        return [change.text for change in changes(described, [section | {"deployments": entries}])]

    assert said() == []
    assert said(num_replicas=3) == ["reward: b from 2 replicas to 3 replicas; those that stay are not restarted"]
    where = "deployments.b.ray_actor_options.num_cpus"
    assert said(ray_actor_options={"num_cpus": 2}) == [
        f"reward: b: its 2 replicas will be restarted, because of {where}"
    ]
    changed = section | {"args": {"scorers": {"a": function, "b": function | {"max_length": 9}}}}
    assert [change.text for change in changes(described, [changed])] == [
        "reward: its 4 replicas will be restarted, because of args.scorers.b.max_length"
    ]


def test_a_service_that_serve_deploy_started_without_the_key_is_told(sections: list[dict[str, Any]]) -> None:
    """`serve deploy` sends the file as it is."""
    described = running(sections)
    described["rollout"]["deployed_app_config"] = sections[0]
    assert [change.text for change in changes(described, sections)] == [
        "rollout: its 1 replica will be restarted, because of deployments.Rollout.autoscaling_config"
    ]
