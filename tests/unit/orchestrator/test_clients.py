"""The check that the four services speak of the same tokens and take what will be sent."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest

from orchestrator.clients import Infos, Services, check_compatible
from protos import common_pb2, critic_pb2, reference_pb2, reward_pb2, rollout_pb2
from quartet.config.base import ConfigError
from quartet.config.learner import LoraConfig
from quartet.wire.callers import Purpose, declared
from quartet.wire.client import ServiceClient
from quartet.wire.errors import Unavailable
from quartet.wire.identity import model_hash, tokenizer_hash
from tests.models import WORDS, make_tokenizer
from tests.unit.fakes import make_config

# 16 + 32 tokens at most.
LENGTHS = {"data": {"path": "x", "max_prompt_length": 16}, "sampling": {"max_new_tokens": 32}}


def make_infos(**changes: dict[str, Any]) -> Infos:
    """Infos that fit; `changes` by service, or for the rollout info itself."""
    same: dict[str, Any] = {
        "name": "m",
        "tokenizer_hash": tokenizer_hash(make_tokenizer()),
        "max_length": 48,
        "vocab_size": len(WORDS),
        "dtype": "float32",
    }
    models = {
        name: common_pb2.ModelInfo(**same | changes.get(name, {}))
        for name in ("rollout", "reward", "reference", "critic")
    }
    return Infos(
        rollout_pb2.RolloutInfo(model=models["rollout"], weight_backend="gloo", adapter_versions=1),
        reward_pb2.ScorerInfo(model=models["reward"]),
        reference_pb2.ReferenceInfo(model=models["reference"]),
        critic_pb2.CriticInfo(model=models["critic"]),
    )


def test_services_that_fit(policy_folder: Path) -> None:
    for backend in ("auto", "gloo"):
        config = make_config(policy_folder, **LENGTHS, weights={"backend": backend})
        check_compatible(make_infos(reward={"dtype": "bfloat16"}), make_tokenizer(), config)


def test_scores_without_a_weight_and_weights_without_a_score_are_named(policy_folder: Path) -> None:
    algorithm = {"minibatch_size": 1, "rewards": {"right": {}}}
    config = make_config(policy_folder, **LENGTHS, algorithm=algorithm)
    infos = make_infos()
    infos.reward.identity.MergeFrom(reward_pb2.ScorerIdentity(name="function:a:b", names=["right", "brief"]))
    with pytest.raises(
        ConfigError, match=r"rewards: lacks brief, as the reward service's function:a:b gives right, "
    ):
        check_compatible(infos, make_tokenizer(), config)
    del infos.reward.identity.names[:]
    with pytest.raises(
        ConfigError, match=r"rewards: has right, but .* gives one score without a name; leave out what"
    ):
        check_compatible(infos, make_tokenizer(), config)
    infos.reward.identity.names.append("right")
    check_compatible(infos, make_tokenizer(), config)


@pytest.mark.parametrize("name", ["rollout", "reward", "reference", "critic"])
def test_another_tokenizer_and_too_short_a_model_are_named(name: str, policy_folder: Path) -> None:
    config = make_config(policy_folder, **LENGTHS)
    with pytest.raises(ConfigError, match=rf"^{name}: the tokenizer of other is not that of .*{policy_folder}"):
        check_compatible(make_infos(**{name: {"tokenizer_hash": "?", "name": "other"}}), make_tokenizer(), config)
    with pytest.raises(
        ConfigError, match=rf"^{name}: m has 63 entries in its vocabulary, .* ids up to 63; resize .*s$"
    ):
        check_compatible(make_infos(**{name: {"vocab_size": 63}}), make_tokenizer(), config)
    check_compatible(make_infos(**{name: {"vocab_size": 96}}), make_tokenizer(), config)
    expected = (
        f"{name}: as it is deployed it takes 47 tokens, but orchestrator.data.max_prompt_length + "
        "orchestrator.sampling.max_new_tokens is 48"
    )
    with pytest.raises(ConfigError, match=re.escape(expected)):
        check_compatible(make_infos(**{name: {"max_length": 47}}), make_tokenizer(), config)


def test_dtype_and_backend_must_be_the_rollout_services(policy_folder: Path) -> None:
    config = make_config(policy_folder, **LENGTHS)
    with pytest.raises(
        ConfigError, match=r"^the rollout service's dtype: bfloat16, but orchestrator.policy.dtype is f"
    ):
        check_compatible(make_infos(rollout={"dtype": "bfloat16"}), make_tokenizer(), config)
    config = make_config(policy_folder, **LENGTHS, weights={"backend": "nccl"})
    expected = (
        "orchestrator.weights.backend: nccl, but the rollout replicas' weight_backend is gloo; set both the "
        "same, or one to auto"
    )
    with pytest.raises(ConfigError, match=expected):
        check_compatible(make_infos(), make_tokenizer(), config)


def test_adapters_are_pushed_to_replicas_of_the_same_model(policy_folder: Path) -> None:
    config = make_config(policy_folder, **LENGTHS)
    adapted = config.model_copy(
        update={
            "policy": config.policy.model_copy(update={"lora": LoraConfig(rank=2)}),
            "weights": config.weights.model_copy(update={"adapters": True}),
        }
    )
    same = {"rollout": {"model_hash": model_hash(policy_folder)}}
    check_compatible(make_infos(**same), make_tokenizer(), adapted)
    with pytest.raises(ConfigError, match=r"^rollout: m has other weights than orchestrator.policy.model \("):
        check_compatible(make_infos(rollout={"model_hash": "?"}), make_tokenizer(), adapted)
    finishing = adapted.model_copy(
        update={
            "weights": adapted.weights.model_copy(update={"in_flight": "finish"}),
            "loop": adapted.loop.model_copy(update={"max_staleness": 2}),
        }
    )
    infos = make_infos(**same)
    for kept in (1, 2, 4):
        infos.rollout.adapter_versions = kept
        with pytest.raises(ConfigError, match=f"replicas have adapter_versions {kept}, but the run needs 3"):
            check_compatible(infos, make_tokenizer(), finishing)
    infos.rollout.adapter_versions = 3
    check_compatible(infos, make_tokenizer(), finishing)
    with pytest.raises(ConfigError, match=r"adapter_versions 3, but the run needs 1 \("):
        check_compatible(infos, make_tokenizer(), adapted)
    # All weights are pushed, whatever the replicas began with.
    check_compatible(make_infos(rollout={"model_hash": "?"}), make_tokenizer(), config)


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


def clients_of(services: Services) -> list[ServiceClient[Any]]:
    assert services.reference is not None
    assert services.critic is not None
    return [services.rollout, services.reward, services.reference, services.critic]


async def test_all_four_are_asked() -> None:
    wanted = make_infos()
    clients = [FakeClient(answer) for answer in (wanted.rollout, wanted.reward, wanted.reference, wanted.critic)]
    services = Services(*clients)  # type: ignore[arg-type]
    assert await services.infos(3) == wanted
    assert [client.timeouts for client in clients] == [[3]] * 4
    await services.close()
    assert all(client.closed for client in clients)


async def test_a_run_without_a_critic_connects_to_none(policy_folder: Path) -> None:
    algorithm = {"minibatch_size": 1, "kind": "reinforce++"}
    services = Services.connect(make_config(policy_folder, algorithm=algorithm, services={"critic": None}))
    assert (services.critic, services.leased) == (None, (services.rollout,))
    wanted = replace(make_infos(), critic=None)
    clients = [FakeClient(answer) for answer in (wanted.rollout, wanted.reward, wanted.reference)]
    every: list[Any] = [*clients, None]
    asked = Services(*every)
    assert await asked.infos(3) == wanted
    assert list(wanted.models) == ["rollout", "reward", "reference"]
    await services.close()


async def test_one_that_is_not_there_is_an_error() -> None:
    clients = [FakeClient(Unavailable("reward.Info: gone"))] * 4
    with pytest.raises(ExceptionGroup) as caught:
        await Services(*clients).infos(3)  # type: ignore[arg-type]
    assert str(caught.value.exceptions[0]) == "reward.Info: gone"


async def test_one_channel_serves_all_clients(policy_folder: Path) -> None:
    services = Services.connect(make_config(policy_folder, name="demo", target="127.0.0.1:1"))
    clients = clients_of(services)
    assert len({id(client._channel) for client in clients}) == 1
    assert [client.application for client in clients] == ["rollout", "reward", "reference", "critic"]
    # Whose calls they are and what for, for fair shares.
    said = (("quartet-run", "demo"), ("quartet-purpose", "training"))
    assert [client._metadata[1:] for client in clients] == [said] * 4
    await services.close()


async def test_a_service_may_be_elsewhere_under_another_name(policy_folder: Path) -> None:
    elsewhere = {
        "reward": {"target": "b:2", "application": "judge", "scorer": "taste"},
        "reference": {"application": "frozen"},
    }
    services = Services.connect(make_config(policy_folder, target="a:1", services=elsewhere))
    clients = clients_of(services)
    assert [client.application for client in clients] == ["rollout", "judge", "frozen", "critic"]
    assert services.reward.scorer == services.declaring("demo", Purpose.EVALUATION).reward.scorer == "taste"
    rollout, reward, reference, critic = (client._channel for client in clients)
    assert rollout is reference is critic
    assert reward is not rollout
    await services.close()


async def test_calls_say_in_whose_name_and_what_for(policy_folder: Path) -> None:
    services = Services.connect(make_config(policy_folder, name="demo", target="127.0.0.1:1"))
    other = services.declaring("demo", Purpose.EVALUATION)
    assert services.reward._metadata == (("application", "reward"), *declared("demo", Purpose.TRAINING))
    assert other.reward._metadata == (("application", "reward"), *declared("demo", Purpose.EVALUATION))
    assert other.reward._channel is services.reward._channel
    await services.close()


async def test_a_target_of_its_own_where_nothing_listens_is_named_by_its_key(policy_folder: Path) -> None:
    server = grpc.aio.server()
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    elsewhere = {"reward": {"target": "127.0.0.1:1"}}
    config = make_config(policy_folder, target=f"127.0.0.1:{port}", services=elsewhere, timeouts={"info_s": 1.5})
    services = Services.connect(config)
    expected = "no answer at 127.0.0.1:1 (orchestrator.services.reward.target) within 1.5 s"
    with pytest.raises(Unavailable, match=re.escape(expected)):
        await services.reach(config, Path("my.yaml"))
    await services.close()
    await server.stop(None)


@pytest.mark.parametrize(
    ("address", "used", "helps"),
    [
        (None, True, "`quartet up my.yaml` starts them"),
        (
            None,
            False,
            "`quartet up my.yaml` starts them on this machine; on a Ray cluster of your own `serve status`",
        ),
        (
            "auto",
            True,
            "`serve status` shows them, `serve deploy my.yaml` starts them (of a file of facts, what `quartet ",
        ),
    ],
)
async def test_a_port_where_nothing_listens_is_named_with_the_command_that_helps(
    policy_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    address: str | None,
    used: bool,
    helps: str,
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    if address:
        monkeypatch.setenv("RAY_ADDRESS", address)
    monkeypatch.chdir(tmp_path)
    if used:
        (tmp_path / ".quartet").mkdir()
    config = make_config(policy_folder, target="127.0.0.1:1", timeouts={"info_s": 0.3})
    services = Services.connect(config)
    expected = f"no answer at 127.0.0.1:1 (orchestrator.target) within 0.3 s; are the services up? {helps}"
    with pytest.raises(Unavailable, match=re.escape(expected)):
        await services.reach(config, Path("my.yaml"))
    await services.close()


async def test_a_port_where_a_server_listens_is_reached(policy_folder: Path) -> None:
    server = grpc.aio.server()
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    config = make_config(policy_folder, target=f"127.0.0.1:{port}")
    services = Services.connect(config)
    await services.reach(config, Path("my.yaml"))
    await services.close()
    await server.stop(None)


def test_the_reference_computes_in_the_policys_precision_unless_the_penalty_is_0(policy_folder: Path) -> None:
    infos = make_infos(reference={"dtype": "bfloat16"})
    with pytest.raises(ConfigError, match=r"^the reference service's dtype: bfloat16, but orchestrator.policy.dtype"):
        check_compatible(infos, make_tokenizer(), make_config(policy_folder, **LENGTHS))
    free = make_config(policy_folder, **LENGTHS, algorithm={"kl": {"coef": 0.0}, "minibatch_size": 1})
    check_compatible(infos, make_tokenizer(), free)
