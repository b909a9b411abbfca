"""Proofs of pushes on a real engine: stale weights are noticed, and rounding is not taken for them."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from orchestrator.algorithms.ppo import PPO
from orchestrator.policy.trainer import PolicyTrainer
from orchestrator.push.prover import BOUNDS, Prover, PushDisproved
from orchestrator.push.tolerance import Tolerance
from quartet.config.learner import OptimizerConfig, PolicyConfig
from quartet.models.distribution import Distribution
from quartet.weight_transfer.manifest import Manifest
from quartet.weight_transfer.probe import probe_sequences
from quartet.wire.codec import Floats, Ints
from tests import plain
from tests.engine_process import EngineProcess
from tests.families import FAMILIES
from tests.models import MAX_LENGTH, WORDS, make_policy
from tests.pushing import ModelSource, TrainerSource, make_prover, make_pusher, perturbed


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
    disproved = (
        r"^version 2: only computes with other weights than were pushed: log-probs of .* tolerance 0\.0001; if"
    )
    with pytest.raises(PushDisproved, match=disproved):
        await pusher.push(2)


async def test_a_proof_names_the_layers_that_got_no_weights(engine: EngineProcess, tmp_path: Path) -> None:
    """A manifest with all weights of transformers' model may lack those of a layer in vLLM's."""
    folder = FAMILIES["bos"].make(tmp_path / "stale")
    model = plain.language_model(folder)
    await engine.start(folder)
    await engine.call(_take_any_manifest)
    lacking = ("lm_head.weight", "model.layers.1.mlp.down_proj.weight")
    source = ModelSource(model, lacking=lacking)
    await make_pusher(engine, source, make_prover(source)).push(1)
    perturbed(model, seed=1)
    named = r"; these got no weights: lm_head, model\.layers\.1\.mlp\.down_proj$"
    with pytest.raises(PushDisproved, match=rf"^version 2: only computes with other weights .* 0\.001{named}"):
        await make_pusher(engine, source, make_prover(source)).push(2)


class _AnyWeights:
    """An engine's check of manifests that takes all."""

    def check(self, manifest: Manifest) -> None:
        """Does nothing."""


def _take_any_manifest() -> None:
    """Runs in the process for engines."""
    from tests.engine_process import _hosts

    _hosts[0]._engine._expected = _AnyWeights()  # type: ignore[assignment]


class Deaf(TrainerSource):
    """A learner whose head moves after its weights were copied, by a part of their spread."""

    part = 0.0

    async def score(self, sequences: Sequence[Ints]) -> list[Floats]:
        """Log-probs with the moved head, which then goes back."""
        head = self.trainer.learner.module.lm_head.weight
        before = head.detach().clone()
        with torch.no_grad():
            noise = torch.randn(head.shape, generator=torch.Generator().manual_seed(0))
            head.add_(self.part * head.std() * noise.to(head.dtype))
        scored = await super().score(sequences)
        with torch.no_grad():
            head.copy_(before)
        return scored


@pytest.mark.parametrize("scale", [20, pytest.param(1, marks=pytest.mark.exhaustive)])
async def test_rounding_in_bfloat16_is_told_from_stale_weights(
    engine: EngineProcess, tmp_path: Path, scale: int
) -> None:
    """A model with logits of some tens, where both sides differ by half a nat, and one with small logits."""
    sizes = {"num_hidden_layers": 8, "hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
    folder = make_policy(tmp_path / "deep", kind="qwen2", tied=False, **sizes)
    model = plain.language_model(folder)
    with torch.no_grad():
        model.model.norm.weight.mul_(scale)
    model.save_pretrained(folder)
    await engine.start(folder, dtype="bfloat16")
    config = PolicyConfig(
        model=str(folder), dtype="bfloat16", zero_stage=1, optimizer=OptimizerConfig(learning_rate=1e-4)
    )
    source = Deaf(PolicyTrainer(config, PPO(epochs=1, minibatch_size=6), Distribution()))
    tolerance = Tolerance(*BOUNDS["bfloat16"])
    prover = Prover(source, probe_sequences(len(WORDS), MAX_LENGTH), tolerance, every=1)
    pusher = make_pusher(engine, source, prover)
    measured: list[Any] = [(await pusher.push(version)).difference for version in (1, 2)]
    print(scale, measured, tolerance.now)
    assert max(measured) < 0.05
    source.part = 0.3
    with pytest.raises(
        PushDisproved, match=r"^version 3: only computes with other weights .* raise weights\.prove_tol"
    ):
        await pusher.push(3)
