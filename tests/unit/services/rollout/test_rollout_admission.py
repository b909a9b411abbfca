"""A rollout replica's limits, and the order of its callers' prompts: the deployment without Serve and vLLM."""

import asyncio
import re
from typing import Any

import grpc
import numpy as np
import pytest

from protos import common_pb2
from protos import rollout_pb2 as pb
from quartet.config.limits import LimitsConfig
from quartet.security.identity import Caller
from quartet.serving.admission import Admission
from quartet.serving.slots import EngineSlots
from quartet.wire.callers import Purpose
from quartet.wire.codec import pack_sequences
from quartet.wire.errors import (
    FailedPrecondition,
    InvalidArgument,
    LeaseLost,
    OffTimeline,
    ResourceExhausted,
)
from services.rollout.member import WeightMember
from services.rollout.pulse import Pulse
from services.rollout.replica import Rollout
from services.rollout.sample import FinishReason, Sample
from tests.unit.contexts import Context
from tests.unit.member_phases import FakeEngine, claim, prepare, transfer
from tests.unit.waiting import settled, until

SLOTS = 16
STEP_S = 0.05


class Engine(FakeEngine):
    """Works on SLOTS prompts at a time, each for STEP_S, in the order of their coming, as vLLM does."""

    vocab_size = 64
    max_length = 128
    end_ids: tuple[int, ...] = (2, 63)

    def __init__(self) -> None:
        super().__init__()
        self.version = 0
        self.turn = asyncio.Semaphore(SLOTS)
        self.asked = 0

    def shutdown(self) -> None:
        pass

    async def answer(self) -> None:
        pass

    async def generate(self, index: int, prompt_ids: Any, sampling: Any, seed: int | None, *rest: Any) -> Sample:
        self.asked += 1
        async with self.turn:
            await asyncio.sleep(STEP_S)
        return Sample(index, np.ones(1, np.int32), np.zeros(1, np.float32), FinishReason.LENGTH, ((0, 0, 1),))


@pytest.fixture
def rollout() -> Any:
    made = object.__new__(Rollout.func_or_class)  # type: ignore[attr-defined]
    limits = LimitsConfig()
    made._engine = Engine()
    made._admission, made._slots, made._replica = (
        Admission(limits),
        EngineSlots(SLOTS, limits, quantum=128),
        "replica",
    )
    made._member = WeightMember(made._engine, "replica")
    made._pulse = Pulse(made._engine.answer, lambda: False)
    return made


def ask(prompts: int, **fields: Any) -> pb.GenerateRequest:
    sampling = pb.SamplingParams(max_new_tokens=8)
    return pb.GenerateRequest(prompts=pack_sequences([[5]] * prompts), **{"sampling": sampling} | fields)


async def samples(rollout: Any, request: pb.GenerateRequest, context: Context) -> int:
    return sum([len(response.segments) async for response in rollout.Generate(request, context)])


async def test_twenty_thousand_prompts_are_refused_before_any_is_looked_at(rollout: Any) -> None:
    context = Context()
    with pytest.raises(ResourceExhausted, match="prompts: 20000 rows, but a call may hold 4096") as caught:
        await samples(rollout, ask(20_000), context)
    assert context.code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert caught.value.retry_after_s is None
    assert rollout._engine.asked == 0


async def test_a_run_does_not_wait_for_thousands_of_foreign_prompts(rollout: Any) -> None:
    """The engine needs 25 s for them. Their calls are admitted, and eight samples of a run come after few of them."""
    foreign = [asyncio.create_task(samples(rollout, ask(4000), Context("judge", Purpose.FOREIGN))) for _ in range(2)]
    await until(lambda: rollout._admission.waiting_rows == 8000 and rollout._engine.asked)
    await settled()
    assert await samples(rollout, ask(8), Context()) == 8
    assert rollout._engine.asked < 200
    for task in foreign:
        task.cancel()
    await asyncio.wait(foreign)
    assert rollout._admission.waiting_rows == 0


async def test_a_call_counts_for_as_long_as_its_stream_is_open(rollout: Any) -> None:
    stream = rollout.Generate(ask(100), Context())
    await anext(stream)
    assert rollout._admission.waiting_rows == 100
    await stream.aclose()
    assert rollout._admission.waiting_rows == 0


async def claimed(rollout: Any, lease: common_pb2.Lease) -> None:
    assert (await claim(rollout._member, lease, take_over=True)).ok


async def pushed(rollout: Any, lease: common_pb2.Lease, version: int) -> None:
    """Claims the replica and brings it to this version."""
    await claimed(rollout, lease)
    commit = {"commit": pb.Commit(membership=lease.number, policy_version=version)}
    for phase in (prepare(lease.number, replica=1), transfer(lease.number), commit):
        assert (await rollout._member.carry_out(pb.WeightPhase(timeout_s=1, lease=lease, **phase))).ok


