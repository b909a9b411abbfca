"""The services' and Serve's sections: what Serve would pass over in silence, or refuse once everything starts."""

import importlib
import re
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import yaml
from ray.serve.schema import ServeApplicationSchema, ServeDeploySchema

from orchestrator.deployment.applications import SERVICES, failure_of, hindrance, status_of
from orchestrator.deployment.file import SERVE_KEYS, Deployment
from quartet.config.base import ConfigError
from quartet.config.serve import DEFAULT_ROUTE
from quartet.security.port import GUARD
from services.reward.config import RewardConfig
from services.rollout.config import RolloutConfig
from tests.gpu_requests import DEPLOY, placed

Change = Callable[[Any], Any]


@pytest.fixture
def raw(tmp_path: Path) -> dict[str, Any]:
    """deploy/ppo.yaml with model folders that exist."""
    (tmp_path / "config.json").write_text("{}")
    text = placed((DEPLOY / "ppo.yaml").read_text(), tmp_path, tmp_path)
    loaded: dict[str, Any] = deepcopy(yaml.safe_load(text))
    return loaded


def problems(raw: dict[str, Any], folder: Path) -> list[str]:
    path = folder / "a.yaml"
    path.write_text(yaml.safe_dump(raw))
    with pytest.raises(ConfigError) as caught:
        Deployment.load(path, check_services=True)
    return str(caught.value).replace(f"{path}: ", "").splitlines()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"num_replica": 2},
            ".num_replica: unknown field; known: autoscaling_config, [^;]*; did you mean num_replicas?",
        ),
        ({"autoscaling_config": None, "num_replicas": 0}, ".num_replicas: should be more than 0, got 0"),
        (
            {"autoscaling_config": None, "num_replicas": "many"},
            ': `num_replicas` must be an int or "auto", but got: many',
        ),
        (
            {"ray_actor_options": {"num_cpu": 1}},
            ".ray_actor_options.num_cpu: unknown field; [^;]*; did you mean num_cpus?",
        ),
        (
            {"autoscaling_config": {"min_replicas": 3, "max_replicas": 1}},
            ".autoscaling_config: max_replicas (1) must be greater than or equal to min_replicas (3)!",
        ),
        (
            {"autoscaling_config": {"max_replica": 3}},
            ".autoscaling_config.max_replica: unknown field; known: [^;]*; did you mean max_replicas?",
        ),
    ],
)
def test_settings_of_a_deployment_that_cannot_be(
    raw: dict[str, Any], values: dict[str, Any], message: str, tmp_path: Path
) -> None:
    raw["applications"][0]["deployments"][0] |= values
    (line,) = problems(raw, tmp_path)
    pattern = re.escape(f"applications.rollout.deployments.Rollout{message}").replace(re.escape("[^;]*"), "[^;]*")
    assert re.fullmatch(pattern, line)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda a: a[0].update(rout_prefix="/"), "applications.rollout.rout_prefix: unknown field; known: "),
        (
            lambda a: a[0].update(import_path=3),
            "applications.rollout.import_path: should be text, got 3; put it in quotes",
        ),
        (lambda a: a[0].pop("import_path"), "applications.rollout.import_path: required"),
        (lambda a: a[0].update(deployments=None), "applications.rollout.deployments: should be a list, got null"),
        (lambda a: a[0].update(runtime_env=None), "applications.rollout.runtime_env: should be a mapping, got null"),
        (
            lambda a: a[1].update(route_prefix="/rollout"),
            "applications.reward.route_prefix: /rollout, as of rollout; give each application its own, ",
        ),
        (
            lambda a: (a[0].pop("route_prefix"), a[1].pop("route_prefix")),
            "applications.reward.route_prefix: left out, which is /, as of rollout; give each application its own, ",
        ),
        (
            lambda a: a[0].update(route_prefix=None),
            "applications.rollout.route_prefix: should be a path, such as /rollout, got null; without one ",
        ),
        (
            lambda a: a[0]["deployments"][0].update(autoscaling_config={"min_replicas": 0, "max_replicas": 2}),
            "applications.rollout.deployments.Rollout.autoscaling_config.min_replicas: should be 1 or more, got 0; ",
        ),
        (
            lambda a: a[0].update(runtime_env={"env_vars": {"OMP_NUM_THREADS": 1}}),
            "applications.rollout.runtime_env.env_vars.OMP_NUM_THREADS: should be text, got 1; put it in quotes",
        ),
        (
            lambda a: a[0].update(deployments=["Rollout"]),
            "applications.rollout.deployments.0: should be a mapping of fields to values, got 'Rollout'",
        ),
        (lambda a: a[0].pop("name"), "applications.0.name: required\napplications: none is named rollout"),
        (lambda a: a.append(a[0]), "applications: more than one is named rollout"),
        (
            lambda a: a[0]["deployments"][0].update(name="Rollouts"),
            "applications.rollout.deployments.Rollouts: no such deployment; the only one here is Rollout",
        ),
        (lambda a: a[0]["deployments"][0].pop("name"), "applications.rollout.deployments.0.name: required"),
        (
            lambda a: a[0]["deployments"].append(deepcopy(a[0]["deployments"][0])),
            "applications.rollout.deployments: should hold Rollout once",
        ),
        (
            lambda a: a[3]["deployments"][0].update(num_replicas=2),
            "applications.critic.deployments.Critic.num_replicas: should be 1, got 2; its weights are trained, in",
        ),
        (
            lambda a: a[3]["deployments"][0].update(num_replicas="auto"),
            "applications.critic.deployments.Critic.num_replicas: should be 1, got 'auto'",
        ),
        (
            lambda a: a[3]["deployments"][0].update(num_replicas=None, autoscaling_config={"max_replicas": 2}),
            "applications.critic.deployments.Critic.autoscaling_config: should be left out; its weights are trained",
        ),
    ],
)
def test_applications_that_cannot_be(raw: dict[str, Any], change: Change, message: str, tmp_path: Path) -> None:
    change(raw["applications"])
    said = problems(raw, tmp_path)
    assert "\n".join(said).startswith(message)
    assert len(said) == message.count("\n") + 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda raw: raw.update(proxy_location="here"),
            "proxy_location: should be 'Disabled', 'HeadOnly' or 'EveryNode'",
        ),
        (
            lambda raw: raw.update(http_options=None),
            "http_options: should be a mapping of fields to values, got null",
        ),
        (lambda raw: raw["http_options"].update(prt=1), "http_options.prt: unknown field; known: "),
        (
            lambda raw: raw["http_options"].update(port=True),
            "http_options.port: should be a port from 1 to 65535, got true",
        ),
        (
            lambda raw: raw["grpc_options"].update(port=65536),
            "grpc_options.port: should be a port from 1 to 65535, got 65536",
        ),
        (
            lambda raw: raw["grpc_options"].update(port="19000"),
            "grpc_options.port: should be a port from 1 to 65535, got '19000'",
        ),
        (
            lambda raw: raw["grpc_options"].update(port=18000),
            "http_options.port and grpc_options.port: should differ, got 18000, 18000",
        ),
        (
            lambda raw: raw["grpc_options"].update(grpc_servicer_functions="f"),
            "grpc_options.grpc_servicer_functions: should be a list, got 'f'",
        ),
        (lambda raw: raw.update(orchestrater={}), "orchestrater: unknown section; known: "),
    ],
)
def test_sections_of_serve_that_cannot_be(raw: dict[str, Any], change: Change, message: str, tmp_path: Path) -> None:
    change(raw)
    (line,) = problems(raw, tmp_path)
    assert line.startswith(message)


