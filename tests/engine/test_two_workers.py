"""A vLLM engine whose layers two workers share: each of them is a member of a push."""

from pathlib import Path

import pytest

from protos import rollout_pb2 as pb
from services.rollout.sample import Sampling
from tests import plain
from tests.engine_process import EngineProcess
from tests.models import make_policy
from tests.pushing import TIMEOUT_S, ModelSource, make_pusher, perturbed

PROMPTS, _ = plain.random_pairs(12, seed=11, longest=30)
GREEDY = Sampling(max_new_tokens=40, temperature=0)


# Three processes that import vLLM; with which ranks workers join: tests/unit/services/rollout.
@pytest.mark.exhaustive
@pytest.mark.parametrize("backend", ["gloo", "ipc"])
async def test_two_workers_serve_what_was_pushed(engine: EngineProcess, tmp_path: Path, backend: str) -> None:
    folder = make_policy(tmp_path / "policy", kind="llama", tied=False, seed=5)
    model = plain.language_model(folder)
    await engine.start(folder, weight_backend=backend, tensor_parallel_size=2)
    source = ModelSource(model, backend=backend)
    [report] = await engine.update_weights(TIMEOUT_S, discover=pb.Discover())
    assert report.workers == 2
    pusher = make_pusher(engine, source)
    for version in (1, 2):
        perturbed(model, seed=version)
        assert (await pusher.push(version)).attempts == 1
        samples = await engine.generate(PROMPTS, GREEDY)
        greedy = [sample.response_ids for sample in samples]
        assert plain.shortfall(model, PROMPTS, greedy, GREEDY.max_new_tokens) < 1e-4
    source.leave()
