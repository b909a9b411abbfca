"""Changes of a section for which Serve replaces replicas: each key of its schema, compared with Serve's own code."""

from collections.abc import Mapping
from typing import Any

import pytest
from ray.serve._private.application_state import override_deployment_info
from ray.serve._private.config import DeploymentConfig, ReplicaConfig
from ray.serve._private.deploy_utils import get_app_code_version
from ray.serve._private.deployment_info import DeploymentInfo
from ray.serve._private.deployment_state import DeploymentTargetState
from ray.serve._private.version import DeploymentVersion
from ray.serve.schema import DeploymentSchema, ServeApplicationSchema

from quartet.config.restarts import restarting

BASE: dict[str, Any] = {
    "name": "rollout",
    "route_prefix": "/rollout",
    "import_path": "services.rollout.replica:build",
    "runtime_env": {"env_vars": {"OMP_NUM_THREADS": "1"}},
    "args": {"model": "a", "sizes": {"long": 1}},
    "deployments": [{"name": "Rollout", "num_replicas": 1, "ray_actor_options": {"num_cpus": 1}}],
}
APPLICATION: dict[str, tuple[Any, list[str]]] = {
    "route_prefix": ("/other", []),
    "import_path": ("elsewhere:build", ["import_path"]),
    "runtime_env": ({"env_vars": {"OMP_NUM_THREADS": "2"}}, ["runtime_env.env_vars.OMP_NUM_THREADS"]),
    "host": ("127.0.0.2", []),
    "port": (8001, []),
    "autoscaling_policy": ({"policy_function": "a:b"}, ["autoscaling_policy"]),
    "args": ({"model": "a", "sizes": {"long": 1.0}, "more": None}, ["args.sizes.long", "args.more"]),
    "logging_config": ({"log_level": "DEBUG"}, []),
    "external_scaler_enabled": (True, []),
}
"""Key of an application -> another value, and the keys that are named."""
DEPLOYMENT: dict[str, tuple[Any, list[str]]] = {
    "num_replicas": (2, []),
    "max_ongoing_requests": (7, []),
    "max_queued_requests": (7, []),
    "backpressure_config": ({"status_code": 429}, []),
    "user_config": ({"a": 1}, []),
    "graceful_shutdown_wait_loop_s": (3.0, []),
    "graceful_shutdown_timeout_s": (3.0, []),
    "health_check_period_s": (3.0, []),
    "health_check_timeout_s": (3.0, []),
    "ray_actor_options": ({"num_cpus": 2}, ["ray_actor_options.num_cpus"]),
    "placement_group_bundles": ([{"CPU": 1}], ["placement_group_bundles"]),
    "max_replicas_per_node": (3, ["max_replicas_per_node"]),
    "logging_config": ({"log_level": "DEBUG"}, []),
    "request_router_config": ({"request_routing_stats_period_s": 5.0}, ["request_router_config"]),
    "gang_scheduling_config": ({"gang_size": 1}, ["gang_scheduling_config"]),
    "deployment_actors": ([{"name": "a", "actor_class": "a:b"}], ["deployment_actors"]),
    "rolling_update_percentage": (0.5, []),
    "max_surge_percent": (50, []),
}
"""Key of a deployment -> another value, and the keys that are named."""
GROUP = {"placement_group_bundles": [{"CPU": 1}]}
DEPLOYMENT_IN_GROUP: dict[str, tuple[Any, list[str]]] = {
    "placement_group_strategy": ("SPREAD", ["placement_group_strategy"]),
    "placement_group_bundle_label_selector": ([{"a": "b"}], ["placement_group_bundle_label_selector"]),
}
"""The same for keys that Serve takes beside GROUP only."""


class Replica:
    """Stands for the deployment's class."""


def version(section: Mapping[str, Any]) -> DeploymentVersion:
    """The version that Serve gives the deployment of this section."""
    config = ServeApplicationSchema.model_validate(section)
    code = DeploymentInfo(DeploymentConfig(), ReplicaConfig.create(Replica), 0, "job", version="code")
    # What names code of a user is imported by Serve before this, and so is not at hand here.
    entries = [entry.model_copy(update={"deployment_actors": None}) for entry in config.deployments]
    [info] = override_deployment_info({"Rollout": code}, config.model_copy(update={"deployments": entries})).values()
    info.version = get_app_code_version(config)
    state = DeploymentTargetState.create(info, 1)
    assert state.version is not None
    return state.version