FUNCTIONS = r"grpc_options\.grpc_servicer_functions: should"


def functions(raw: dict[str, Any]) -> list[str]:
    given: list[str] = raw["grpc_options"]["grpc_servicer_functions"]
    return given


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda raw: raw["http_options"].pop("host"), "http_options.host: should be 127.0.0.1, .*every address"),
        (lambda raw: raw.pop("http_options"), "http_options.host: should be 127.0.0.1, .*every address"),
        (lambda raw: raw["http_options"].update(host="0.0.0.0"), "http_options.host: .*; got '0.0.0.0'"),
        (lambda raw: raw["http_options"].update(host="10.0.0.5"), "http_options.host: .*; got '10.0.0.5'"),
        (
            lambda raw: functions(raw).pop(0),
            f"{FUNCTIONS} begin with {GUARD}, .*; the first is protos.rollout_pb2_grpc",
        ),
        (lambda raw: functions(raw).append(functions(raw).pop(0)), f"{FUNCTIONS} begin with {GUARD}, .*"),
        (
            lambda raw: functions(raw).pop(4),
            f"{FUNCTIONS} hold protos.critic_pb2_grpc.*",
        ),
        (
            lambda raw: (
                raw["applications"].append(raw["applications"][1] | {"name": "judge", "route_prefix": "/j"})
                or functions(raw).pop(2)
            ),
            f"{FUNCTIONS} hold protos.reward_pb2_grpc.*application reward\n{FUNCTIONS} hold .*application judge",
        ),
    ],
)
def test_a_file_whose_port_would_be_unguarded_or_dead_is_refused(
    raw: dict[str, Any], change: Change, message: str, tmp_path: Path
) -> None:
    change(raw)
    assert re.fullmatch(f"{message}.*", "\n".join(problems(raw, tmp_path)))


