"""A prompt of many responses in a real engine: computed once under the same weights, and again under others."""

import asyncio
from pathlib import Path

import numpy as np

from services.rollout.sample import Sampling
from services.rollout.vllm.arguments import CPU_BLOCK
from tests import plain
from tests.engine_process import EngineProcess
from tests.models import WORDS, make_policy
from tests.prefilled import prefilled
from tests.pushing import ModelSource, PushedHost, perturbed, push

LONGEST, GROUP = 512, 8
PROMPT = np.random.default_rng(5).integers(4, len(WORDS), 300).astype(np.int32)
REST = len(PROMPT) % CPU_BLOCK
"""Tokens after the last whole block, which every response computes."""
SAMPLING = Sampling(max_new_tokens=5, ignore_eos=True)


PUSHES = ("keep", "keep", "keep-cache", "keep-cache")
"""Treatments of what was computed before. The second push of a pair has the first one's number, as in a run that went
back to a checkpoint."""


async def computed(folder: Path) -> list[list[int]]:
    """Tokens of prompts computed for a group at once and for one more response: under the weights of the folder, and
    after each push."""
    host, counts = PushedHost(), []
    await host.start({"model": str(folder), "dtype": "float32", "max_length": LONGEST, "kv_cache_mib": 64})
    try:
        for seed, in_flight in enumerate(("", *PUSHES)):
            if seed:
                model = perturbed(plain.language_model(folder), seed=seed)
                await push(host, ModelSource(model), (seed + 1) // 2, in_flight=in_flight)
            for size in (GROUP, 1):
                with prefilled(host._engine) as counted:
                    await asyncio.gather(*(host._engine.generate(0, PROMPT, SAMPLING, n) for n in range(size)))
                counts.append(sorted(counted))
        return counts
    finally:
        await host.shutdown()


async def test_a_prompt_is_computed_once_for_all_responses_under_the_same_weights(
    tmp_path: Path, engine: EngineProcess
) -> None:
    """`keep-cache` leaves what was computed in the cache at a push: no later request finds it there."""
    folder = make_policy(tmp_path / "policy", kind="llama", tied=False, seed=5, max_position_embeddings=LONGEST)
    counts = await engine.call(computed, folder)
    assert counts == [[*[REST] * (GROUP - 1), len(PROMPT)], [REST]] * (1 + len(PUSHES))
