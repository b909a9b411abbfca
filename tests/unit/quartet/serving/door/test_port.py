"""Serve's gRPC port: the ways to open it, and the limits that hold for every caller."""

import asyncio
import socket
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest
import yaml
from grpc import StatusCode
from ray.serve._private import default_impl, http_util
from ray.serve._private.common import DeploymentID, EndpointInfo
from ray.serve._private.grpc_util import start_grpc_server
from ray.serve._private.proxy_router import ProxyRouter
from ray.serve.config import gRPCOptions

from quartet.config.base import ConfigError
from quartet.seams.grpc import RefusesUnknownMethods
from quartet.security.credentials import VARIABLE, connect
from quartet.security.policy import digest
from quartet.security.port import LOCAL_VARIABLE, Port
from quartet.serving.proxy import bind_to_host
from tests.unit.front_door import ANSWER_S, FUNCTIONS, Replicas, ask, channel_of, front_door, made_keys, outcome


async def test_callers_that_send_nothing_do_not_keep_others_out(tmp_path: Path) -> None:
    keys = made_keys(tmp_path / "keys", {"run-a": "trainer"}, concurrent_calls=20, caller_share=1.0, request_s=0.3)
    async with (
        front_door(Port(policy=keys.policy)) as (target, replicas),
        channel_of(keys, "run-a", target) as channel,
    ):
        for _ in range(3):
            metadata = (("application", "reward"),)
            silent = [channel.stream_unary("/quartet.v1.Reward/Score")(metadata=metadata) for _ in range(20)]
            results = await asyncio.gather(*(outcome(call) for call in silent))
            assert {code for code, _ in results} == {StatusCode.INVALID_ARGUMENT}
            assert results[0][1] == "quartet.v1.Reward/Score: no request arrived within 0.3 s; send it at once"
            assert (await outcome(ask(channel, "Reward/Score")))[0] is StatusCode.OK
        assert len(replicas.seen) == 3


@pytest.mark.parametrize("name", [b"/\xff/x", b"/quartet.v1.Reward/\xc3(", b"", b"/", b"/quartet.v1.Reward/Nothing"])
async def test_a_method_that_does_not_exist_is_refused_and_the_port_stays_open(tmp_path: Path, name: bytes) -> None:
    """A name that is not UTF-8 once ended gRPC's server, without any proof of who called."""
    keys = made_keys(tmp_path / "keys", {"run-a": "trainer"}, tokens=True)
    async with (
        front_door(Port(policy=keys.policy)) as (target, _),
        channel_of(keys, "run-a", target) as channel,
        grpc.aio.secure_channel(
            target, grpc.ssl_channel_credentials((keys.folder / "ca/ca.pem").read_bytes())
        ) as stranger,
    ):
        for _ in range(3):
            call = stranger.unary_unary(name)(b"", timeout=10)  # type: ignore[arg-type]  # bytes pass as they are
            assert await outcome(call) == (StatusCode.UNIMPLEMENTED, "Method not found!")
        assert (await outcome(ask(channel, "Reward/Score")))[0] is StatusCode.OK


async def test_a_connection_that_says_nothing_is_closed(tmp_path: Path) -> None:
    keys = made_keys(tmp_path / "keys", {"run-a": "trainer"}, handshake_s=2)
    async with (
        front_door(Port(policy=keys.policy)) as (target, _),
        channel_of(keys, "run-a", target) as channel,
    ):
        assert (await outcome(ask(channel, "Reward/Score")))[0] is StatusCode.OK
        host, _, number = target.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(number))
        async with asyncio.timeout(10):
            assert await reader.read() == b""
        writer.close()
        assert (await outcome(ask(channel, "Reward/Score")))[0] is StatusCode.OK


async def test_a_caller_that_holds_its_calls_open_keeps_no_other_out(tmp_path: Path) -> None:
    limits: Any = {"concurrent_calls": 20, "caller_share": 0.4}
    keys = made_keys(tmp_path / "keys", {"run-a": "trainer", "pager": "prober"}, **limits)
    async with (
        front_door(Port(policy=keys.policy)) as (target, _),
        channel_of(keys, "run-a", target) as channel,
        channel_of(keys, "pager", target) as pager,
    ):
        metadata = (("application", "reward"),)
        held = [pager.stream_unary("/quartet.v1.Reward/Info")(metadata=metadata) for _ in range(9)]
        done, waiting = await asyncio.wait(
            [asyncio.create_task(outcome(call)) for call in held], return_when=asyncio.FIRST_COMPLETED
        )
        assert [task.result() for task in done] == [
            (StatusCode.RESOURCE_EXHAUSTED, "pager has 8 open calls, and the most is 8 (retry after 1000 ms)")
        ]
        assert (await outcome(ask(channel, "Reward/Score")))[0] is StatusCode.OK
        for call in held:
            call.cancel()
        await asyncio.wait(waiting)
        while (await outcome(ask(pager, "Reward/Info")))[0] is not StatusCode.OK:
            await asyncio.sleep(0.01)


