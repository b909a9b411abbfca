"""The vLLM engine against transformers, before and after pushes of other weights: two architectures, tied and not, by
gloo and through shared memory, to an engine in one process and to workers that share its layers."""

from collections.abc import AsyncIterator, Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from orchestrator.push.pusher import PushFailed
from protos import rollout_pb2 as pb
from quartet.wire.codec import Ints
from quartet.wire.errors import Unavailable
from services.rollout.interface import NO_VERSION
from services.rollout.sample import Sampling
from tests import plain
from tests.engine_process import EngineProcess
from tests.models import WORDS, make_policy
from tests.pushing import TIMEOUT_S, ModelSource, make_pusher, perturbed, push
from tests.sources import LocalSource

PROMPTS, _ = plain.random_pairs(12, seed=11, longest=30)
GREEDY = Sampling(max_new_tokens=40, temperature=0)


@dataclass(frozen=True)
class Loaded:
    """An engine, and the model it was loaded from in transformers."""

    model: Any
    engine: EngineProcess
    backend: str
    rounding: float
    """Most by which the same weights' log-probs differ: torch's sums depend on which requests share a batch, those
    of vLLM's packed weights do not."""
    sources: list[ModelSource] = field(default_factory=list)

    def source(self, senders: int = 1) -> ModelSource:
        """The learner's part of pushes of the model."""
        self.sources.append(ModelSource(self.model, senders, self.backend))
        return self.sources[-1]

    async def greedy(self) -> list[Ints]:
        return [sample.response_ids for sample in await self.engine.generate(PROMPTS, GREEDY)]

    async def check(self, version: int) -> None:
        """Greedy tokens are the likeliest of transformers, sampled ones have its log-probs, all of this version."""
        assert plain.shortfall(self.model, PROMPTS, await self.greedy(), GREEDY.max_new_tokens) < 1e-4
        for temperature in (1.0, 0.7):
            samples = await self.engine.generate(PROMPTS, Sampling(max_new_tokens=40, temperature=temperature))
            responses = [s.response_ids for s in samples]
            expected = plain.logprobs(self.model, PROMPTS, responses, temperature, len(WORDS))
            assert plain.furthest([sample.logprobs for sample in samples], expected) < 1e-4
            assert {sample.spans for sample in samples} == {((version, 0, len(s.response_ids)),) for s in samples}


MORE = pytest.mark.exhaustive
SHARED = {"weight_backend": "ipc"}
KINDS: dict[str, tuple[Any, bool, dict[str, Any]]] = {
    "llama": ("llama", False, {}),
    "llama-tied": ("llama", True, {}),
    "qwen2": ("qwen2", False, {}),
    "qwen2-tied": ("qwen2", True, {}),
    # Tied heads are what pushes through shared memory went wrong with.
    "shared": ("qwen2", True, SHARED),
    "shared, untied": ("qwen2", False, SHARED),
    # Three processes that import vLLM; with which ranks workers join: tests/unit/services/rollout.
    "two workers": ("llama", False, {"tensor_parallel_size": 2}),
    "shared, two workers": ("llama", False, SHARED | {"tensor_parallel_size": 2}),
    "plain, two workers": ("qwen2", False, {"tensor_parallel_size": 2, "plain": True}),
    "plain, shared, two workers": ("qwen2", True, SHARED | {"tensor_parallel_size": 2, "plain": True}),
    "shared, a worker's process": ("llama", False, SHARED | {"worker_process": True}),
}
"""Architecture, tied or not, and settings of the engine."""


def of_kinds(*names: str) -> pytest.MarkDecorator:
    """Runs a test with these kinds: three of them always, and others in the exhaustive tier."""
    always = ("llama", "shared", "plain, two workers")
    kinds = [pytest.param(KINDS[name], id=name, marks=() if name in always else MORE) for name in names]
    return pytest.mark.parametrize("loaded", kinds, indirect=True)


# Of other architectures test_families.py pushes one each.
every_model = of_kinds("llama", "llama-tied", "qwen2", "qwen2-tied")


