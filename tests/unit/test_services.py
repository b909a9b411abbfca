"""The check that the four services speak of the same tokens and take what will be sent."""

import re
from pathlib import Path
from typing import Any

import grpc
import pytest

from orchestrator.services import Infos, Services, check_compatible
from protos import common_pb2, critic_pb2, reference_pb2, reward_pb2, rollout_pb2
from services.common.config import ConfigError
from services.common.errors import Unavailable
from services.common.identity import tokenizer_hash
from tests.models import make_tokenizer
from tests.unit.fakes import make_config

# 16 + 32 tokens at most.
LENGTHS = {"data": {"path": "x", "max_prompt_length": 16}, "sampling": {"max_new_tokens": 32}}


def make_infos(**changes: dict[str, Any]) -> Infos:
    """Infos that fit; `changes` by service, or for the rollout info itself."""
    same: dict[str, Any] = {
        "path": "m",
        "tokenizer_hash": tokenizer_hash(make_tokenizer()),
        "max_length": 48,
        "dtype": "float32",
    }
    models = {
        name: common_pb2.ModelInfo(**same | changes.get(name, {}))
        for name in ("rollout", "reward", "reference", "critic")
    }
    return Infos(
        rollout_pb2.RolloutInfo(model=models["rollout"], weight_backend="gloo"),
        reward_pb2.RewardInfo(model=models["reward"]),
        reference_pb2.ReferenceInfo(model=models["reference"]),
        critic_pb2.CriticInfo(model=models["critic"]),
    )


def test_services_that_fit(policy_folder: Path) -> None:
    for backend in ("auto", "gloo"):
        config = make_config(policy_folder, **LENGTHS, weights={"backend": backend})
        check_compatible(make_infos(reward={"dtype": "bfloat16"}), make_tokenizer(), config)


@pytest.mark.parametrize("name", ["rollout", "reward", "reference", "critic"])
def test_another_tokenizer_and_too_short_a_model_are_named(name: str, policy_folder: Path) -> None:
    config = make_config(policy_folder, **LENGTHS)
    with pytest.raises(ConfigError, match=rf"^{name}: the tokenizer of other is not that of .*{policy_folder}"):
        check_compatible(make_infos(**{name: {"tokenizer_hash": "?", "path": "other"}}), make_tokenizer(), config)
    expected = (
        f"{name}: takes 47 tokens, but orchestrator.data.max_prompt_length + "
        "orchestrator.sampling.max_new_tokens is 48"
    )
    with pytest.raises(ConfigError, match=re.escape(expected)):
        check_compatible(make_infos(**{name: {"max_length": 47}}), make_tokenizer(), config)


def test_dtype_and_backend_must_be_the_rollout_services(policy_folder: Path) -> None:
    config = make_config(policy_folder, **LENGTHS)
    with pytest.raises(ConfigError, match=r"policy.dtype: float32, but the rollout service has bfloat16"):
        check_compatible(make_infos(rollout={"dtype": "bfloat16"}), make_tokenizer(), config)
    config = make_config(policy_folder, **LENGTHS, weights={"backend": "nccl"})
    expected = "orchestrator.weights.backend: nccl, but the rollout replicas were started with gloo"
    with pytest.raises(ConfigError, match=expected):
        check_compatible(make_infos(), make_tokenizer(), config)


def test_nccl_takes_one_sender(policy_folder: Path) -> None:
    policy = {"model": str(policy_folder), "optimizer": {"learning_rate": 1e-4}, "ranks": 2}
    config = make_config(policy_folder, **LENGTHS, weights={"senders": 2}, policy=policy)
    infos = make_infos()
    check_compatible(infos, make_tokenizer(), config)
    infos.rollout.weight_backend = "nccl"
    with pytest.raises(ConfigError, match=r"orchestrator.weights.senders: 2, but the rollout replicas .* nccl"):
        check_compatible(infos, make_tokenizer(), config)


class FakeClient:
    def __init__(self, answer: Any) -> None:
        self.answer, self.closed = answer, False
        self.timeouts: list[float] = []

    async def info(self, timeout_s: float) -> Any:
        self.timeouts.append(timeout_s)
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    async def close(self) -> None:
        self.closed = True


async def test_all_four_are_asked() -> None:
    wanted = make_infos()
    clients = [FakeClient(answer) for answer in (wanted.rollout, wanted.reward, wanted.reference, wanted.critic)]
    services = Services(*clients)  # type: ignore[arg-type]
    assert await services.infos(3) == wanted
    assert [client.timeouts for client in clients] == [[3]] * 4
    await services.close()
    assert clients[0].closed


async def test_one_that_is_not_there_is_an_error() -> None:
    clients = [FakeClient(Unavailable("reward.Info: gone"))] * 4
    with pytest.raises(ExceptionGroup) as caught:
        await Services(*clients).infos(3)  # type: ignore[arg-type]
    assert str(caught.value.exceptions[0]) == "reward.Info: gone"


async def test_one_channel_serves_all_clients() -> None:
    services = Services.connect("127.0.0.1:1")
    clients = (services.rollout, services.reward, services.reference, services.critic)
    assert len({id(client._channel) for client in clients}) == 1
    assert [client.application for client in clients] == ["rollout", "reward", "reference", "critic"]
    await services.close()


async def test_a_port_where_nobody_listens_is_named_with_the_command_that_helps() -> None:
    services = Services.connect("127.0.0.1:1")
    expected = (
        "nobody answers at 127.0.0.1:1 (orchestrator.target) within 0.3 s; are the services up? quartet up my.yaml"
    )
    with pytest.raises(Unavailable, match=re.escape(expected)):
        await services.reach("127.0.0.1:1", Path("my.yaml"), timeout_s=0.3)
    await services.close()


async def test_a_port_where_a_server_listens_is_reached() -> None:
    server = grpc.aio.server()
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    services = Services.connect(f"127.0.0.1:{port}")
    await services.reach("", Path("my.yaml"), timeout_s=30)
    await services.close()
    await server.stop(None)
