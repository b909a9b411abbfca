"""Responses that the engine ends in the middle and that go on from their tokens: what a reader of the sample sees."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from functools import reduce
from pathlib import Path
from typing import Any

import numpy as np

from quartet.wire.codec import Floats
from quartet.wire.errors import Unavailable
from services.rollout.sample import Sample, Sampling, following
from tests import plain
from tests.engine_process import EngineProcess
from tests.models import WORDS, make_policy
from tests.pushing import ModelSource, PushedHost, perturbed, push
from tests.unit.waiting import settled

LONGEST = 1024
BATCHED = 300
"""Tokens in a step of the engine: fewer than those of all prompts, some of which are read in two pieces."""
_RNG = np.random.default_rng(6)
PROMPTS = [_RNG.integers(4, len(WORDS), 20 + 60 * index).astype(np.int32) for index in range(6)]
# They are interrupted after some 40 tokens, and go on for hundreds, however late the interruption comes.
ENDING = Sampling(max_new_tokens=260, min_new_tokens=200, temperature=0.8)
LONG = Sampling(max_new_tokens=200, ignore_eos=True)
MANY = 600
"""Tokens of responses that take longer than the engine keeps them to itself."""
SHORT = Sampling(max_new_tokens=40, ignore_eos=True)


class _Host(PushedHost):
    async def ended(self, sampling: Sampling, change: Callable[[], Awaitable[Any]]) -> list[Sample]:
        """Parts of each response that the engine handed out before `change` ended it, after some 40 of its tokens."""
        parts: list[list[Sample]] = [[] for _ in PROMPTS]

        async def begin(index: int) -> None:
            try:
                await self._engine.generate(index, PROMPTS[index], sampling, index, None, parts[index].append)
            except Unavailable:
                return
            raise AssertionError("it was to be ended")

        async with asyncio.TaskGroup() as group:
            for index in range(len(PROMPTS)):
                group.create_task(begin(index))
            # The short one is to be the last in the engine's queue, so that the others are ahead of it when it ends.
            await settled()
            await self._engine.generate(0, PROMPTS[0], SHORT, 0)
            await change()
        return [reduce(following, each) for each in parts]

    async def going_on(self, sampling: Sampling, begun: Sequence[Sample]) -> list[Sample]:
        calls = [
            self._engine.generate(part.index, PROMPTS[part.index], sampling, part.index, part.response_ids)
            for part in begun
        ]
        return [following(part, rest) for part, rest in zip(begun, await asyncio.gather(*calls), strict=True)]

    async def dropped(self) -> None:
        """Ends all responses as a push does that then fails."""
        await self._engine.pause("abort")
        assert await self._engine.abort()

    async def reported(self, count: int) -> list[tuple[list[Sample], Sample]]:
        """Parts and samples of so many responses, which nothing ends."""
        parts: list[list[Sample]] = [[] for _ in range(count)]
        sampling = Sampling(max_new_tokens=MANY, ignore_eos=True)
        calls = [self._engine.generate(i, PROMPTS[0], sampling, i, None, parts[i].append) for i in range(count)]
        return list(zip(parts, await asyncio.gather(*calls), strict=True))


async def sampled(folder: Path) -> dict[str, Any]:
    host = _Host()
    config = {"model": str(folder), "dtype": "float32", "max_length": LONGEST, "kv_cache_mib": 64}
    await host.start(config | {"max_num_batched_tokens": BATCHED})
    try:
        made: dict[str, Any] = {"whole": await host.generate(PROMPTS, ENDING)}
        made["begun"] = await host.ended(ENDING, host.dropped)
        made["resumed"] = await host.going_on(ENDING, made["begun"])
        made["reported"] = await host.reported(64)
        source = ModelSource(perturbed(plain.language_model(folder), seed=1))
        begun = await host.ended(LONG, lambda: push(host, source, 1, in_flight="abort"))
        made["mixed"] = await host.going_on(LONG, begun)
        return made
    finally:
        await host.shutdown()


async def test_a_response_that_goes_on_is_the_one_that_it_would_have_been(
    tmp_path: Path, engine: EngineProcess
) -> None:
    """Token for token under the same weights; across a push each token has the log-prob of its own weights."""
    folder = make_policy(tmp_path / "policy", kind="llama", tied=False, seed=5, max_position_embeddings=LONGEST)
    models = [plain.language_model(folder), perturbed(plain.language_model(folder), seed=1)]
    of = await engine.call(sampled, folder)

    def distance(sample: Sample, version: int) -> Floats:
        """|log-ratio| of the engine to a version, of the tokens that it sampled."""
        [own] = plain.logprobs(models[version], [PROMPTS[sample.index]], [sample.response_ids], vocabulary=len(WORDS))
        parts = [np.abs(sample.logprobs - own)[s:e] for v, s, e in sample.spans if v == version]
        return np.concatenate([np.zeros(1, np.float32), *parts])

    for part, whole, resumed in zip(of["begun"], of["whole"], of["resumed"], strict=True):
        assert 39 <= len(part.response_ids) < 200
        assert resumed.response_ids.tolist() == whole.response_ids.tolist()
        assert resumed.finish_reason == whole.finish_reason
        assert resumed.spans == ((0, 0, len(whole.response_ids)),)
        assert np.abs(resumed.logprobs - whole.logprobs).max() < 1e-5
    assert {sample.finish_reason for sample in of["whole"]} == {"stop", "length"}
    assert min(len(sample.response_ids) for sample in of["whole"]) >= 200

    for sample in of["mixed"]:
        (_, _, push_at), (_, _, end) = sample.spans
        assert [version for version, _, _ in sample.spans] == [0, 1]
        assert 39 <= push_at < end == 200
        assert max(distance(sample, version).max() for version in (0, 1)) < 1e-5

    for parts, sample in of["reported"]:
        sent = reduce(following, parts)
        count = len(sent.response_ids)
        assert 0 < count < MANY == len(sample.response_ids)
        assert sent.response_ids.tolist() == sample.response_ids[:count].tolist()
        assert sent.logprobs.tolist() == sample.logprobs[:count].tolist()
        assert sent.spans == ((0, 0, count),)
