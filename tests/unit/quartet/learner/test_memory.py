"""The sums of a learner's memory, against the bytes that torch and DeepSpeed allocate in steps of small models."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedConfig, Qwen2Config, Qwen3Config

from orchestrator.algorithms.ppo import PPO
from orchestrator.policy.trainer import PolicyTrainer
from quartet.config import learner as learner_config
from quartet.config.learner import OptimizerConfig, PolicyConfig
from quartet.learner import memory, module
from quartet.learner.memory import kept_bytes, learner_bytes
from quartet.models.compiled import compile_layers
from quartet.models.distribution import Distribution
from quartet.models.size import ModelSize
from quartet.models.tiles import TILE_ELEMENTS
from services.critic.config import CriticConfig
from services.critic.trainer import CriticTrainer
from tests.learner_batches import CriticBatch, PolicyBatch, train_critic, train_policy
from tests.unit.allocations import Allocations

OPTIMIZER = OptimizerConfig(learning_rate=1e-4)
LENGTH, PROMPT = 64, 2
KINDS: dict[str, type[PreTrainedConfig]] = {"qwen2": Qwen2Config, "qwen3": Qwen3Config, "llama": LlamaConfig}
BF16: dict[str, Any] = {"dtype": "bfloat16", "zero_stage": 1}


def described(kind: str = "qwen2", **sizes: int) -> PreTrainedConfig:
    """A model whose layers have the proportions of those of 1.5B parameters."""
    given: dict[str, Any] = {
        "vocab_size": 2000,
        "hidden_size": 192,
        "intermediate_size": 1024,
        "num_hidden_layers": 3,
    }
    given |= {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 32}
    return KINDS[kind](**given | sizes, tie_word_embeddings=False)


@pytest.fixture(autouse=True)
def pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles of a size that small models have several of."""
    for device in TILE_ELEMENTS:
        monkeypatch.setitem(TILE_ELEMENTS, device, 1 << 20)


def trainer_of(folder: Path, config: PreTrainedConfig, *, policy: bool, tokens: int, **fields: Any) -> Any:
    """A trainer, its section, and an update of two micro-batches of so many tokens."""
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).to(torch.bfloat16).save_pretrained(folder)
    given: dict[str, Any] = {"model": str(folder), "optimizer": OPTIMIZER, "micro_batch_tokens": tokens} | fields
    count = 2 * tokens // LENGTH
    rows = [np.full(LENGTH, 2 + index, np.int32) for index in range(count)]
    prompts, responses = [row[:PROMPT] for row in rows], [row[PROMPT:] for row in rows]
    numbers = [np.full(LENGTH - PROMPT, -3.0, np.float32)] * count
    if policy:
        learner = PolicyConfig(**given)
        trainer = PolicyTrainer(learner, PPO(epochs=1, minibatch_size=count), Distribution())
        batch = PolicyBatch(prompts, responses, numbers, numbers, numbers, numbers, 0.0)
        return learner, lambda: train_policy(trainer, batch, 0)
    section = CriticConfig(**given)
    critic = CriticTrainer(section)
    values = CriticBatch(prompts, responses, numbers, numbers)
    return section, lambda: train_critic(critic, values, epochs=1, minibatch_size=count, seed=0)


def allocated(update: Callable[[], object], before: int) -> int:
    """Most bytes that tensors hold during an update, after one that makes the optimizer's state, beyond those of
    other tests."""
    update()
    with Allocations() as counted:
        update()
    peak: int = counted.peak
    return peak - before


def test_a_compilers_stand_ins_for_tensors_hold_no_bytes() -> None:
    """Other tests leave them behind, some with symbols in place of sizes, which cannot be compared with numbers."""
    before, real = Allocations().now, torch.zeros(10)
    dynamic = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC])
    fake = FakeTensorMode(shape_env=ShapeEnv()).from_tensor(torch.zeros(77), symbolic_context=dynamic)
    functional = torch._to_functional_tensor(fake)
    assert isinstance(functional.untyped_storage().nbytes(), torch.SymInt)
    assert Allocations().now - before == real.nbytes


