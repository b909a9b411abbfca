"""Compiled layers against the plain ones: log-probs, values, gradients, training; and how often they are compiled."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

from orchestrator.algorithms.registry import parse as parse_algorithm
from orchestrator.policy.trainer import PolicyTrainer
from quartet.columns import Columns
from quartet.config.base import ConfigError
from quartet.config.learner import LoraConfig, OptimizerConfig, PolicyConfig
from quartet.models.compiled import COMPILERS, compile_layers
from quartet.models.distribution import Distribution
from quartet.models.loading import load_causal
from quartet.models.scalar import load_value
from quartet.models.sequences import PairTensors, pair_tensors
from services.critic.config import CriticConfig
from services.critic.trainer import CriticTrainer
from services.reference.config import ReferenceConfig
from services.reference.model import FrozenModel
from tests import plain
from tests.families import FAMILIES
from tests.learner_batches import CriticBatch, PolicyBatch, logprob_rows, train_critic, train_policy, value_rows

ALWAYS, MOE = "gemma3", "qwen3-moe"
"""Layers of two kinds; and the family that is not compiled. The trainings below compile another one."""
NAMES = [
    pytest.param(name, marks=() if name == ALWAYS else pytest.mark.exhaustive) for name in FAMILIES if name != MOE
]
TRACED = "aot_eager"
"""A backend that traces and divides forward and backward pass as torch's own does, but makes no kernels."""
BATCHES = ((1, 3, False), (2, 2, False), (3, 5, False), (4, 4, True))
"""Seeds, numbers of pairs of any lengths, and whether all have one prompt of 20 tokens."""


@pytest.fixture(autouse=True)
def nothing_compiled() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def batch_of(seed: int, count: int, shared: bool, packing: bool) -> PairTensors:
    prompts, responses = plain.random_pairs(count, seed=seed, longest=20)
    prompts = [np.resize(prompts[0], 20)] * count if shared else prompts
    return pair_tensors(Columns.of_pairs(prompts, responses), torch.device("cpu"), packing=packing, last=False)


def gradients(model: nn.Module, value: torch.Tensor) -> list[torch.Tensor]:
    return list(torch.autograd.grad(value.square().sum(), list(model.parameters())))


def compare(models: tuple[Any, Any], packing: bool, tolerance: float) -> list[int]:
    """Checks log-probs and gradients of both models; the graphs compiled up to each batch."""
    distribution, graphs = Distribution(0.9), []
    for batch in BATCHES:
        pairs = batch_of(*batch, packing)
        with torch.no_grad():
            frozen = [distribution.asked_of(model, pairs)[0] for model in models]
        torch.testing.assert_close(*frozen, atol=tolerance, rtol=0)
        trained = [distribution.asked_of(model, pairs)[0] for model in models]
        torch.testing.assert_close(*trained, atol=tolerance, rtol=0)
        both = [gradients(model, value) for model, value in zip(models, trained, strict=True)]
        scale = max(float(gradient.abs().max()) for gradient in both[1])
        for one, other in zip(*both, strict=True):
            torch.testing.assert_close(one, other, atol=tolerance * scale, rtol=0)
        graphs.append(counters["stats"]["unique_graphs"])
    return graphs


@pytest.mark.parametrize("name", NAMES)
def test_each_family_computes_the_same_and_compiles_once(name: str, tmp_path: Path) -> None:
    """For other numbers of sequences and tokens nothing is compiled again."""
    family = FAMILIES[name]
    folder = str(family.make(tmp_path / name))
    compiled, reference = (load_causal(folder, "float32", packing=family.packs) for _ in range(2))
    compile_layers(compiled, TRACED)
    graphs = compare((compiled, reference), family.packs, 1e-5)
    assert graphs[0] > 0
    assert graphs == graphs[:1] * len(BATCHES)


@pytest.mark.exhaustive  # what is compiled is traced and divided above; the kernels change with torch's version only
@pytest.mark.parametrize("name", ["qwen2.5"])
def test_torchs_own_kernels_compute_the_same(name: str, tmp_path: Path) -> None:
    folder = str(FAMILIES[name].make(tmp_path / name))
    compiled, reference = (load_causal(folder, "float32", packing=True) for _ in range(2))
    compile_layers(compiled)
    graphs = compare((compiled, reference), True, 2e-5)
    assert graphs == graphs[:1] * len(BATCHES)