@pytest.mark.parametrize(
    "change", [lambda raw: raw["grpc_options"].pop("grpc_servicer_functions"), lambda raw: functions(raw).clear()]
)
def test_a_file_without_functions_lacks_the_guard_and_each_service(
    raw: dict[str, Any], change: Change, tmp_path: Path
) -> None:
    change(raw)
    first, *others = problems(raw, tmp_path)
    assert re.fullmatch(f"{FUNCTIONS} begin with {GUARD}, .*; it is empty", first)
    assert len(others) == len(SERVICES)


def test_functions_may_be_given_in_serves_other_form(raw: dict[str, Any], tmp_path: Path) -> None:
    given = functions(raw)
    given[:] = [":".join(function.rsplit(".", 1)) for function in given]
    raw["http_options"]["host"] = "localhost"
    (tmp_path / "a.yaml").write_text(yaml.safe_dump(raw))
    assert set(Deployment.load(tmp_path / "a.yaml", check_services=True).services) == set(SERVICES)


def test_rollout_replicas_may_scale_by_themselves(raw: dict[str, Any], tmp_path: Path) -> None:
    deployment = raw["applications"][0]["deployments"][0]
    deployment["autoscaling_config"] = {"min_replicas": 1, "max_replicas": 4}
    (tmp_path / "a.yaml").write_text(yaml.safe_dump(raw))
    loaded = Deployment.load(tmp_path / "a.yaml", check_services=True)
    assert set(loaded.services) == set(SERVICES)


def test_a_service_at_a_target_of_its_own_need_not_be_in_the_file(raw: dict[str, Any], tmp_path: Path) -> None:
    raw["applications"] = [entry for entry in raw["applications"] if entry["name"] != "reward"]
    assert problems(raw, tmp_path) == ["applications: none is named reward"]
    raw["orchestrator"]["services"] = {"reward": {"application": "judge"}}
    assert problems(raw, tmp_path) == ["applications: none is named judge"]
    raw["orchestrator"]["services"] = {"reward": {"target": "elsewhere:19000", "application": "judge"}}
    (tmp_path / "a.yaml").write_text(yaml.safe_dump(raw))
    loaded = Deployment.load(tmp_path / "a.yaml", check_services=True)
    assert set(loaded.services) == {"rollout", "reference", "critic"}
    assert loaded.orchestrator.services.reward.application == "judge"


def test_a_service_whose_model_is_on_another_machine_is_left_out(raw: dict[str, Any], tmp_path: Path) -> None:
    raw["applications"][0]["args"]["model"] = "/no/such/folder"
    (tmp_path / "a.yaml").write_text(yaml.safe_dump(raw))
    loaded = Deployment.load(tmp_path / "a.yaml")
    assert set(loaded.services) == {"reward", "reference", "critic"}
    assert isinstance(loaded.services["reward"], RewardConfig)


@pytest.mark.parametrize("name", SERVICES)
def test_what_is_known_of_a_service_is_true(name: str) -> None:
    service = SERVICES[name]
    module, _, build = service.import_path.partition(":")
    replica = importlib.import_module(module)
    assert getattr(replica, service.deployment).name == service.deployment
    assert callable(getattr(replica, build))
    assert RolloutConfig is SERVICES["rollout"].config


