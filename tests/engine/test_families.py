"""Published architectures in miniature: engine, reference and learner agree, before training, after each push
and on the saved model.

The family of every test run is the one whose pushes went wrong; `-m exhaustive` runs the others (docs/models.md).
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from orchestrator.config.algorithm import PPOConfig
from orchestrator.policy.trainer import PolicyBatch, PolicyTrainer
from orchestrator.push.prover import PushDisproved
from services.common.config.learner import LoraConfig, OptimizerConfig, PolicyConfig
from services.common.learner.lora import weights_of
from services.common.models.distribution import Distribution, end_ids
from services.common.models.loading import load_tokenizer
from services.common.wire.identity import vocabulary_size
from services.reference.config import ReferenceConfig
from services.reference.model import FrozenModel, Question
from services.rollout.sample import Sample, Sampling
from tests import plain
from tests.engine_process import EngineProcess
from tests.families import FAMILIES
from tests.models import EOS, WORDS
from tests.pushing import ModelSource, TrainerSource, make_prover, make_pusher, perturbed

PROMPTS, _ = plain.random_pairs(6, seed=11, longest=24)
STEPS = 5
CLOSE = 1e-4


def each(always: str) -> list[Any]:
    """All families; all but `always` only in the exhaustive tier."""
    return [pytest.param(name, marks=() if name == always else pytest.mark.exhaustive) for name in FAMILIES]


class Agreement:
    """A learner and a reference beside the engine, all from one folder."""

    def __init__(self, engine: EngineProcess, folder: Path, lora: LoraConfig | None = None) -> None:
        tokenizer = load_tokenizer(str(folder))
        self.engine = engine
        self.sampling = Sampling(max_new_tokens=30, min_new_tokens=3)
        self.distribution = Distribution(
            vocabulary=vocabulary_size(tokenizer), min_new_tokens=3, end_ids=end_ids(str(folder), tokenizer)
        )
        config = PolicyConfig(model=str(folder), optimizer=OptimizerConfig(learning_rate=3e-3), lora=lora)
        self.learner = PolicyTrainer(config, PPOConfig(epochs=1, minibatch_size=6), self.distribution)
        self.reference = FrozenModel(ReferenceConfig(model=str(folder), dtype="float32"), torch.device("cpu"))

    async def sample(self) -> list[Sample]:
        return await self.engine.generate(PROMPTS, self.sampling)

    def of_learner(self, samples: list[Sample]) -> float:
        """Largest difference of log-probs between engine and learner."""
        responses = [sample.response_ids for sample in samples]
        return plain.furthest([s.logprobs for s in samples], self.learner.logprobs(PROMPTS, responses))

    def of_reference(self, samples: list[Sample]) -> float:
        asked = [Question(p, s.response_ids, self.distribution) for p, s in zip(PROMPTS, samples, strict=True)]
        return plain.furthest([s.logprobs for s in samples], self.reference.logprobs(asked))

    def weights(self) -> dict[str, torch.Tensor]:
        return {name: tensor.detach().clone() for name, tensor in self.learner._learner.full_weights()}

    def adapted(self) -> set[str]:
        """Names of the weights that have an adapter."""
        return {weight.name for weight in weights_of(self.learner._learner.module) if weight.layer is not None}

    def moved(self, before: dict[str, torch.Tensor]) -> set[str]:
        """Names of the weights that differ from `before`."""
        return {name for name, tensor in self.weights().items() if not torch.equal(tensor, before[name])}

    async def saved(self, folder: Path) -> float:
        """Largest difference of log-probs between the learner and an engine that loads what the learner saves."""
        self.learner.snapshots.save(str(folder))
        await self.engine.start(folder)
        return self.of_learner(await self.sample())

    def train(self, samples: list[Sample]) -> float:
        """Some steps at a rate that moves every weight; the first log-ratio."""
        responses = [sample.response_ids for sample in samples]
        old = self.learner.logprobs(PROMPTS, responses)
        rng = np.random.default_rng(0)
        advantages = [rng.standard_normal(len(row)).astype(np.float32) for row in old]
        batch = PolicyBatch(PROMPTS, responses, [s.logprobs for s in samples], old, old, advantages, 0.0)
        first, *_ = [self.learner.train(batch, seed)["first_log_ratio_max"] for seed in range(STEPS)]
        return first


@pytest.mark.parametrize("backend", ["gloo", pytest.param("ipc", marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("name", each("gpt2"))
async def test_engine_reference_and_learner_agree(
    engine: EngineProcess, tmp_path: Path, name: str, backend: str
) -> None:
    folder = FAMILIES[name].make(tmp_path / name)
    await engine.start(folder, weight_backend=backend)
    sides = Agreement(engine, folder)
    samples = await sides.sample()
    assert max(sample.response_ids.max() for sample in samples) < sides.distribution.vocabulary  # type: ignore[operator]
    assert min(len(sample.response_ids) for sample in samples) >= 3
    actual = {"learner": sides.of_learner(samples), "reference": sides.of_reference(samples)}
    source = TrainerSource(sides.learner, backend)
    before = sides.weights()
    for version, streaming in ((1, False), (2, backend == "gloo"), (3, False)):
        assert sides.train(samples) < CLOSE
        pusher = make_pusher(engine, source, make_prover(source), streaming=streaming)
        await pusher.push(version)
        samples = await sides.sample()
        assert {sample.policy_version for sample in samples} == {version}
        actual[f"version {version}"] = sides.of_learner(samples)
    print(name, backend, actual)
    assert max(actual.values()) < CLOSE
    assert sides.moved(before) == before.keys()
    assert sides.of_reference(samples) > 0.01
    assert await sides.saved(tmp_path / "saved") < CLOSE


@pytest.mark.parametrize("name", each("qwen2.5"))
async def test_adapters_are_pushed_merged(engine: EngineProcess, tmp_path: Path, name: str) -> None:
    folder = FAMILIES[name].make(tmp_path / name)
    await engine.start(folder)
    sides = Agreement(engine, folder, LoraConfig(rank=4))
    samples = await sides.sample()
    source, before = TrainerSource(sides.learner), sides.weights()
    actual = {"fresh": sides.of_learner(samples)}
    for version, streaming in ((1, False), (2, True)):
        assert sides.train(samples) < CLOSE
        await make_pusher(engine, source, make_prover(source), streaming=streaming).push(version)
        samples = await sides.sample()
        assert {sample.policy_version for sample in samples} == {version}
        actual[f"version {version}"] = sides.of_learner(samples)
    assert sides.moved(before) == sides.adapted()
    assert sides.of_reference(samples) > 0.01
    print(name, "adapters", actual)
    assert max(actual.values()) < CLOSE


async def test_padding_and_early_ends_are_not_sampled_however_likely(engine: EngineProcess, tmp_path: Path) -> None:
    folder = FAMILIES["qwen3"].make(tmp_path / "padded")
    model = plain.language_model(folder)
    with torch.no_grad():
        model.lm_head.weight[EOS] *= 2
    model.save_pretrained(folder)
    await engine.start(folder)
    sampling = Sampling(max_new_tokens=12, min_new_tokens=5, temperature=1.5)
    samples = await engine.generate([prompt for prompt in PROMPTS for _ in range(8)], sampling)
    assert max(sample.response_ids.max() for sample in samples) < len(WORDS)
    assert min(len(sample.response_ids) for sample in samples) >= 5
    assert any(sample.response_ids[-1] == EOS for sample in samples)


async def test_a_push_that_leaves_weights_stale_is_disproved(engine: EngineProcess, tmp_path: Path) -> None:
    """Bytes that arrive are not yet what is computed with."""
    folder = FAMILIES["bos"].make(tmp_path / "stale")
    model = plain.language_model(folder)
    await engine.start(folder)
    source = ModelSource(model)
    pusher = make_pusher(engine, source, make_prover(source))
    await pusher.push(1)
    perturbed(model, seed=1)
    source.tensors = {**source.tensors, "lm_head.weight": source.tensors["lm_head.weight"].detach().clone()}
    perturbed(model.lm_head, seed=2)
    with pytest.raises(PushDisproved, match=r"^version 2: only computes with other weights than were pushed: log-pr"):
        await pusher.push(2)