@pytest.fixture(scope="module")
async def loaded(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, engine: EngineProcess
) -> AsyncIterator[Loaded]:
    """An engine with each kind of model."""
    kind, tied, settings = request.param
    folder: Path = make_policy(tmp_path_factory.mktemp("engine") / "policy", kind=kind, tied=tied, seed=5)
    await engine.start(folder, **settings)
    [report] = await engine.update_weights(TIMEOUT_S, discover=pb.Discover())
    assert report.workers == settings.get("tensor_parallel_size", 1)
    rounding = 1e-5 if settings.get("plain") else 0.0
    made = Loaded(plain.language_model(folder), engine, settings.get("weight_backend", "gloo"), rounding)
    yield made
    for source in made.sources:
        source.leave()


@of_kinds(*KINDS)
async def test_it_equals_transformers_before_and_after_every_push(loaded: Loaded) -> None:
    [begun] = await loaded.engine.update_weights(TIMEOUT_S, discover=pb.Discover())
    await loaded.check(begun.policy_version)
    before = await loaded.greedy()
    source = loaded.source()
    for version in (begun.policy_version + 3, begun.policy_version + 4):
        perturbed(loaded.model, seed=version)
        report = await push(loaded.engine, source, version)
        assert (report.policy_version, report.replicas, report.attempts) == (version, ("only",), 1)
        await loaded.check(version)
        after = await loaded.greedy()
        assert plain.shortfall(loaded.model, PROMPTS, before, GREEDY.max_new_tokens) > 0.1
        before = after


@of_kinds("plain, two workers")
async def test_each_worker_keeps_its_part_of_a_push_once_the_first_has_shown_it(loaded: Loaded) -> None:
    """With plain weights, as on a GPU."""
    source, total = loaded.source(), sum(parameter.nbytes for parameter in loaded.model.parameters())
    for version in (20, 21):
        perturbed(loaded.model, seed=version)
        await push(loaded.engine, source, version)
        await loaded.check(version)
    kept = await loaded.engine.in_workers("kept_bytes")
    assert len(kept) == 2
    assert max(kept) / total < 0.55  # the first has 192 of the 335 rows of the embeddings and the head
    assert 1 <= sum(kept) / total < 1.01  # both have the norms


@of_kinds("plain, two workers")
async def test_the_workers_memory_goes_away_with_them(loaded: Loaded) -> None:
    """However they end: it has no name that would keep it."""
    opened = await loaded.engine.in_workers("shared_memory")
    assert [len(set(names)) for names in opened] == [2, 2]
    assert all(name.endswith(" (deleted)") for names in opened for name in names)


@of_kinds("plain, two workers")
async def test_another_learner_may_send_other_buckets_or_another_order(loaded: Loaded) -> None:
    """Workers know their parts in other buckets already, and learn them again of weights in another order."""
    weights, engine = dict(loaded.model.named_parameters()), loaded.engine
    backwards = dict(reversed(weights.items()))
    await push(engine, loaded.source(), 30)
    sent = [(weights, 30_000, [True, True]), (backwards, 30_000, [False, True]), (backwards, 90_000, [True])]
    version = 30
    for tensors, bucket_bytes, known in sent:
        source = LocalSource(tensors, bucket_bytes=bucket_bytes, stall_s=TIMEOUT_S, backend=loaded.backend)
        for knows in known:
            version += 1
            perturbed(loaded.model, seed=version)
            await push(engine, source, version)
            await loaded.check(version)
            assert [kept > 0 for kept in await engine.in_workers("kept_bytes")] == [knows] * 2
        source.leave()


@of_kinds("llama", "llama-tied", "qwen2", "qwen2-tied", "plain, two workers")
async def test_a_push_that_breaks_off_leaves_the_old_weights_whole(loaded: Loaded) -> None:
    """The sender leaves in the middle; the same weights arrive with the next push."""
    [old] = await loaded.engine.update_weights(TIMEOUT_S, discover=pb.Discover())
    seeded = Sampling(max_new_tokens=40)
    before = await loaded.engine.generate(PROMPTS, seeded)
    perturbed(loaded.model, seed=99)
    source = loaded.source()
    source.midway = source.leave
    with pytest.raises(PushFailed, match=r"version 50 after 1 attempts: only: transfer: \w+"):
        await push(loaded.engine, source, 50)
    after = await loaded.engine.generate(PROMPTS, seeded)
    for left, right in zip(before, after, strict=True):
        assert np.array_equal(left.response_ids, right.response_ids)
        assert np.allclose(left.logprobs, right.logprobs, rtol=0, atol=loaded.rounding)
        assert right.policy_version == old.policy_version
    report = await push(loaded.engine, source, 51)
    assert report.attempts == 1
    await loaded.check(version=51)


