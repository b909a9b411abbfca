"""The front door under a policy, with TLS, on Serve's own server class: who gets in, and what they may do."""

from collections.abc import Collection
from pathlib import Path

import grpc
import pytest
import yaml
from cryptography import x509
from cryptography.x509.oid import ExtendedKeyUsageOID
from grpc import StatusCode
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2
from ray.serve.generated import serve_pb2, serve_pb2_grpc

from quartet.security.credentials import VARIABLE, connect
from quartet.security.identity import Caller
from quartet.security.keys.certificates import Authority
from quartet.security.keys.folder import Keys
from quartet.security.port import Port
from tests.unit.front_door import CALLERS, ask, channel_of, edit_identity, front_door, made_keys, outcome

ALL = (
    *("Rollout/Generate", "Rollout/UpdateWeights", "Rollout/Info", "Reward/Score", "Reward/Info"),
    *("Reference/Logprobs", "Reference/Info", "Critic/Values", "Critic/Train", "Critic/Save", "Critic/Info"),
)
ALLOWED = {
    "run-a": set(ALL),
    "client": {"Rollout/Generate", "Rollout/Info"},
    "evaluator": {"Reward/Score", "Reward/Info", "Reference/Logprobs", "Reference/Info"},
    "pager": {"Rollout/Info", "Reward/Info", "Reference/Info", "Critic/Info"},
}


