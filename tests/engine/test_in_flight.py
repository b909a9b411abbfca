"""Requests in the engine while new weights arrive: which weights their keys and values are of, and those of later
requests for the same prompts."""

import asyncio
from pathlib import Path
from typing import Any

import numpy as np

from quartet.wire.codec import Floats, Ints
from services.rollout.sample import Sample, Sampling
from tests import plain
from tests.engine_process import EngineProcess
from tests.models import WORDS, make_policy
from tests.pushing import ModelSource, PushedHost, perturbed, push

LONGEST = 512
_RNG = np.random.default_rng(5)
# Longer than two blocks of the KV cache, which are of 128 tokens on a CPU: shorter prompts would share nothing.
PROMPTS = [_RNG.integers(4, len(WORDS), 300).astype(np.int32) for _ in range(4)]
LONG = Sampling(max_new_tokens=100, ignore_eos=True)


Across = tuple[list[Sample], list[Sample]]
"""Samples from before a push until after it, and those of a call that follows."""
PUSHES = ("keep", "keep-cache")


async def _across(host: PushedHost, source: ModelSource, version: int, in_flight: str) -> Across:
    samples, begun = list[Sample](), asyncio.Event()

    async def listen(pushing: asyncio.Task[Any], tokens: int) -> None:
        while not pushing.done():
            samples.extend(await host.generate(PROMPTS, Sampling(max_new_tokens=tokens, ignore_eos=True)))
            begun.set()

    async def pushed() -> None:
        await begun.wait()
        await push(host, source, version, in_flight=in_flight)

    pushing = asyncio.create_task(pushed())
    # Of two lengths, so that a pause does not find all of them at their end.
    await asyncio.gather(*(listen(pushing, tokens) for tokens in (100, 63)))
    await pushing
    return samples, await host.generate(PROMPTS, LONG)


async def _across_all(folder: Path) -> list[Across]:
    host = PushedHost()
    await host.start({"model": str(folder), "dtype": "float32", "max_length": LONGEST, "kv_cache_mib": 64})
    try:
        return [
            await _across(
                host, ModelSource(perturbed(plain.language_model(folder), seed=version)), version, in_flight
            )
            for version, in_flight in enumerate(PUSHES, 1)
        ]
    finally:
        await host.shutdown()


def sampled_across(folder: Path) -> list[Across]:
    """Carries it out in the process for engines."""
    from tests.engine_process import _loop

    return _loop.run_until_complete(_across_all(folder))


async def test_only_requests_in_flight_may_keep_what_old_weights_computed(
    tmp_path: Path, engine: EngineProcess
) -> None:
    folder = make_policy(tmp_path / "policy", kind="llama", tied=False, seed=5, max_position_embeddings=LONGEST)
    models = [
        perturbed(plain.language_model(folder), seed=seed) if seed else plain.language_model(folder)
        for seed in range(3)
    ]

    def distance(sample: Sample, prompt: Ints, only: int) -> Floats:
        """|log-ratio| of the engine to a version, of the tokens that it sampled."""
        [own] = plain.logprobs(models[only], [prompt], [sample.response_ids], vocabulary=len(WORDS))
        parts = [np.abs(sample.logprobs - own)[s:e] for version, s, e in sample.spans if version == only]
        return np.concatenate([np.zeros(1, np.float32), *parts])

    pushes = await engine._run(sampled_across, folder)
    for pushed, (in_flight, (samples, later)) in enumerate(zip(PUSHES, pushes, strict=True), 1):
        mixed = [sample for sample in samples if len(sample.spans) == 2]
        assert mixed
        for sample in samples:
            assert distance(sample, PROMPTS[sample.index], pushed - 1).max() < 1e-4
        for sample in later:
            assert {version for version, _, _ in sample.spans} == {pushed}
            assert distance(sample, PROMPTS[sample.index], pushed).max() < 1e-4
        furthest = max(distance(sample, PROMPTS[sample.index], pushed).max() for sample in mixed)
        assert (furthest < 1e-4) == (in_flight == "keep")