@pytest.mark.parametrize(("connections", "method"), [(1, "Reward/Info"), (1, "Reward/Score"), (200, "Reward/Info")])
@pytest.mark.parametrize("begun", ["Reward/Info", "Reward/Score"])
async def test_a_program_that_ends_none_of_its_requests_keeps_no_other_program_of_its_caller_waiting(
    tmp_path: Path, connections: int, method: str, begun: str
) -> None:
    """All programs of one user are one caller by default; 32 such requests kept them all waiting for a minute."""
    policy = tmp_path / "policy.yaml"
    identities = {"run-a": {"role": "trainer", "tokens": [digest("secret")]}}
    # Nothing makes room by its own end before a call that waits is given up.
    limits = {"request_s": 10 * ANSWER_S, "handshake_s": 10 * ANSWER_S}
    policy.write_text(yaml.safe_dump({"identities": identities, "limits": limits}))
    metadata = (("application", "reward"), ("authorization", "Bearer secret"))
    # A connection of its own for each channel, as for each program.
    options = [("grpc.use_local_subchannel_pool", 1)]
    async with AsyncExitStack() as stack:
        target, _ = await stack.enter_async_context(front_door(Port(policy=policy)))
        channels = [
            await stack.enter_async_context(grpc.aio.insecure_channel(target, options=options))
            for _ in range(connections + 1)
        ]
        calls = [
            channels[number % connections].stream_unary(f"/quartet.v1.{begun}")(metadata=metadata)
            for number in range(200)
        ]
        await asyncio.gather(*(call.wait_for_connection() for call in calls))
        result = await outcome(ask(channels[-1], method, *metadata))
        assert result == (StatusCode.OK, "")
        for call in calls:
            call.cancel()


async def test_a_connection_has_some_requests_received_at_a_time(tmp_path: Path) -> None:
    keys = made_keys(tmp_path / "keys", {"run-a": "trainer", "pager": "prober"}, receiving=2)
    async with (
        front_door(Port(policy=keys.policy)) as (target, _),
        channel_of(keys, "run-a", target) as channel,
        channel_of(keys, "pager", target) as pager,
    ):
        metadata = (("application", "reward"),)
        slow = [pager.stream_unary("/quartet.v1.Reward/Info")(metadata=metadata) for _ in range(2)]
        waiting = asyncio.create_task(outcome(ask(pager, "Reward/Info")))
        while (await asyncio.wait([waiting], timeout=0.2))[0]:  # the slow ones are still on their way
            waiting = asyncio.create_task(outcome(ask(pager, "Reward/Info")))
        assert (await outcome(ask(channel, "Reward/Score")))[0] is StatusCode.OK
        for call in slow:
            call.cancel()
        assert (await waiting)[0] is StatusCode.OK


async def test_calls_beyond_the_most_that_may_be_open_are_refused(tmp_path: Path) -> None:
    keys = made_keys(tmp_path / "keys", {"run-a": "trainer"}, concurrent_calls=2, caller_share=1.0)
    async with (
        front_door(Port(policy=keys.policy)) as (target, replicas),
        channel_of(keys, "run-a", target) as channel,
    ):
        replicas.released.clear()
        held = [asyncio.create_task(outcome(ask(channel, "Reward/Score"))) for _ in range(2)]
        while len(replicas.seen) < 2:
            await asyncio.sleep(0.01)
        assert (await outcome(ask(channel, "Reward/Score")))[0] is StatusCode.RESOURCE_EXHAUSTED
        replicas.released.set()
        assert [code for code, _ in await asyncio.gather(*held)] == [StatusCode.OK] * 2


