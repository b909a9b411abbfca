"""Names that must agree: gRPC services, applications, and the functions that Serve's proxy is told to call."""

import importlib
from pathlib import Path
from typing import Any

import grpc
import pytest
import yaml

from protos import critic_pb2, reference_pb2, reward_pb2, rollout_pb2
from services.common.proxy import _APPLICATIONS, _ForApplication
from services.critic.client import CriticClient
from services.reference.client import ReferenceClient
from services.reward.client import RewardClient
from services.rollout.client import RolloutClient

ROOT = Path(__file__).parents[2]
FILES = (rollout_pb2, reward_pb2, reference_pb2, critic_pb2)
CLIENTS = (RolloutClient, RewardClient, ReferenceClient, CriticClient)


def services() -> list[Any]:
    return [service for file in FILES for service in file.DESCRIPTOR.services_by_name.values()]


async def test_health_checks_and_clients_name_the_same_applications() -> None:
    assert sorted(_APPLICATIONS) == sorted(service.full_name for service in services())
    async with grpc.aio.insecure_channel("127.0.0.1:1") as channel:
        assert [client(channel).application for client in CLIENTS] == list(_APPLICATIONS.values())


def test_a_health_check_is_sent_to_the_application_it_names() -> None:
    class FakeContext:
        peer = "someone"

        def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
            return (("application", "other"), ("trace", "1"))

    context = _ForApplication(FakeContext(), "reward")
    assert context.invocation_metadata() == (("trace", "1"), ("application", "reward"))
    assert context.peer == "someone"


@pytest.mark.parametrize("path", sorted(ROOT.glob("deploy/*.yaml")), ids=lambda path: path.name)
def test_deployments_name_functions_and_applications_that_exist(path: Path) -> None:
    deployment = yaml.safe_load(path.read_text())
    assert {entry["name"] for entry in deployment["applications"]} == set(_APPLICATIONS.values())
    functions = deployment["grpc_options"]["grpc_servicer_functions"]
    assert len(functions) == len(FILES) + 1
    for function in functions:
        module, _, name = function.rpartition(".")
        assert callable(getattr(importlib.import_module(module), name))
