"""The rollout service over gRPC: two vLLM replicas that serve the reference's weights."""

import asyncio
from typing import Any

import grpc
import numpy as np
import pytest

from protos import rollout_pb2
from quartet.wire.codec import Ints, pack_longs, pack_sequences
from quartet.wire.errors import DeadlineExceeded, FailedPrecondition, OffTimeline
from services.rollout.sample import FinishReason, Sample, Sampling
from tests import plain
from tests.cluster import Quartet, eventually, refused
from tests.models import EOS, MAX_LENGTH, ROWS
from tests.pushing import hold, push_model

PROMPTS, _ = plain.random_pairs(40, seed=7, longest=20)
LONG = Sampling(max_new_tokens=100, ignore_eos=True)
pytestmark = pytest.mark.usefixtures("base")


async def generate(quartet: Quartet, prompts: list[Ints], sampling: Sampling, **options: Any) -> list[Sample]:
    """Samples in the order of arrival."""
    stream = quartet.services.rollout.generate(prompts, sampling, **{"timeout_s": 60, **options})
    return [sample async for samples in stream for sample in samples]


def in_order(samples: list[Sample]) -> list[Sample]:
    return sorted(samples, key=lambda sample: sample.index)


async def test_info_describes_model_and_load(quartet: Quartet) -> None:
    replicas = (await quartet.replicas()).values()
    assert len(replicas) == 2
    for info in replicas:
        assert (info.model.vocab_size, info.model.max_length) == (ROWS, MAX_LENGTH)
        assert (info.running, info.weight_backend, info.workers) == (0, "auto", 1)
        assert info.policy_version >= 1
    assert len({info.weights_checksum for info in replicas}) == 1


async def test_every_sample_says_how_it_ended_and_which_weights_made_it(quartet: Quartet) -> None:
    version = (await quartet.services.rollout.info(30)).policy_version
    samples = await generate(quartet, PROMPTS, Sampling(max_new_tokens=50))
    assert sorted(sample.index for sample in samples) == list(range(len(PROMPTS)))
    assert {sample.finish_reason for sample in samples} == set(FinishReason)
    for sample in samples:
        ended = sample.response_ids[-1] == EOS
        assert sample.finish_reason is (FinishReason.STOP if ended else FinishReason.LENGTH)
        assert ended or len(sample.response_ids) == 50
        assert sample.spans == ((version, 0, len(sample.response_ids)),)


async def test_samples_stream_as_they_finish(quartet: Quartet) -> None:
    """The end of the text comes anywhere within 100 tokens: who ends sooner arrives sooner."""
    stream = quartet.services.rollout.generate(PROMPTS * 3, Sampling(max_new_tokens=100), timeout_s=60)
    messages = [[len(sample.response_ids) for sample in samples] async for samples in stream]
    assert len(messages) > 1
    lengths = [length for message in messages for length in message]
    # Rank correlation of arrival and length; 1 if all had entered the engine in the same step.
    assert np.corrcoef(np.argsort(np.argsort(lengths)), np.arange(len(lengths)))[0, 1] > 0.9


async def test_a_seed_makes_samples_reproducible_on_any_replica(quartet: Quartet) -> None:
    sampling = Sampling(max_new_tokens=30)
    seeds = list(range(len(PROMPTS)))
    runs = [in_order(await generate(quartet, PROMPTS, sampling, seeds=seeds)) for _ in range(4)]
    texts = [[sample.response_ids.tolist() for sample in run] for run in runs]
    assert texts[0] == texts[1] == texts[2] == texts[3]
    other = in_order(await generate(quartet, PROMPTS, sampling, seeds=[seed + 1000 for seed in seeds]))
    assert [sample.response_ids.tolist() for sample in other] != texts[0]


async def test_sampling_parameters_reach_the_engine(quartet: Quartet) -> None:
    least = await generate(quartet, PROMPTS, Sampling(max_new_tokens=60, min_new_tokens=50))
    assert min(len(sample.response_ids) for sample in least) >= 50
    first_only = await generate(quartet, PROMPTS, Sampling(max_new_tokens=20, stop_token_ids=tuple(range(64))))
    assert {len(sample.response_ids) for sample in first_only} == {1}
    greedy = Sampling(max_new_tokens=10, temperature=0)
    top_one = Sampling(max_new_tokens=10, top_k=1)
    actual = [in_order(await generate(quartet, PROMPTS, sampling)) for sampling in (greedy, top_one)]
    assert [s.response_ids.tolist() for s in actual[0]] == [s.response_ids.tolist() for s in actual[1]]


async def test_two_thousand_prompts_in_one_call(quartet: Quartet) -> None:
    samples = await generate(quartet, PROMPTS * 50, Sampling(max_new_tokens=2))
    assert sorted(sample.index for sample in samples) == list(range(2000))


