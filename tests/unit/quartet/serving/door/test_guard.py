"""The front door without a policy, on Serve's own server class: routing, decoding, limits, faults."""

from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import numpy as np
import pytest
import yaml
from grpc import StatusCode
from grpc_health.v1 import health_pb2, health_pb2_grpc

from protos import critic_pb2, reference_pb2, reward_pb2
from quartet.security.identity import ANONYMOUS
from quartet.security.policy import Limits, digest
from quartet.security.port import Port
from quartet.wire.splitting import PAIRS, TOKENS
from tests.fuzz.fuzzer import fuzz
from tests.fuzz.generator import requests
from tests.trajectories import of
from tests.unit.front_door import Replicas, ask, front_door, outcome

METHODS = ("Rollout/Generate", "Reward/Score", "Reference/Logprobs", "Critic/Train", "Critic/Info")


@pytest.fixture
async def door() -> AsyncIterator[tuple[grpc.aio.Channel, Replicas]]:
    async with front_door(Port(local="open")) as (target, replicas), grpc.aio.insecure_channel(target) as channel:
        yield channel, replicas


@pytest.mark.parametrize("method", METHODS)
async def test_a_call_reaches_its_replica_as_anonymous(door: tuple[grpc.aio.Channel, Replicas], method: str) -> None:
    channel, replicas = door
    assert await outcome(ask(channel, method)) == (StatusCode.OK, "")
    [(reached, caller, _)] = replicas.seen
    assert (reached, caller) == (f"/quartet.v1.{method}", ANONYMOUS)


@pytest.mark.parametrize("method", METHODS)
async def test_bytes_that_are_not_a_message_are_an_invalid_argument(
    door: tuple[grpc.aio.Channel, Replicas], method: str
) -> None:
    channel, replicas = door
    code, details = await outcome(ask(channel, method, request=b"\xff\xff\xff"))
    assert code is StatusCode.INVALID_ARGUMENT
    assert details == f"quartet.v1.{method}: 3 bytes that are not a message of the method's type"
    assert replicas.seen == []


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    ("metadata", "code", "says"),
    [
        ((("trace", "1"),), StatusCode.INVALID_ARGUMENT, "metadata application: missing; applications that serve"),
        ((("application", ""),), StatusCode.INVALID_ARGUMENT, "metadata application: missing"),
        ((("application", "nonet"),), StatusCode.NOT_FOUND, "metadata application: 'nonet' does not run here"),
    ],
)
async def test_a_call_that_names_no_application_that_runs_is_told_so(
    door: tuple[grpc.aio.Channel, Replicas],
    method: str,
    metadata: tuple[tuple[str, str], ...],
    code: StatusCode,
    says: str,
) -> None:
    channel, replicas = door
    actual, details = await outcome(ask(channel, method, *metadata))
    assert (actual, details.startswith(says)) == (code, True), details
    assert replicas.seen == []


async def test_an_application_of_another_type_is_never_asked(door: tuple[grpc.aio.Channel, Replicas]) -> None:
    channel, replicas = door
    code, details = await outcome(ask(channel, "Critic/Info", ("application", "rollout")))
    assert code is StatusCode.INVALID_ARGUMENT
    assert details.startswith("metadata application: rollout does not serve quartet.v1.Critic;")
    assert details.endswith("; applications that serve quartet.v1.Critic: critic")
    # Serve takes the last of several values, and so does the check.
    code, _ = await outcome(ask(channel, "Critic/Info", ("application", "critic"), ("application", "rollout")))
    assert code is StatusCode.INVALID_ARGUMENT
    assert replicas.seen == []


async def test_applications_may_have_any_name_and_several_may_serve_one_service() -> None:
    names = {"judge": "Reward", "rules": "Reward", "a-critic": "Critic", "something-else": "Chat"}
    async with (
        front_door(Port(local="open"), names) as (target, replicas),
        grpc.aio.insecure_channel(target) as channel,
    ):
        assert await outcome(ask(channel, "Reward/Score", ("application", "rules"))) == (StatusCode.OK, "")
        code, details = await outcome(ask(channel, "Reward/Score", ("application", "something-else")))
        assert (code, "that serve quartet.v1.Reward: judge, rules" in details) == (StatusCode.INVALID_ARGUMENT, True)
        stub = health_pb2_grpc.HealthStub(channel)
        for service in ("judge", "quartet.v1.Critic"):
            await stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=10)
        asked = [dict(metadata)["application"] for _, _, metadata in replicas.seen]
        assert asked == ["rules", "judge", "a-critic"]
        unclear = stub.Check(health_pb2.HealthCheckRequest(service="quartet.v1.Reward"), timeout=10)
        assert (await outcome(unclear))[0] is StatusCode.INVALID_ARGUMENT


