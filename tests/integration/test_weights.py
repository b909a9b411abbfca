"""A push to all replicas of the deployed rollout service, and the responses that are on their way meanwhile."""

import asyncio
from dataclasses import replace

import pytest

from protos import rollout_pb2 as pb
from services.rollout.sample import Sample, Sampling
from tests import plain
from tests.cluster import Quartet
from tests.pushing import TIMEOUT_S, ModelSource, perturbed, push

PROMPTS, _ = plain.random_pairs(32, seed=21, longest=20)
LONG = Sampling(max_new_tokens=100, ignore_eos=True)
LENGTHS = (100, 73, 47, 31)


async def sampled_across(
    quartet: Quartet, source: ModelSource, version: int, in_flight: str
) -> tuple[list[Sample], int]:
    """Samples from before a push until after it, and how many were asked for again.

    Calls follow one another until the push has ended, and one more follows. Those of different LENGTHS end at
    different times, so that the push meets samples on their way whenever it comes. Fails if a call loses a sample.
    """
    begun, pushed = asyncio.Event(), asyncio.Event()
    samples: list[Sample] = []
    repeated: list[int] = []

    async def call(length: int) -> None:
        sampling = replace(LONG, max_new_tokens=length)
        stream = quartet.services.rollout.generate(PROMPTS * 2, sampling, timeout_s=60, on_repeat=repeated.append)
        came = []
        async for some in stream:
            came += some
            begun.set()
        assert sorted(sample.index for sample in came) == list(range(len(PROMPTS) * 2))
        assert {len(sample.response_ids) for sample in came} == {length}
        samples.extend(came)

    async def listen(length: int) -> None:
        while not pushed.is_set():
            await call(length)
        await call(length)

    async with asyncio.TaskGroup() as group:
        for length in LENGTHS:
            group.create_task(listen(length))
        await begun.wait()
        await push(quartet.services.rollout, source, version, in_flight=in_flight)
        pushed.set()
    return samples, sum(repeated)


# What an engine makes of a push that aborts is in tests/engine/test_resumed.py, what the client does in units.
@pytest.mark.parametrize("in_flight", ["wait", pytest.param("abort", marks=pytest.mark.exhaustive)])
async def test_responses_in_the_engine_may_be_waited_for_or_given_up(quartet: Quartet, in_flight: str) -> None:
    """wait: they end under the weights they began with. abort: they go on from their tokens, at any replica. None is
    lost."""
    reports = await quartet.services.rollout.update_weights(TIMEOUT_S, discover=pb.Discover())
    assert len(reports) == 2
    source = ModelSource(perturbed(plain.language_model(quartet.policy), seed=3))
    before = 1 + max(report.policy_version for report in reports)
    await push(quartet.services.rollout, source, before)  # to one that has begun since the last push, too
    version = before + 1
    samples, repeated = await sampled_across(quartet, source, version, in_flight)
    assert {v for sample in samples for v, _, _ in sample.spans} == {version - 1, version}
    assert bool(repeated) == (in_flight == "abort")
    resumed = [sample for sample in samples if sample.kept]
    assert bool(resumed) == (in_flight == "abort")
    for sample in resumed:
        length = len(sample.response_ids)
        assert sample.spans == ((version - 1, 0, sample.kept), (version, sample.kept, length))
    assert {len(sample.spans) for sample in samples if not sample.kept} == {1}