async def test_a_run_that_was_taken_over_from_samples_nothing_more_for_training_and_is_told_why(rollout: Any) -> None:
    older, newer = common_pb2.Lease(run_id="older", number=1), common_pb2.Lease(run_id="newer", number=2)
    await pushed(rollout, older, 1)
    assert await samples(rollout, ask(2, min_version=1, lease=older), Context()) == 2
    await pushed(rollout, newer, 1)
    context, both = (
        Context(),
        r"lease: run older \(lease 1\) no longer holds this service: run newer \(lease 2\) does",
    )
    with pytest.raises(LeaseLost, match=both):
        await samples(rollout, ask(2, min_version=1, lease=older), context)
    assert (context.code, rollout._engine.asked) == (grpc.StatusCode.FAILED_PRECONDITION, 2)
    assert await samples(rollout, ask(2, min_version=1, lease=newer), Context()) == 2


async def test_a_version_serves_all_who_ask_for_it_or_an_older_one_of_its_timeline(rollout: Any) -> None:
    lease = common_pb2.Lease(run_id="ours", number=3)
    await pushed(rollout, lease, 7)
    for least in (0, 6, 7):
        assert await samples(rollout, ask(2, min_version=least, lease=lease), Context()) == 2
    with pytest.raises(FailedPrecondition, match=r"^min_version: 8 asked, but replica serves 7$"):
        await samples(rollout, ask(2, min_version=8, lease=lease), Context())
    with pytest.raises(FailedPrecondition, match=r"^max_version: 6 asked, but replica serves 7$"):
        await samples(rollout, ask(2, min_version=6, max_version=6, lease=lease), Context())
    # Not what callers try again until another replica can.
    with pytest.raises(InvalidArgument, match=r"^min_version: 8; must be at most max_version, 7$"):
        await samples(rollout, ask(2, min_version=8, max_version=7, lease=lease), Context())


async def test_a_replica_that_missed_the_return_to_a_checkpoint_serves_nothing_until_a_push(rollout: Any) -> None:
    """Version 7 is above the 5 that the run went back to, but not later than it."""
    before, after = (common_pb2.Lease(run_id="ours", number=number) for number in (3, 4))
    await pushed(rollout, before, 7)
    await claimed(rollout, after)
    said = r"^timeline: replica holds version 7 of an abandoned timeline \(3\); the run is at timeline 4$"
    for least in (5, 7):
        with pytest.raises(OffTimeline, match=said):
            await samples(rollout, ask(2, min_version=least, lease=after), Context())
    # Who takes any weights gets them, and Info says which they are.
    assert await samples(rollout, ask(2), Context("judge", Purpose.EVALUATION)) == 2
    await pushed(rollout, after, 5)
    assert await samples(rollout, ask(2, min_version=5, lease=after), Context()) == 2


async def test_a_replica_that_had_no_push_yet_serves_no_run(rollout: Any) -> None:
    lease = common_pb2.Lease(run_id="ours", number=4)
    await claimed(rollout, lease)
    with pytest.raises(OffTimeline, match="replica holds version 0 of no timeline, having just started or"):
        await samples(rollout, ask(2, min_version=1, lease=lease), Context())


async def test_a_version_is_of_a_run_and_who_asks_for_none_needs_no_lease(rollout: Any) -> None:
    await claimed(rollout, common_pb2.Lease(run_id="ours", number=1))
    assert await samples(rollout, ask(1), Context("judge", Purpose.EVALUATION)) == 1
    for versions in ({"min_version": 1}, {"max_version": 0}):
        with pytest.raises(InvalidArgument, match=r"lease: required by calls that .* expect a version"):
            await samples(rollout, ask(1, **versions), Context())


async def test_another_identity_that_repeats_a_lease_does_not_sample_with_it(rollout: Any) -> None:
    alice, bob = Caller("alice", "trainer"), Caller("bob", "trainer")
    await pushed(rollout, common_pb2.Lease(run_id="ours", number=1, identity="alice"), 1)
    # What a caller writes into `identity` counts for nothing: the proxy knows who it is.
    for written in ("", "alice", "bob"):
        request = ask(1, min_version=1, lease=common_pb2.Lease(run_id="ours", number=1, identity=written))
        assert await samples(rollout, request, Context(caller=alice)) == 1
        with pytest.raises(LeaseLost, match=r"run ours of bob \(lease 1\) does not hold this service"):
            await samples(rollout, request, Context(caller=bob))


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (ask(0), "prompts: empty; send at least one"),
        (
            ask(1, sampling=pb.SamplingParams(max_new_tokens=129)),
            "sampling.max_new_tokens: 129; must be at most the model's",
        ),
        (
            ask(1, sampling=pb.SamplingParams(max_new_tokens=128)),
            "prompts[0]: 1 tokens + sampling",
        ),
        (ask(1, sampling=pb.SamplingParams(max_new_tokens=1, stop_token_ids=[64])), "stop_token_ids: 64 is outside"),
    ],
)
async def test_what_cannot_be_generated_is_named(rollout: Any, request_: pb.GenerateRequest, message: str) -> None:
    with pytest.raises(InvalidArgument, match=re.escape(message)):
        await samples(rollout, request_, Context())


async def test_an_end_that_the_model_does_not_have_is_named_where_it_would_be_masked(rollout: Any) -> None:
    rollout._engine.end_ids = (2, 50256)
    assert await samples(rollout, ask(1), Context())
    early = ask(1, sampling=pb.SamplingParams(max_new_tokens=2, min_new_tokens=1))
    with pytest.raises(InvalidArgument, match=r"min_new_tokens: 1; must be 0, .* 50256, that is not one of its 64"):
        await samples(rollout, early, Context())