async def test_bearer_tokens_do_without_tls_on_loopback(tmp_path: Path) -> None:
    policy, client = tmp_path / "policy.yaml", tmp_path / "credentials.yaml"
    policy.write_text(yaml.safe_dump({"identities": {"run-a": {"role": "trainer", "tokens": [digest("secret")]}}}))
    client.write_text(yaml.safe_dump({"plaintext": True, "token_file": "token"}))
    (tmp_path / "token").write_text("secret\n")
    async with (
        front_door(Port(policy=policy)) as (target, replicas),
        connect(target, {VARIABLE: str(client)}) as channel,
    ):
        assert (await outcome(ask(channel, "Reward/Score")))[0] is StatusCode.OK
        assert (await outcome(ask(channel, "Rollout/Generate")))[0] is StatusCode.OK
        assert {caller.name for _, caller, _ in replicas.seen} == {"run-a"}
    async with front_door(Port(policy=policy)) as (target, replicas), grpc.aio.insecure_channel(target) as channel:
        for wrong in ("Bearer Secret", "Bearer", "Bearer ", "secret", "Basic secret", "Bearer secret secret"):
            metadata = (("application", "reward"), ("authorization", wrong))
            assert (await outcome(ask(channel, "Reward/Score", *metadata)))[0] is StatusCode.UNAUTHENTICATED
        assert replicas.seen == []


async def _start_as_serve_does(
    monkeypatch: pytest.MonkeyPatch, functions: Sequence[str] = FUNCTIONS
) -> tuple[grpc.aio.Server, int]:
    """Serve's proxy calls what the environment names, then starts its gRPC server on the file's port."""
    for module, name in ((default_impl, "add_grpc_address"), (http_util, "uvicorn")):
        monkeypatch.setattr(module, name, getattr(module, name))  # restored afterwards
    bind_to_host()
    router = ProxyRouter(lambda deployment, _: deployment)
    router.update_routes({DeploymentID("Reward", "reward"): EndpointInfo("/reward")})
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        number = int(probe.getsockname()[1])
    options = gRPCOptions(port=number, grpc_servicer_functions=list(functions))
    _, server = await start_grpc_server(Replicas(router).make, options, event_loop=asyncio.get_running_loop())
    return server, number


async def test_serve_opens_its_port_as_the_environment_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = made_keys(tmp_path / "keys")
    for name, value in Port(policy=keys.policy).environment.items():
        monkeypatch.setenv(name, value)
    server, number = await _start_as_serve_does(monkeypatch)
    here = [actual.laddr for actual in psutil.Process().net_connections("tcp") if actual.status == psutil.CONN_LISTEN]
    hosts = {address.ip.removeprefix("::ffff:") for address in here if address.port == number}
    assert hosts == {"127.0.0.1"}
    async with channel_of(keys, "run-a", f"127.0.0.1:{number}") as channel:
        assert (await outcome(ask(channel, "Reward/Score")))[0] is StatusCode.OK
    await server.stop(0)


async def test_serve_opens_no_port_off_loopback_without_a_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUARTET_GRPC_HOST", "0.0.0.0")
    with pytest.raises(ConfigError, match="is open to other machines"):
        await _start_as_serve_does(monkeypatch)


@pytest.mark.parametrize(
    ("functions", "message"),
    [
        (FUNCTIONS[1:-1], "it is missing"),
        ([*FUNCTIONS[1:], FUNCTIONS[0]], "it comes after those of grpc.health.v1.Health, quartet.v1.Critic, "),
        ([FUNCTIONS[2], FUNCTIONS[0]], "it comes after those of quartet.v1.Reward$"),
    ],
)
async def test_serve_starts_no_server_whose_streams_would_outlive_their_callers(
    monkeypatch: pytest.MonkeyPatch, functions: Sequence[str], message: str
) -> None:
    monkeypatch.setenv(LOCAL_VARIABLE, "open")
    started: list[object] = []
    start = RefusesUnknownMethods.start

    async def note(server: RefusesUnknownMethods) -> None:
        started.append(server)
        await start(server)

    monkeypatch.setattr(RefusesUnknownMethods, "start", note)
    wrong = rf"^grpc_options.grpc_servicer_functions: should begin with {FUNCTIONS[0]}; {message}"
    with pytest.raises(ConfigError, match=wrong):
        await _start_as_serve_does(monkeypatch, functions)
    assert started == []
    server, _ = await _start_as_serve_does(monkeypatch)
    assert len(started) == 1
    await server.stop(0)
