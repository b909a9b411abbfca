"""A vLLM engine with its workers in processes of their own: two that share its layers, of which each is a member of a
push, or a single one."""

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
@pytest.mark.parametrize(("backend", "workers"), [("gloo", 2), ("ipc", 2), ("ipc", 1)])
async def test_workers_serve_what_was_pushed(
    engine: EngineProcess, tmp_path: Path, backend: str, workers: int
) -> None:
    folder = make_policy(tmp_path / "policy", kind="llama", tied=False, seed=5)
    model = plain.language_model(folder)
    own = {"tensor_parallel_size": workers} if workers > 1 else {"worker_process": True}
    await engine.start(folder, weight_backend=backend, **own)
    source = ModelSource(model, backend=backend)
    [report] = await engine.update_weights(TIMEOUT_S, discover=pb.Discover())
    assert report.workers == workers
    pusher = make_pusher(engine, source)
    for version in (1, 2):
        perturbed(model, seed=version)
        assert (await pusher.push(version)).attempts == 1
        samples = await engine.generate(PROMPTS, GREEDY)
        greedy = [sample.response_ids for sample in samples]
        assert plain.shortfall(model, PROMPTS, greedy, GREEDY.max_new_tokens) < 1e-4
    source.leave()