async def test_a_proxy_that_has_just_started_asks_its_callers_to_come_back() -> None:
    async with front_door(Port(local="open"), {}) as (target, _), grpc.aio.insecure_channel(target) as channel:
        assert (await outcome(ask(channel, "Reward/Score")))[0] is StatusCode.UNAVAILABLE


async def test_a_caller_cannot_say_who_it_is_nor_steer_serve(door: tuple[grpc.aio.Channel, Replicas]) -> None:
    channel, replicas = door
    forged = (("quartet-identity", "run-a"), ("quartet-role", "trainer"), ("authorization", "Bearer x"))
    steering = (("multiplexed_model_id", "m"), ("session_id", "s"), ("request_id", "r"))
    kept = (("application", "reward"), ("quartet-run", "run-b"))
    await outcome(ask(channel, "Reward/Score", *forged, *steering, *kept))
    [(_, caller, metadata)] = replicas.seen
    assert caller == ANONYMOUS
    ours = [pair for pair in metadata if pair[0] != "user-agent"]
    assert ours == [*kept, ("quartet-identity", "anonymous"), ("quartet-role", "trainer")]


async def test_each_method_has_its_own_largest_request(tmp_path: Path) -> None:
    policy = tmp_path / "policy.yaml"
    limits = {"message_bytes": {"Score": 3000}, "other_message_bytes": 1000}
    identities = {"a": {"role": "trainer", "tokens": [digest("secret")]}}
    policy.write_text(yaml.safe_dump({"identities": identities, "limits": limits}))
    proof = ("authorization", "Bearer secret")
    async with front_door(Port(policy=policy)) as (target, _), grpc.aio.insecure_channel(target) as channel:
        # A field that the message does not know, so that it is a message of any size.
        request = b"\xfa\x7f\xcc\x0f" + bytes(1996)
        assert await outcome(ask(channel, "Reward/Score", proof, ("application", "reward"), request=request)) == (
            StatusCode.OK,
            "",
        )
        code, details = await outcome(ask(channel, "Critic/Info", proof, ("application", "critic"), request=request))
        assert (code, "2000 bytes, and the limit is 1000" in details) == (StatusCode.RESOURCE_EXHAUSTED, True)
        code, _ = await outcome(ask(channel, "Reward/Score", proof, ("application", "reward"), request=bytes(4000)))
        assert code is StatusCode.RESOURCE_EXHAUSTED


async def test_many_small_fields_are_refused_before_they_keep_the_port(
    door: tuple[grpc.aio.Channel, Replicas],
) -> None:
    channel, replicas = door
    most = Limits().elements
    too_many = reward_pb2.ScoreRequest(labels=[""] * (most + 1)).SerializeToString()
    code, details = await outcome(ask(channel, "Reward/Score", request=too_many))
    assert code is StatusCode.RESOURCE_EXHAUSTED
    assert details == (
        f"quartet.v1.Reward/Score: a request of more than {most} fields and elements of lists; split it"
    )
    assert replicas.seen == []
    texts = reward_pb2.TextPairs(prompts=["w5"] * 4096, responses=["w6"] * 4096)
    largest = reward_pb2.ScoreRequest(texts=texts, labels=["a"] * 4096).SerializeToString()
    assert await outcome(ask(channel, "Reward/Score", request=largest)) == (StatusCode.OK, "")


