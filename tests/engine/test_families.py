"""Published architectures in miniature: engine, reference and learner agree, before training, after each push
and on the saved model.

The family of every test run is the one whose pushes went wrong; `-m exhaustive` runs the others (docs/models.md).
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from orchestrator.algorithms.ppo import PPO
from orchestrator.policy.sampled import sampled_from
from orchestrator.policy.trainer import PolicyTrainer
from quartet.config.base import ConfigError
from quartet.config.learner import LoraConfig, OptimizerConfig, PolicyConfig
from quartet.learner.lora import weights_of
from quartet.models.loading import load_tokenizer
from quartet.weight_transfer.manifest import Manifest
from quartet.wire.codec import Floats
from services.reference.config import ReferenceConfig
from services.reference.model import FrozenModel
from services.rollout.sample import Sample, Sampling
from tests import plain
from tests.engine_process import EngineProcess
from tests.families import FAMILIES
from tests.learner_batches import PolicyBatch, logprob_rows, train_policy
from tests.models import EOS, WORDS
from tests.pushing import TrainerSource, make_prover, make_pusher
from tests.unit.fakes import make_config

PROMPTS, _ = plain.random_pairs(6, seed=11, longest=24)
STOPS = (9, 11)
STEPS = 5
CLOSE = 1e-4


LORA = LoraConfig(rank=4, alpha=10)
ADAPTED = [name for name in FAMILIES if name not in ("gpt2", "qwen3-moe")]
"""Families of which vLLM can compute with adapters: not GPT-2, nor experts that are in one parameter."""


def each(always: str, names: Iterable[str] = FAMILIES) -> list[Any]:
    """All families; all but `always` only in the exhaustive tier."""
    return [pytest.param(name, marks=() if name == always else pytest.mark.exhaustive) for name in names]


class Agreement:
    """A learner and a reference beside the engine, all from one folder."""

    def __init__(
        self,
        engine: EngineProcess,
        folder: Path,
        lora: LoraConfig | None = None,
        *,
        adapters: bool = False,
        **sampling: Any,
    ) -> None:
        sampling = {"max_new_tokens": 30, "min_new_tokens": 3} | sampling
        self.engine = engine
        self.prompts = PROMPTS
        self.sampling = Sampling(**sampling)
        self.distribution = sampled_from(make_config(folder, sampling=sampling), load_tokenizer(str(folder)))
        config = PolicyConfig(model=str(folder), optimizer=OptimizerConfig(learning_rate=3e-3), lora=lora)
        algorithm = PPO(epochs=1, minibatch_size=6)
        self.learner = PolicyTrainer(config, algorithm, self.distribution, adapters=adapters)
        self.reference = _reference(folder)

    async def sample(self) -> list[Sample]:
        return await self.engine.generate(self.prompts, self.sampling)

    def by_learner(self, samples: list[Sample]) -> list[Floats]:
        """The learner's log-probs of what the engine sampled."""
        logprobs: list[Floats] = logprob_rows(self.learner, self.prompts, [s.response_ids for s in samples])
        return logprobs

    def by_reference(self, samples: list[Sample], **distribution: Any) -> list[Floats]:
        """The reference's; `distribution` replaces fields of the distribution."""
        asked = replace(self.distribution, **distribution)
        return logprob_rows(self.reference, self.prompts, [s.response_ids for s in samples], asked)

    def of_learner(self, samples: list[Sample]) -> float:
        """Largest difference of log-probs between engine and learner."""
        return plain.furthest([s.logprobs for s in samples], self.by_learner(samples))

    def of_reference(self, samples: list[Sample]) -> float:
        return plain.furthest([s.logprobs for s in samples], self.by_reference(samples))

    def weights(self) -> dict[str, torch.Tensor]:
        return {name: tensor.detach().clone() for name, tensor in self.learner.learner.full_weights()}

    def adapted(self) -> set[str]:
        """Names of the weights that have an adapter."""
        return {weight.name for weight in weights_of(self.learner.learner.module) if weight.layer is not None}

    def moved(self, before: dict[str, torch.Tensor]) -> set[str]:
        """Names of the weights that differ from `before`."""
        return {name for name, tensor in self.weights().items() if not torch.equal(tensor, before[name])}

    async def saved(self, folder: Path) -> dict[str, float]:
        """Largest difference of log-probs between the learner and each of an engine and a reference that load what
        the learner saves."""
        self.learner.learner.save(folder)
        self.reference = _reference(folder)
        await self.engine.start(folder)
        samples = await self.sample()
        return {
            "saved, engine": self.of_learner(samples),
            "saved, reference": plain.furthest(self.by_reference(samples), self.by_learner(samples)),
        }

    def train(self, samples: list[Sample]) -> float:
        """Some steps at a rate that moves every weight; the first log-ratio."""
        responses = [sample.response_ids for sample in samples]
        old = logprob_rows(self.learner, PROMPTS, responses)
        rng = np.random.default_rng(0)
        advantages = [rng.standard_normal(len(row)).astype(np.float32) for row in old]
        batch = PolicyBatch(PROMPTS, responses, [s.logprobs for s in samples], old, old, advantages, 0.0)
        first, *_ = [train_policy(self.learner, batch, seed)["first_log_ratio_max"] for seed in range(STEPS)]
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
    for version in (1, 2, 3):
        assert sides.train(samples) < CLOSE
        pusher = make_pusher(engine, source, make_prover(source))
        await pusher.push(version)
        samples = await sides.sample()
        assert {sample.policy_version for sample in samples} == {version}
        actual[f"version {version}"] = sides.of_learner(samples)
    assert sides.moved(before) == before.keys()
    assert sides.of_reference(samples) > 0.01
    actual |= await sides.saved(tmp_path / "saved")
    print(name, backend, actual)
    assert max(actual.values()) < CLOSE


