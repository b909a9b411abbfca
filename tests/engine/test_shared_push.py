"""Pushes through shared memory to a vLLM engine, against transformers."""

from pathlib import Path
from typing import Any

import pytest

from protos import rollout_pb2 as pb
from services.rollout.interface import NO_VERSION
from services.rollout.sample import Sampling
from tests import plain
from tests.engine_process import EngineProcess
from tests.models import make_policy
from tests.pushing import TIMEOUT_S, ModelSource, make_pusher, perturbed

PROMPTS, _ = plain.random_pairs(12, seed=11, longest=30)
GREEDY = Sampling(max_new_tokens=40, temperature=0)


# Tied heads are what pushes went wrong with.
@pytest.fixture(
    scope="module", params=[pytest.param(False, marks=pytest.mark.exhaustive), True], ids=["untied", "tied"]
)
async def loaded(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, engine: EngineProcess
) -> Any:
    """The model in transformers; the engine has the same."""
    folder: Path = make_policy(tmp_path_factory.mktemp("shared") / "policy", kind="qwen2", tied=request.param, seed=5)
    await engine.start(folder, weight_backend="ipc")
    return plain.language_model(folder)


async def shortfall(engine: EngineProcess, model: Any) -> float:
    """The distance of the engine's greedy tokens from the model's likeliest."""
    samples = await engine.generate(PROMPTS, GREEDY)
    responses = [sample.response_ids for sample in samples]
    return float(plain.shortfall(model, PROMPTS, responses, GREEDY.max_new_tokens))


@pytest.mark.parametrize("senders", [1, pytest.param(2, marks=pytest.mark.exhaustive)])  # two by gloo in test_engine
async def test_the_engine_equals_transformers_after_every_push(
    engine: EngineProcess, loaded: Any, senders: int
) -> None:
    source = ModelSource(loaded, senders=senders, backend="ipc")
    pusher = make_pusher(engine, source)
    for version in (10 * senders, 10 * senders + 1):
        perturbed(loaded, seed=version)
        report = await pusher.push(version)
        assert (report.policy_version, report.attempts) == (version, 1)
        assert await shortfall(engine, loaded) < 1e-4
    source.leave()


async def test_weights_that_change_while_they_are_loaded_are_never_served(engine: EngineProcess, loaded: Any) -> None:
    """A member that stood still before its commit, while the learner went on to other weights."""
    perturbed(loaded, seed=70)
    source, rollout = ModelSource(loaded, backend="ipc"), engine
    pusher = make_pusher(rollout, source)

    async def overtaken(timeout_s: float, members: Any = (), **phase: Any) -> list[pb.WeightReport]:
        if "commit" in phase:
            source._senders[0].load(source.tensors.items(), 99)
        return await rollout.update_weights(timeout_s, members, **phase)

    pusher._replicas._rollout = type("Overtaken", (), {"update_weights": staticmethod(overtaken)})()  # type: ignore[assignment]
    with pytest.raises(Exception, match="the learner wrote other weights while these were loaded"):
        await pusher.push(70)
    [lost] = await rollout.update_weights(TIMEOUT_S, discover=pb.Discover())
    assert lost.policy_version == NO_VERSION
    # The next push mends it.
    await make_pusher(rollout, source).push(71)
    assert await shortfall(engine, loaded) < 1e-4
    source.leave()