@pytest.mark.parametrize(
    ("request_", "code", "says"),
    [
        (b"\x78\x00" * (Limits().elements + 1), StatusCode.RESOURCE_EXHAUSTED, "a request of more than"),
        (b"\xff\xff\xff", StatusCode.INVALID_ARGUMENT, "3 bytes that are not a message"),
        (bytes(Limits().other_message_bytes + 1), StatusCode.RESOURCE_EXHAUSTED, "and the limit is"),
    ],
)
async def test_a_request_of_a_stream_is_checked_as_a_single_one_is(
    door: tuple[grpc.aio.Channel, Replicas], request_: bytes, code: StatusCode, says: str
) -> None:
    method = "grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
    call = door[0].unary_stream(f"/{method}")(request_, timeout=10)
    actual, details = await outcome(call)
    assert (actual, details.startswith(f"{method}: ") and says in details) == (code, True), details


async def test_a_compressed_request_is_refused_before_it_fills_memory(
    door: tuple[grpc.aio.Channel, Replicas],
) -> None:
    channel, replicas = door
    call = channel.unary_unary("/quartet.v1.Reward/Score")(
        b"\x12\x00" * 500, metadata=(("application", "reward"),), compression=grpc.Compression.Gzip, timeout=10
    )
    assert await outcome(call) == (StatusCode.UNIMPLEMENTED, "Compression algorithm 'gzip' is disabled.")
    assert replicas.seen == []
    assert (await outcome(ask(channel, "Reward/Score")))[0] is StatusCode.OK


def test_the_largest_part_of_a_call_that_a_client_sends_fits_the_limits_that_hold_by_default() -> None:
    """Such as 1024 samples of 4096 tokens, in parts; also a single sample of 131,072 tokens."""
    limits = Limits()
    for lengths in (np.full(PAIRS, TOKENS // PAIRS - 1), np.asarray([TOKENS - 1])):
        rows = [np.zeros(length, np.int32) for length in lengths]
        numbers = np.zeros(int(lengths.sum()), np.float32)
        batch = of([[0]] * len(rows), rows, values=numbers, returns=numbers, trained=numbers > 0)
        pairs = batch.select().pack()
        sent = {
            "Reward/Score": reward_pb2.ScoreRequest(tokens=pairs, labels=["a" * 200] * len(rows)),
            "Reference/Logprobs": reference_pb2.LogprobsRequest(trajectories=pairs),
            "Critic/Values": critic_pb2.ValuesRequest(trajectories=pairs),
            "Critic/Stage": critic_pb2.StageRequest(batch=batch.pack()),
            "Critic/Train": critic_pb2.TrainRequest(batch=batch.pack()),
        }
        for method, request in sent.items():
            assert request.ByteSize() < 0.5 * limits.of(f"/quartet.v1.{method}"), method
    assert limits.largest == 8 << 20


@pytest.mark.parametrize(
    ("failure", "told"),
    [
        (
            (
                StatusCode.INTERNAL,
                "The actor died unexpectedly before it had finished. pid: 7 ip: 10.0.0.5 /tmp/x",
            ),
            (StatusCode.UNAVAILABLE, "the replica died while it answered"),
        ),
        (
            (StatusCode.INTERNAL, 'Traceback (most recent call last):\n File "/home/me/x.py", line 3'),
            (StatusCode.INTERNAL, "the call failed inside the service; see the log"),
        ),
        (
            (StatusCode.INTERNAL, "Score: internal error (KeyError); see the log"),
            (StatusCode.INTERNAL, "Score: internal error (KeyError); see the log"),
        ),
        ((StatusCode.NOT_FOUND, "no such label"), (StatusCode.NOT_FOUND, "no such label")),
    ],
)
@pytest.mark.parametrize("method", ["Reward/Score", "Rollout/Generate"])
async def test_what_ray_says_of_a_failure_stays_inside(
    door: tuple[grpc.aio.Channel, Replicas],
    method: str,
    failure: tuple[StatusCode, str],
    told: tuple[StatusCode, str],
) -> None:
    channel, replicas = door
    replicas.failure = failure
    assert await outcome(ask(channel, method)) == told


async def test_nothing_that_a_caller_sends_gets_more_than_a_named_error(
    door: tuple[grpc.aio.Channel, Replicas],
) -> None:
    verdict = await fuzz(door[0], requests(seed=5, count=1000))
    assert verdict.faults == []
    assert verdict.codes["OK"] > 100