@of_kinds("llama", "llama-tied", "qwen2", "qwen2-tied", "shared, untied", "plain, two workers")
async def test_two_senders_bring_the_same_weights_as_one(loaded: Loaded) -> None:
    perturbed(loaded.model, seed=101)
    one = await push(loaded.engine, loaded.source(), 70)
    two = await push(loaded.engine, loaded.source(senders=2), 71)
    assert two.checksum == one.checksum
    await loaded.check(version=71)


class Interrupted:
    """The engine behind a wire that loses replies, repeats calls or lets a phase take no time."""

    def __init__(self, engine: EngineProcess, broken: str) -> None:
        self._engine, self._broken = engine, broken

    async def update_weights(
        self, timeout_s: float, members: Collection[str] = (), **phase: Any
    ) -> list[pb.WeightReport]:
        if "abort" in phase and self._broken != "repeated":
            raise Unavailable("the abort is lost")
        reports = await self._engine.update_weights(timeout_s, members, **phase)
        if self._broken == "repeated" and "abort" not in phase:
            assert await self._engine.update_weights(timeout_s, members, **phase) == reports
        if self._broken in phase:
            raise Unavailable("the reply is lost")
        return reports


@every_model
async def test_a_push_closes_what_others_left_open(loaded: Loaded) -> None:
    """Whatever was left: the prepare or the transfer of a push whose caller is gone, an update that the engine opened
    after its caller had given up on it, or a prepare that was cut off at any moment. One attempt is enough."""
    engine, source = loaded.engine, loaded.source()
    for version, broken in ((90, "prepare"), (92, "transfer")):
        with pytest.raises(PushFailed, match="the reply is lost"):
            await push(Interrupted(engine, broken), source, version)
        await push(engine, source, version + 1)
    await engine.leave_open()
    perturbed(loaded.model, seed=105)
    await push(engine, source, 94)
    await loaded.check(version=94)
    pusher = make_pusher(engine, source)
    for version, timeout_s in ((95, 1e-3), (96, 3e-3), (97, 1e-2)):
        await pusher.push(version)
        # The group is there; only the pause and the opening are left, and the deadline comes in one of them or later.
        [cut_off] = await engine.update_weights(timeout_s, prepare=pusher._group.prepare())
        print(f"\n{timeout_s:g} s: {cut_off.error or 'opened'}")
    report = await push(Interrupted(engine, "repeated"), source, 98)
    assert report.attempts == 1
    await loaded.check(version=98)


@every_model
async def test_a_push_is_repeated_when_an_attempt_fails(loaded: Loaded) -> None:
    perturbed(loaded.model, seed=100)
    source = loaded.source()
    source.midway = source.leave
    report = await push(loaded.engine, source, 60, attempts=2)
    assert report.attempts == 2
    await loaded.check(version=60)


@of_kinds("shared", "shared, untied")
async def test_weights_that_change_while_they_are_loaded_are_never_served(loaded: Loaded) -> None:
    """A member that stood still before its commit, while the learner went on to other weights."""
    perturbed(loaded.model, seed=80)
    source, engine = loaded.source(), loaded.engine
    pusher = make_pusher(engine, source)

    async def overtaken(timeout_s: float, members: Any = (), **phase: Any) -> list[pb.WeightReport]:
        if "commit" in phase:
            source._senders[0].load(source.tensors.items(), 99)
        return await engine.update_weights(timeout_s, members, **phase)

    pusher._replicas._rollout = type("Overtaken", (), {"update_weights": staticmethod(overtaken)})()  # type: ignore[assignment]
    with pytest.raises(PushFailed, match="the learner wrote other weights while these were loaded"):
        await pusher.push(80)
    [lost] = await engine.update_weights(TIMEOUT_S, discover=pb.Discover())
    assert lost.policy_version == NO_VERSION
    # The next push mends it.
    await make_pusher(engine, source).push(81)
    await loaded.check(version=81)
