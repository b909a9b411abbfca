"""Requests in the engine while new weights arrive: which weights their keys and values are of, and those of later
requests for the same prompts; and which adapters they are finished with."""

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from quartet.config.learner import LoraConfig
from quartet.learner.lora import adapters_of, add_adapters, scaled
from quartet.wire.codec import Floats, Ints
from quartet.wire.errors import Unavailable
from services.rollout.sample import Sample, Sampling
from tests import plain
from tests.engine_process import EngineProcess
from tests.models import WORDS, make_policy
from tests.pushing import BUCKET_BYTES, STALL_S, ModelSource, PushedHost, perturbed, push
from tests.sources import LocalSource

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


async def sampled_across(folder: Path) -> list[Across]:
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

    pushes = await engine.call(sampled_across, folder)
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


LORA = LoraConfig(rank=4, alpha=10)
VERSIONS = 3
"""Versions of adapters that the engine keeps."""


def adapted(folder: Path, version: int) -> Any:
    """The model with the adapters of a version; those of version 0 do nothing."""
    model: Any = add_adapters(plain.language_model(folder), LORA).eval()
    generator = torch.Generator().manual_seed(version)
    with torch.no_grad():
        for weight in adapters_of(model):
            noise = torch.randn(weight.parameter.shape, generator=generator)
            weight.parameter.copy_(0.1 * noise if version else torch.zeros_like(noise))
    return model


async def sampled_while_pushed(folder: Path, workers: int) -> tuple[list[Sample | Unavailable], list[Sample]]:
    """Responses to the first prompt: one that begins before all pushes, and one after each of three, while those
    before it go on. Also what was reported of the first."""
    host, begun = PushedHost(), list[asyncio.Task[Sample]]()
    own = {"adapters": LORA.model_dump(), "adapter_versions": VERSIONS, "max_num_seqs": 4}
    own |= {"tensor_parallel_size": workers}
    await host.start({"model": str(folder), "dtype": "float32", "max_length": 2048, "kv_cache_mib": 128} | own)
    parts: list[Sample] = []
    tokens = [asyncio.Event() for _ in range(5)]

    def begin(number: int, length: int) -> None:
        def report(part: Sample) -> None:
            tokens[number].set()
            if not number:
                parts.append(part)

        sampling = Sampling(max_new_tokens=length, ignore_eos=True)
        asked = host._engine.generate(number, PROMPTS[0], sampling, number, report=report)
        begun.append(asyncio.create_task(asked))

    try:
        begin(0, 1700)
        await tokens[0].wait()
        for version in range(1, VERSIONS + 1):
            source = LocalSource(
                dict(scaled(((w.name, w.parameter) for w in adapters_of(adapted(folder, version))), LORA)),
                bucket_bytes=BUCKET_BYTES,
                stall_s=STALL_S,
            )
            await push(host, source, version, in_flight="finish")
            begin(version, 900)
            await tokens[version].wait()
        assert not any(response.done() for response in begun[1:])
        ended: Any = await asyncio.gather(*begun, return_exceptions=True)
        return ended, parts
    finally:
        await host.shutdown()


@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.exhaustive)])
async def test_responses_are_finished_with_their_adapters_beside_those_with_newer_ones(
    tmp_path: Path, engine: EngineProcess, workers: int
) -> None:
    folder = make_policy(tmp_path / "policy", kind="llama", tied=False, seed=5, max_position_embeddings=2048)
    (oldest, *others), parts = await engine.call(sampled_while_pushed, folder, workers)
    # The place of its adapters was needed: another replica would go on from what it has reported.
    assert isinstance(oldest, Unavailable)
    assert 0 < sum(len(part.response_ids) for part in parts) < 1700
    models = [adapted(folder, version) for version in range(VERSIONS + 1)]
    for version, sample in [(0, parts[0]), *enumerate(others, 1)]:
        assert sample.spans == ((version, 0, len(sample.response_ids)),)
        apart = []
        for model in models:
            [own] = plain.logprobs(model, [PROMPTS[0]], [sample.response_ids], vocabulary=len(WORDS))
            apart.append(float(np.abs(sample.logprobs - own).max()))
        print(version, len(sample.response_ids), apart)
        assert apart[version] < 2e-4
        assert min(apart[:version] + apart[version + 1 :]) > 0.1