async def idle(quartet: Quartet) -> bool:
    return all(info.running == 0 for info in (await quartet.replicas()).values())


async def test_a_deadline_ends_the_engines_requests(quartet: Quartet) -> None:
    """4000 responses of 100 tokens take the engine far longer than the call's deadline and the wait after it."""
    with pytest.raises(DeadlineExceeded, match="samples missing after 1 s"):
        await generate(quartet, PROMPTS * 100, LONG, timeout_s=1)
    await eventually(lambda: idle(quartet), 10)


async def test_a_caller_that_goes_away_ends_the_engines_requests(quartet: Quartet) -> None:
    begun = asyncio.Event()

    async def listen() -> None:
        async for _ in quartet.services.rollout.generate(PROMPTS * 100, LONG, timeout_s=60):
            begun.set()

    call = asyncio.create_task(listen())
    async with asyncio.timeout(20):
        await begun.wait()
    call.cancel()
    await asyncio.wait([call])
    await eventually(lambda: idle(quartet), 10)


async def test_weights_that_are_too_old_serve_nothing(quartet: Quartet, base: Any) -> None:
    version = (await push_model(quartet.services.rollout, base)).policy_version
    assert len(await generate(quartet, PROMPTS, Sampling(max_new_tokens=2), min_version=version)) == len(PROMPTS)
    with pytest.raises(FailedPrecondition, match=f"min_version: {version + 1} asked, but .* serves {version}"):
        await generate(quartet, PROMPTS, Sampling(max_new_tokens=2), min_version=version + 1, timeout_s=5)


async def test_weights_of_an_abandoned_timeline_serve_nothing_however_new_they_are(quartet: Quartet) -> None:
    """The case after a return to a checkpoint, whose first push these replicas have not had yet."""
    rollout = quartet.services.rollout
    await hold(rollout)
    info, timeline = await rollout.info(30), rollout.lease.number
    assert 0 < info.timeline < timeline
    said = (
        rf"holds version {info.policy_version} of an abandoned timeline \({info.timeline}\); the run is at timeline"
    )
    with pytest.raises(OffTimeline, match=f"{said} {timeline}"):
        await generate(quartet, PROMPTS, Sampling(max_new_tokens=2), min_version=1, timeout_s=5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompts": pack_sequences([[5], [335]])}, "prompts.token_ids[1]: 335 is outside the vocabulary (0 to 334)"),
        ({"prompts": pack_sequences([[5], [5] * 125])}, "prompts[1]: 125 tokens + sampling.max_new_tokens 4 exceed"),
        ({"sampling": {"temperature": 3.0}}, "sampling.temperature: 3; must be 0 (greedy) or 0.01 to 2"),
        ({"seeds": pack_longs([1, 2])}, "seeds: 2 for 1 prompts; send one each, or none"),
    ],
)
async def test_malformed_requests_are_refused_by_name(quartet: Quartet, change: Any, message: str) -> None:
    change = change | {"sampling": {"max_new_tokens": 4} | change.get("sampling", {})}
    request = rollout_pb2.GenerateRequest(**{"prompts": pack_sequences([[5]])} | change)
    code, details = await refused(ask(quartet, request))
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert message in details
    assert len(await generate(quartet, PROMPTS[:2], Sampling(max_new_tokens=2))) == 2


async def ask(quartet: Quartet, request: rollout_pb2.GenerateRequest) -> list[rollout_pb2.GenerateResponse]:
    return await quartet.stream("/quartet.v1.Rollout/Generate", request, rollout_pb2.GenerateResponse, "rollout")


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (rollout_pb2.WeightPhase(timeout_s=5), "phase: set one of discover, claim, rest, prepare, transfer,"),
        (rollout_pb2.WeightPhase(discover=rollout_pb2.Discover()), "timeout_s: 0; required, more than 0"),
        (
            rollout_pb2.WeightPhase(timeout_s=float("nan"), discover=rollout_pb2.Discover()),
            "timeout_s: nan; required",
        ),
        (
            rollout_pb2.WeightPhase(timeout_s=5, prepare=rollout_pb2.Prepare(stall_s=float("nan"))),
            "stall_s: nan; must be",
        ),
        (rollout_pb2.WeightPhase(timeout_s=5, prepare=rollout_pb2.Prepare(stall_s=6)), "prepare.stall_s: 6; must be"),
    ],
)
async def test_malformed_phases_are_refused_by_name(quartet: Quartet, request_: Any, message: str) -> None:
    method, reply = "/quartet.v1.Rollout/UpdateWeights", rollout_pb2.WeightReports
    code, details = await refused(quartet.call(method, request_, reply, "rollout"))
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert message in details