async def pushes_agree(sides: Agreement, source: TrainerSource) -> dict[str, float]:
    """Largest difference of log-probs between engine and learner, before training and after each of two pushes. Only
    what has an adapter moves."""
    samples, before = await sides.sample(), sides.weights()
    actual = {"fresh": sides.of_learner(samples)}
    for version in (1, 2):
        assert sides.train(samples) < CLOSE
        await make_pusher(sides.engine, source, make_prover(source)).push(version)
        samples = await sides.sample()
        assert {sample.policy_version for sample in samples} == {version}
        actual[f"version {version}"] = sides.of_learner(samples)
    assert sides.moved(before) == sides.adapted()
    assert sides.of_reference(samples) > 0.01
    return actual


@pytest.mark.parametrize("name", each("qwen2.5"))
async def test_adapters_are_pushed_merged(engine: EngineProcess, tmp_path: Path, name: str) -> None:
    folder = FAMILIES[name].make(tmp_path / name)
    await engine.start(folder)
    sides = Agreement(engine, folder, LORA)
    actual = await pushes_agree(sides, TrainerSource(sides.learner))
    print(name, "adapters", actual)
    assert max(actual.values()) < CLOSE


@pytest.mark.parametrize(
    ("name", "backend", "workers", "targets"),
    [
        *(pytest.param(*one.values, "gloo", 1, None, marks=one.marks) for one in each("qwen2.5", ADAPTED)),
        pytest.param("qwen2.5", "ipc", 1, None, marks=pytest.mark.exhaustive),
        pytest.param("qwen3", "ipc", 2, None, marks=pytest.mark.exhaustive),
        # Parts of layers that are one in the engine.
        pytest.param("qwen3", "ipc", 2, ("q_proj", "v_proj", "up_proj"), marks=pytest.mark.exhaustive),
        pytest.param("qwen2.5", "gloo", 1, ("k_proj", "layers.0.mlp.up_proj"), marks=pytest.mark.exhaustive),
    ],
)
async def test_adapters_are_pushed_alone(
    engine: EngineProcess, tmp_path: Path, name: str, backend: str, workers: int, targets: tuple[str, ...] | None
) -> None:
    folder = FAMILIES[name].make(tmp_path / name)
    own: dict[str, Any] = {"weight_backend": backend, "tensor_parallel_size": workers}
    given = {"rank": LORA.rank, "target_modules": targets, "alpha": 1}  # alpha is the learner's alone
    await engine.start(folder, adapters=given, **own)
    sides = Agreement(engine, folder, LORA.model_copy(update={"target_modules": targets}), adapters=True)
    source = TrainerSource(sides.learner, backend)
    actual = await pushes_agree(sides, source)
    sent = Manifest.unpack(await source.manifest()).names
    assert {name.rpartition(".lora_")[0] for name in sent} == {
        name.removesuffix(".weight") for name in sides.adapted()
    }
    print(name, backend, workers, "adapters alone", actual)
    assert max(actual.values()) < CLOSE


async def test_a_model_for_which_vllm_has_no_adapters_is_named(engine: EngineProcess, tmp_path: Path) -> None:
    folder = FAMILIES["gpt2"].make(tmp_path / "gpt2")
    with pytest.raises(ConfigError, match=r"rollout.args.adapters: vLLM has none for GPT2LMHeadModel; leave it"):
        await engine.start(folder, adapters=LORA.model_dump())


async def test_padding_and_early_ends_have_probability_0_on_all_sides(engine: EngineProcess, tmp_path: Path) -> None:
    folder = FAMILIES["qwen3"].make(tmp_path / "padded")
    model = plain.language_model(folder)
    with torch.no_grad():
        model.lm_head.weight[EOS] *= 2
    model.save_pretrained(folder)
    await engine.start(folder)
    sides = Agreement(
        engine, folder, max_new_tokens=12, min_new_tokens=5, temperature=1.5, stop_token_ids=list(STOPS)
    )
    sides.prompts = [prompt for prompt in PROMPTS for _ in range(8)]
    samples = await sides.sample()
    assert max(sample.response_ids.max() for sample in samples) < len(WORDS)
    assert min(len(sample.response_ids) for sample in samples) >= 5
    assert {sample.response_ids[-1] for sample in samples} >= {EOS, *STOPS}
    assert not {EOS, *STOPS} & {token for sample in samples for token in sample.response_ids[:-1].tolist()}
    early, later = _divided([sample.logprobs for sample in samples], 5)
    for expected in (sides.by_learner(samples), sides.by_reference(samples)):
        assert plain.furthest(early, _divided(expected, 5)[0]) < CLOSE
        assert plain.furthest(later, _divided(expected, 5)[1]) < CLOSE
    # Stop tokens change the distribution, and only below the minimum.
    without_stops = _divided(sides.by_reference(samples, end_ids=(EOS,)), 5)
    assert plain.furthest(early, without_stops[0]) > 0.01
    assert plain.furthest(later, without_stops[1]) < CLOSE


def _reference(folder: Path) -> FrozenModel:
    return FrozenModel(ReferenceConfig(model=str(folder), dtype="float32"), torch.device("cpu"))


def _divided(rows: Sequence[Floats], at: int) -> tuple[list[Floats], list[Floats]]:
    """The rows up to a column, and from there on."""
    return [row[:at] for row in rows], [row[at:] for row in rows]