@pytest.mark.parametrize(("kind", "policy"), [*((kind, True) for kind in KINDS), ("qwen2", False)])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_where_activations_are_most(kind: str, checkpointing: bool, policy: bool, tmp_path: Path) -> None:
    config, before = described(kind), Allocations().now
    section, update = trainer_of(
        tmp_path, config, policy=policy, tokens=2048, gradient_checkpointing=checkpointing, **BF16
    )
    size = ModelSize.of(config)
    assert memory._pass(section, size, logits=policy) > memory._step(section, size)
    assert learner_bytes(section, size, logits=policy) == pytest.approx(allocated(update, before), rel=0.1)


@pytest.mark.parametrize(
    ("kind", "compiled"),
    [
        *((kind, False) for kind in KINDS),
        # Norms of queries and keys besides, so that the others keep less of the same.
        *(pytest.param(kind, True, marks=() if kind == "qwen3" else pytest.mark.exhaustive) for kind in KINDS),
    ],
)
def test_states_that_a_layer_keeps(kind: str, compiled: bool) -> None:
    torch._dynamo.reset()
    config, tokens = described(kind), 512
    model = AutoModelForCausalLM.from_config(config).to(torch.bfloat16)
    if compiled:
        # Divides forward and backward pass as torch's own compiler does, and makes no kernels.
        compile_layers(model, "aot_eager_decomp_partition")
    weights = {parameter.untyped_storage()._cdata for parameter in model.parameters()}
    kept: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage()._cdata] = tensor.untyped_storage()
        return tensor

    given = torch.zeros(1, tokens, config.hidden_size, dtype=torch.bfloat16, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        states = model.model(inputs_embeds=given).last_hidden_state
    count = sum(storage.nbytes() for key, storage in kept.items() if key not in weights)
    assert states.requires_grad
    summed = config.num_hidden_layers * ModelSize.of(config).layer(tokens, 2, compiled=compiled)
    assert summed == pytest.approx(count, rel=0.1)
    torch._dynamo.reset()


@pytest.mark.parametrize(
    "fields",
    [
        BF16,
        {"dtype": "bfloat16", "zero_stage": 2},
        {"zero_stage": 1},
        {},
        {"dtype": "bfloat16", "zero_stage": 1, "gradient_checkpointing": True},
    ],
)
@pytest.mark.parametrize("policy", [True, False])
def test_where_the_optimizers_step_needs_most(fields: dict[str, Any], policy: bool, tmp_path: Path) -> None:
    config, before = described(hidden_size=512, num_hidden_layers=4), Allocations().now
    section, update = trainer_of(tmp_path, config, policy=policy, tokens=64, **fields)
    size = ModelSize.of(config)
    if section.zero_stage:
        assert memory._pass(section, size, logits=policy) < memory._step(section, size)
    assert learner_bytes(section, size, logits=policy) == pytest.approx(allocated(update, before), rel=0.1)


@pytest.mark.parametrize(
    ("fields", "bytes_each", "policy"),
    [
        # A copy of the largest group's gradient, which is a weight of 1 Mi: 6 bytes of each of its numbers.
        (BF16, 16 + 6 / 8, False),
        # The gradients of the last pass, beside those of the passes before.
        ({"dtype": "bfloat16", "zero_stage": 2}, 18, True),
    ],
)
def test_a_step_by_groups_copies_the_gradient_of_one(
    fields: dict[str, Any], bytes_each: float, policy: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for room in (memory, module):
        monkeypatch.setattr(room, "GROUP_ELEMENTS", 1 << 20)
    config, before = described(hidden_size=512, num_hidden_layers=4, vocab_size=2048), Allocations().now
    section, update = trainer_of(tmp_path, config, policy=policy, tokens=64, **fields)
    size, peak = ModelSize.of(config), allocated(update, before)
    assert learner_bytes(section, size, logits=policy) == pytest.approx(peak, rel=0.05)
    assert peak / (size if policy else size.body).parameters == pytest.approx(bytes_each, rel=0.01)


def test_a_step_of_zero_3_copies_the_gradient_of_one_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for room in (memory, learner_config):
        monkeypatch.setattr(room, "GROUP_ELEMENTS", 1 << 20)
    config, before = described(hidden_size=512, num_hidden_layers=4, vocab_size=2048), Allocations().now
    section, update = trainer_of(tmp_path, config, policy=True, tokens=64, dtype="bfloat16", zero_stage=3)
    size, peak = ModelSize.of(config), allocated(update, before)
    assert learner_bytes(section, size, logits=True) == pytest.approx(peak, rel=0.05)
    assert peak < kept_bytes(section, size) + 5 * size.parameters  # 6 as one group