def test_a_route_that_is_left_out_is_the_default_of_serve() -> None:
    assert ServeApplicationSchema.model_fields["route_prefix"].default == DEFAULT_ROUTE


def test_the_sections_are_those_of_serve() -> None:
    assert set(ServeDeploySchema.model_fields) == SERVE_KEYS


CONSTRUCTOR = """The deployment failed to start 3 times in a row. This may be due to its constructor. Error:
\x1b[36mray::ServeReplica:rollout:Rollout.initialize_and_get_metadata()\x1b[39m (pid=5, ip=127.0.0.1)
  File "/usr/lib/python3.11/concurrent/futures/_base.py", line 449, in result
    return self.__get_result()
           ^^^^^^^^^^^^^^^^^^^
RuntimeError: Traceback (most recent call last):
  File "/site-packages/ray/serve/_private/replica.py", line 1018, in initialize
    await self._user_callable_asgi_app
  File "/src/services/rollout/vllm/arguments.py", line 27, in engine_args
    raise ConfigError(
"""


@pytest.mark.parametrize(
    ("error", "shown"),
    [
        ("quartet.config.base.ConfigError: a.b: required\na.c: required\n", "a.b: required\na.c: required"),
        ("torch.OutOfMemoryError: CUDA out of memory\n", "OutOfMemoryError: CUDA out of memory"),
        ("KeyError: 'x'\n", "KeyError: 'x'"),
        (
            "pydantic_core._pydantic_core.ValidationError: 1 error\n  Value error, too small\n    see https://a.b\n",
            "ValidationError: 1 error\n  Value error, too small\n    see https://a.b",
        ),
    ],
)
def test_of_a_failure_the_error_is_shown_and_not_the_traceback(error: str, shown: str) -> None:
    deployments = {"Rollout": {"status": "DEPLOY_FAILED", "message": CONSTRUCTOR + error}}
    assert failure_of({"status": "DEPLOY_FAILED", "message": "", "deployments": deployments}) == shown
    twice = {"status": "DEPLOY_FAILED", "message": CONSTRUCTOR + error, "deployments": deployments}
    assert failure_of(twice) == shown


def test_a_failure_without_a_traceback_is_shown_whole_and_one_without_words_by_its_state() -> None:
    assert failure_of({"status": "DEPLOY_FAILED", "message": "Failed to import it.\nNo module"}) == (
        "Failed to import it.\nNo module"
    )
    assert failure_of({"status": "UNHEALTHY"}) == "UNHEALTHY"


def test_what_hinders_an_application_is_said_in_one_short_line() -> None:
    assert hindrance(None) == hindrance({"status": "DEPLOYING", "message": ""}) == ""
    deployments = {"Reward": {"message": "1 replica takes long.\n  It waits for a GPU."}}
    assert hindrance({"status": "DEPLOYING", "deployments": deployments}) == (
        "1 replica takes long. It waits for a GPU."
    )
    assert len(hindrance({"message": "word " * 500})) < 420
    # Every model that takes longer than Serve's half a minute would repeat this at each look.
    loads = "Deployment 'R' in application 'r' has 1 replicas that have taken more than 30s to {}. This may be"
    slow = {"Rollout": {"message": loads.format("initialize")}, "Other": {"message": loads.format("be scheduled")}}
    assert hindrance({"status": "DEPLOYING", "deployments": slow}) == loads.format("be scheduled")


@pytest.mark.parametrize(
    ("status", "replicas", "said"),
    [
        ("DEPLOYING", [], "starting"),
        ("DEPLOYING", ["RUNNING", "STARTING"], "1 of 2 replicas ready"),
        ("UNHEALTHY", ["STARTING"], "UNHEALTHY, 0 of 1 replicas ready"),
        ("RUNNING", ["RUNNING"], "RUNNING"),
    ],
)
def test_the_state_of_an_application_in_words(status: str, replicas: list[str], said: str) -> None:
    deployments = {"Reward": {"replicas": [{"state": state} for state in replicas]}}
    assert status_of({"status": status, "deployments": deployments}) == said
    assert status_of(None) == "not deployed yet"