@pytest.fixture(scope="module", params=["certificates", "tokens"])
def keys(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Keys:
    made = made_keys(tmp_path_factory.mktemp(request.param) / "keys", tokens=request.param == "tokens", days=30)
    return made


def stranger(keys: Keys, target: str) -> grpc.aio.Channel:
    """Someone who trusts the server and has nothing to show."""
    return grpc.aio.secure_channel(target, grpc.ssl_channel_credentials((keys.folder / "ca/ca.pem").read_bytes()))


@pytest.mark.parametrize("name", CALLERS)
async def test_each_role_may_do_what_it_is_for_and_nothing_else(keys: Keys, name: str) -> None:
    async with (
        front_door(Port(policy=keys.policy)) as (target, replicas),
        channel_of(keys, name, target) as channel,
    ):
        results = {method: (await outcome(ask(channel, method)))[0] for method in ALL}
        assert {method for method, code in results.items() if code is StatusCode.OK} == ALLOWED[name]
        assert {code for method, code in results.items() if method not in ALLOWED[name]} <= {
            StatusCode.PERMISSION_DENIED
        }
        assert {caller for _, caller, _ in replicas.seen} == {Caller(name, CALLERS[name])}
        stub = health_pb2_grpc.HealthStub(channel)
        assert (await stub.Check(health_pb2.HealthCheckRequest(), timeout=10)).status == 1
        watched = await outcome(stub.Watch(health_pb2.HealthCheckRequest(), timeout=10))
        assert watched == (StatusCode.UNIMPLEMENTED, "grpc.health.v1.Health/Watch: ask by Check")
        # Not a method of the stub in all versions of the package.
        listed = await outcome(channel.unary_unary("/grpc.health.v1.Health/List")(b"", timeout=10))
        assert listed[0] is StatusCode.UNIMPLEMENTED
        of_the_server = {(await outcome(call(channel)))[0] for call in (_list, _reflect)}
        assert of_the_server == ({StatusCode.OK} if name == "run-a" else {StatusCode.PERMISSION_DENIED})


def _list(channel: grpc.aio.Channel) -> object:
    stub = serve_pb2_grpc.RayServeAPIServiceStub(channel)
    return stub.ListApplications(serve_pb2.ListApplicationsRequest(), timeout=10)


def _reflect(channel: grpc.aio.Channel) -> object:
    request = reflection_pb2.ServerReflectionRequest(list_services="").SerializeToString()
    method = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
    return channel.unary_stream(method)(request, timeout=10)


async def test_a_large_request_of_one_who_may_not_is_refused_by_its_name_and_not_by_its_size(keys: Keys) -> None:
    """The caller is known before the request is taken in."""
    async with (
        front_door(Port(policy=keys.policy)) as (target, _),
        channel_of(keys, "evaluator", target) as channel,
    ):
        for _ in range(5):
            code, details = await outcome(ask(channel, "Critic/Train", request=bytes(20 << 20)))
            assert code is StatusCode.PERMISSION_DENIED
            assert details == "evaluator has the role judge-client, which may not call quartet.v1.Critic/Train"


async def test_plaintext_and_strangers_get_nowhere(keys: Keys) -> None:
    async with front_door(Port(policy=keys.policy)) as (target, replicas):
        async with grpc.aio.insecure_channel(target) as channel:
            assert (await outcome(ask(channel, "Reward/Score")))[0] is StatusCode.UNAVAILABLE
        async with stranger(keys, target) as channel:
            refused = {StatusCode.UNAVAILABLE, StatusCode.UNAUTHENTICATED}  # in the handshake, or by the guard
            for method in ALL:
                assert (await outcome(ask(channel, method)))[0] in refused
            assert (await outcome(_list(channel)))[0] in refused
            assert (await outcome(_reflect(channel)))[0] in refused
        assert replicas.seen == []


async def test_an_identity_cannot_be_claimed_by_metadata(keys: Keys) -> None:
    forged = (("application", "reward"), ("quartet-identity", "run-a"), ("quartet-role", "trainer"))
    async with (
        front_door(Port(policy=keys.policy)) as (target, replicas),
        channel_of(keys, "evaluator", target) as channel,
    ):
        assert (await outcome(ask(channel, "Reward/Score", *forged)))[0] is StatusCode.OK
        assert [caller for _, caller, _ in replicas.seen] == [Caller("evaluator", "judge-client")]


REFUSED = (StatusCode.UNAVAILABLE, StatusCode.UNAUTHENTICATED)


async def assert_refused(keys: Keys, shown: Keys, by: Collection[StatusCode] = REFUSED) -> None:
    """A door of `keys` lets a caller who shows what is in `shown` reach no replica, and says so `by` one of these."""
    async with (
        front_door(Port(policy=keys.policy)) as (target, replicas),
        channel_of(shown, "run-a", target) as channel,
    ):
        assert (await outcome(ask(channel, "Critic/Save")))[0] in by
        assert replicas.seen == []


async def test_certificates_of_another_authority_are_refused(keys: Keys, tmp_path: Path) -> None:
    other = made_keys(tmp_path / "other")
    client = other.folder / "clients/run-a"
    (client / "ca.pem").write_bytes((keys.folder / "ca/ca.pem").read_bytes())
    await assert_refused(keys, shown=other)


async def test_a_name_is_compared_whole_and_not_up_to_a_nul_byte(tmp_path: Path) -> None:
    keys = made_keys(tmp_path / "keys")
    client = keys.folder / "clients" / "run-a"
    Authority.open(keys.folder / "ca").certify_client(client, "client", "run-a\0.example", 1)
    await assert_refused(keys, shown=keys, by={StatusCode.UNAUTHENTICATED})


@pytest.mark.parametrize("kind", [x509.DNSName, x509.RFC822Name])
async def test_only_a_uri_identifies_a_caller(tmp_path: Path, kind: type[x509.GeneralName]) -> None:
    """An authority may let its users choose names of other kinds."""
    keys = made_keys(tmp_path / "keys")
    client = keys.folder / "clients" / "run-a"
    authority = Authority.open(keys.folder / "ca")
    name = kind("quartet:run-a")  # type: ignore[call-arg]  # as all of its kinds take
    authority._certify(client, "client", "run-a", [name], ExtendedKeyUsageOID.CLIENT_AUTH, 1)
    await assert_refused(keys, shown=keys, by={StatusCode.UNAUTHENTICATED})


async def test_a_certificate_that_has_expired_is_refused(tmp_path: Path) -> None:
    keys = made_keys(tmp_path / "keys")
    client = keys.folder / "clients" / "run-a"
    Authority.open(keys.folder / "ca").certify_client(client, "client", "run-a", 0)
    # It is valid to the moment of its making, and from five minutes before.
    await assert_refused(keys, shown=keys, by={StatusCode.UNAVAILABLE})


async def test_the_servers_own_certificate_does_not_identify_a_caller(tmp_path: Path) -> None:
    keys = made_keys(tmp_path / "keys")
    for suffix in ("pem", "key"):
        client = keys.folder / "clients/run-a" / f"client.{suffix}"
        client.write_bytes((keys.folder / "server" / f"server.{suffix}").read_bytes())
    await assert_refused(keys, shown=keys)


async def test_an_identity_may_be_held_to_some_applications(tmp_path: Path) -> None:
    keys = made_keys(tmp_path / "keys")
    edit_identity(keys.policy, "evaluator", applications=["reward"])
    async with front_door(Port(policy=keys.policy)) as (target, _), channel_of(keys, "evaluator", target) as channel:
        assert (await outcome(ask(channel, "Reward/Score")))[0] is StatusCode.OK
        code, details = await outcome(ask(channel, "Reference/Logprobs"))
        assert (code, details) == (
            StatusCode.PERMISSION_DENIED,
            "evaluator may not call the application 'reference'",
        )


async def test_the_policy_may_name_certificates_of_ones_own(tmp_path: Path) -> None:
    keys = made_keys(tmp_path / "keys", {"pager-1": "trainer"})
    values = yaml.safe_load(keys.policy.read_text())
    values["identities"] = {"pager": {"role": "prober", "certificates": ["quartet:pager-1"]}}
    keys.policy.write_text(yaml.safe_dump(values))
    async with (
        front_door(Port(policy=keys.policy)) as (target, replicas),
        channel_of(keys, "pager-1", target) as channel,
    ):
        assert (await outcome(ask(channel, "Reward/Info")))[0] is StatusCode.OK
        assert (await outcome(ask(channel, "Reward/Score")))[0] is StatusCode.PERMISSION_DENIED
        assert [caller for _, caller, _ in replicas.seen] == [Caller("pager", "prober")]


async def test_one_file_holds_the_credentials_of_several_places(keys: Keys, tmp_path: Path) -> None:
    file = tmp_path / "credentials.yaml"
    async with (
        front_door(Port(local="open")) as (own, _),
        front_door(Port(policy=keys.policy)) as (foreign, replicas),
    ):
        file.write_text(yaml.safe_dump({"targets": {foreign: str(keys.folder / "clients/evaluator")}}))
        for target in (own, foreign):
            async with connect(target, {VARIABLE: str(file)}) as channel:
                assert (await outcome(ask(channel, "Reward/Score")))[0] is StatusCode.OK
        assert [caller.name for _, caller, _ in replicas.seen] == ["evaluator"]