def traced(patch: pytest.MonkeyPatch) -> None:
    """Makes learners and frozen models compile with that backend."""
    for module in ("quartet.learner.module", "services.reference.model"):
        patch.setattr(f"{module}.compile_layers", lambda model: compile_layers(model, TRACED))


@pytest.mark.parametrize(
    "options",
    [
        {"packing": True, "gradient_checkpointing": True},
        {"lora": LoraConfig(rank=2), "zero_stage": 1, "micro_batch_tokens": 60},
        pytest.param({"zero_stage": 1, "micro_batch_tokens": 60}, marks=pytest.mark.exhaustive),
        pytest.param({"lora": LoraConfig(rank=2), "packing": True}, marks=pytest.mark.exhaustive),
    ],
)
def test_a_policy_trains_the_same(options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    traced(monkeypatch)
    folder = FAMILIES["qwen2.5"].make(tmp_path / "policy")
    prompts, responses = plain.random_pairs(6, seed=4, longest=20)
    rows = [np.linspace(-1, 1, len(response), dtype=np.float32) for response in responses]
    batch = PolicyBatch(prompts, responses, rows, None, rows, rows, 0.1)
    measured = []
    for compiled in (True, False):
        config = PolicyConfig(
            model=str(folder), optimizer=OptimizerConfig(learning_rate=1e-3), compile_layers=compiled, **options
        )
        algorithm = parse_algorithm({"epochs": 1, "minibatch_size": 6, "kl": {"coef": 0}})
        trainer = PolicyTrainer(config, algorithm, Distribution())
        measured.append([train_policy(trainer, batch, seed=step) for step in range(3)])
        assert (counters["stats"]["unique_graphs"] > 0) == compiled
        counters.clear()
    for one, other in zip(*measured, strict=True):
        assert one["loss"] == pytest.approx(other["loss"], abs=1e-5)
        assert one["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-4)


def test_a_critic_and_a_reference_compute_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    traced(monkeypatch)
    folder = str(FAMILIES["qwen2.5"].make(tmp_path / "policy"))
    prompts, responses = plain.random_pairs(4, seed=4, longest=20)
    values, logprobs = [], []
    for compiled in (True, False):
        counters.clear()
        config = CriticConfig(
            model=folder, optimizer=OptimizerConfig(learning_rate=1e-3), packing=True, compile_layers=compiled
        )
        critic = CriticTrainer(config)
        rows = [np.linspace(-1, 1, len(response), dtype=np.float32) for response in responses]
        train_critic(critic, CriticBatch(prompts, responses, rows, rows), epochs=1, minibatch_size=4, seed=0)
        values.append(value_rows(critic, prompts, responses))
        frozen = FrozenModel(
            ReferenceConfig(model=folder, packing=True, compile_layers=compiled),
            torch.device("cpu"),
        )
        logprobs.append(logprob_rows(frozen, prompts, responses, Distribution()))
        assert (counters["stats"]["unique_graphs"] > 0) == compiled
    assert plain.furthest(*values) < 1e-5
    assert plain.furthest(*logprobs) < 1e-5


def test_a_model_without_such_layers_is_refused(tmp_path: Path) -> None:
    model = load_value(str(FAMILIES["bos"].make(tmp_path / "bos")), "float32")
    model.body.layers = nn.ModuleList()  # type: ignore[assignment]
    with pytest.raises(ConfigError, match=r"compile_layers: llama has no layers of the kind that is compiled"):
        compile_layers(model)


def test_mixtures_of_experts_are_refused(tmp_path: Path) -> None:
    model = load_causal(str(FAMILIES[MOE].make(tmp_path / "moe")), "float32")
    with pytest.raises(ConfigError, match="compile_layers: mixtures of experts are not compiled"):
        compile_layers(model)


def test_a_machine_without_a_compiler_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = load_causal(str(FAMILIES["bos"].make(tmp_path / "bos")), "float32")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(ConfigError, match=r"compile_layers: needs a C compiler, such as gcc"):
        compile_layers(model)
    for name in COMPILERS[:1]:
        (tmp_path / name).write_text("")
        (tmp_path / name).chmod(0o755)
    compile_layers(model, TRACED)
