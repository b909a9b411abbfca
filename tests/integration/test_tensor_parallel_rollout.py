"""A vLLM engine whose layers two workers share: each of them is a member of a push."""

from pathlib import Path
from typing import Any

import pytest

from protos import rollout_pb2 as pb
from services.rollout.sample import Sampling
from tests import plain
from tests.models import make_policy
from tests.pushing import TIMEOUT_S, ModelSource, OneEngine, make_pusher, perturbed

PROMPTS, _ = plain.random_pairs(12, seed=11, longest=30)
GREEDY = Sampling(max_new_tokens=40, temperature=0)


@pytest.mark.parametrize("backend", ["gloo", "ipc"])
async def test_two_workers_serve_what_was_pushed(host: Any, tmp_path: Path, backend: str) -> None:
    folder = make_policy(tmp_path / "policy", kind="llama", tied=False, seed=5)
    model = plain.language_model(folder)
    sizes = {"max_length": 128, "kv_cache_mib": 64, "tensor_parallel_size": 2}
    await host.start.remote({"model": str(folder), "dtype": "float32", "weight_backend": backend, **sizes})
    try:
        rollout, source = OneEngine(host), ModelSource(model, backend=backend)
        [there] = await rollout.update_weights(TIMEOUT_S, discover=pb.Discover())
        assert there.workers == 2
        pusher = make_pusher(rollout, source)
        for version in (1, 2):
            perturbed(model, seed=version)
            assert (await pusher.push(version)).attempts == 1
            samples = await host.generate.remote(PROMPTS, GREEDY)
            greedy = [sample.response_ids.tolist() for sample in samples]
            assert greedy == plain.greedy(model, PROMPTS, GREEDY.max_new_tokens)
        source.leave()
    finally:
        await host.shutdown.remote()