def replaced(before: Mapping[str, Any], after: Mapping[str, Any]) -> bool:
    """True if Serve replaces the replicas."""
    return bool(version(before).requires_actor_restart(version(after)))


def deployed(**entry: Any) -> dict[str, Any]:
    """BASE with these keys of its deployment."""
    [first] = BASE["deployments"]
    return BASE | {"deployments": [{k: v for k, v in (first | entry).items() if v is not None}]}


@pytest.mark.parametrize("key", APPLICATION)
def test_keys_of_an_application(key: str) -> None:
    value, named = APPLICATION[key]
    after = BASE | {key: value}
    assert restarting(BASE, after) == named
    assert replaced(BASE, after) == bool(named)


@pytest.mark.parametrize("key", [*DEPLOYMENT, *DEPLOYMENT_IN_GROUP])
def test_keys_of_a_deployment(key: str) -> None:
    value, named = (DEPLOYMENT | DEPLOYMENT_IN_GROUP)[key]
    first = deployed(**GROUP) if key in DEPLOYMENT_IN_GROUP else BASE
    after = deployed(**GROUP, **{key: value}) if key in DEPLOYMENT_IN_GROUP else deployed(**{key: value})
    assert restarting(first, after) == [f"deployments.Rollout.{name}" for name in named]
    assert replaced(first, after) == bool(named)


def test_every_key_of_serve_is_compared() -> None:
    """Fails if Serve takes keys that are not known here, whose changes might then be told wrongly."""
    assert set(APPLICATION) == set(ServeApplicationSchema.model_fields) - {"name", "deployments"}
    keys = {*DEPLOYMENT, *DEPLOYMENT_IN_GROUP, "autoscaling_config"}
    assert keys == set(DeploymentSchema.model_fields) - {"name"}


@pytest.mark.parametrize(
    ("before", "after", "named"),
    [
        ({"num_replicas": 1}, {"num_replicas": None, "autoscaling_config": {"max_replicas": 2}}, [""]),
        ({"num_replicas": None, "autoscaling_config": {"max_replicas": 2}}, {"num_replicas": 1}, [""]),
        ({"num_replicas": 1}, {"num_replicas": "auto"}, []),
        ({"num_replicas": None, "autoscaling_config": {}}, {"num_replicas": "auto", "autoscaling_config": {}}, []),
    ],
)
def test_the_first_autoscaling_config_replaces_replicas(
    before: dict[str, Any], after: dict[str, Any], named: list[str]
) -> None:
    keys = [f"deployments.Rollout.autoscaling_config{name}" for name in named]
    assert restarting(deployed(**before), deployed(**after)) == keys
    assert replaced(deployed(**before), deployed(**after)) == bool(keys)


def test_values_of_an_autoscaling_config_replace_none_but_its_policy_does() -> None:
    first: dict[str, Any] = {"num_replicas": None, "autoscaling_config": {"min_replicas": 1, "max_replicas": 1}}
    values = {
        "min_replicas": 2,
        "max_replicas": 5,
        "initial_replicas": 3,
        "target_ongoing_requests": 1.5,
        "look_back_period_s": 60.0,
        "upscale_delay_s": 90.0,
        "downscale_delay_s": 900.0,
        "aggregation_function": "max",
    }
    scaled = first | {"autoscaling_config": values}
    assert restarting(deployed(**first), deployed(**scaled)) == []
    assert not replaced(deployed(**first), deployed(**scaled))
    policy = first | {"autoscaling_config": values | {"policy": {"policy_function": "json:dumps"}}}
    assert restarting(deployed(**first), deployed(**policy)) == ["deployments.Rollout.autoscaling_config.policy"]
    assert replaced(deployed(**first), deployed(**policy))


def test_what_a_section_leaves_out_is_no_change() -> None:
    """Serve's defaults, written down or not."""
    spare: dict[str, Any] = {"import_path": "a:b", "deployments": [{"name": "Rollout"}]}
    full = spare | {"runtime_env": {}, "args": {}, "autoscaling_policy": None}
    assert restarting(spare, full) == []
    assert not replaced(spare, full)
    one = spare | {"deployments": [{"name": "Rollout", "ray_actor_options": {"num_cpus": 1}}]}
    assert bool(restarting(spare, one)) == replaced(spare, one)
