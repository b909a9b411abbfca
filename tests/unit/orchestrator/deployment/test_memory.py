"""GPU memory of a deployment, against sums by hand."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import Qwen2Config

from orchestrator.commands.checks.fitting import misfits_of_rollout
from orchestrator.deployment.memory import (
    AUTO_REPLICAS,
    COMMUNICATOR_OF_ONE,
    CONTEXT,
    GRAPHS,
    LOADED_BUCKETS,
    SAMPLING,
    TRAINING,
    Footprint,
    engine_bytes,
    footprints,
    frozen_bytes,
    most_on_one,
    rank_bytes,
    shortage,
)
from orchestrator.environments.config import AgentConfig
from quartet.config.base import GIB, MIB
from quartet.config.frozen import FrozenConfig
from quartet.config.learner import REDUCE_ELEMENTS, LearnerConfig, LoraConfig
from quartet.learner import memory
from quartet.learner.memory import kept_bytes, learner_bytes
from quartet.models.size import ModelSize
from services.rollout.config import RolloutConfig
from tests.gpu_requests import load, written

SMALL = ModelSize(parameters=1000, layers=2, hidden=4, intermediate=16, vocabulary=50, queries=4, keys=2)
PASSING = 10 * 2 * (4 * 4 + 3 * 16)
"""Bytes of its pass over 10 tokens in half precision, without gradients."""


class Configs:
    """Sections about a model folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = str(folder)

    def learner(self, **fields: Any) -> LearnerConfig:
        given = {"optimizer": {"learning_rate": 1e-5}, "micro_batch_tokens": 10}
        return LearnerConfig.parse(given | fields | {"model": self._folder}, "policy")

    def engine(self, **fields: Any) -> RolloutConfig:
        return RolloutConfig.parse(fields | {"model": self._folder}, "rollout")


@pytest.fixture
def configs(policy_folder: Path) -> Configs:
    return Configs(policy_folder)


@pytest.mark.parametrize(
    ("hidden", "intermediate", "layers", "heads", "groups", "tied", "parameters"),
    [
        (896, 4864, 24, 14, 2, True, 494_032_768),  # Qwen2.5-0.5B
        (1536, 8960, 28, 12, 2, True, 1_543_714_304),  # 1.5B
        (3584, 18944, 28, 28, 4, False, 7_615_616_512),  # 7B, whose vocabulary is 152064
    ],
)
def test_shapes_are_counted_without_allocating(
    hidden: int, intermediate: int, layers: int, heads: int, groups: int, tied: bool, parameters: int
) -> None:
    config = Qwen2Config(
        vocab_size=151_936 if tied else 152_064,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=groups,
        tie_word_embeddings=tied,
    )
    assert ModelSize.of(config) == ModelSize(
        parameters,
        layers,
        hidden,
        intermediate,
        config.vocab_size,
        queries=hidden,
        keys=hidden // heads * groups,
        head=0 if tied else config.vocab_size * hidden,
    )


def test_a_rank_holds_its_tensors_and_those_of_libraries(configs: Configs) -> None:
    section = configs.learner(dtype="bfloat16", zero_stage=1)
    tensors = learner_bytes(section, SMALL, logits=True)
    # 16 bytes a parameter, and six more in the optimizer's step or what two layers keep, and a head: a tile of
    # 500 logits, the gradient of 50 x 4 weights, and that of 10 x 4 states in float32.
    layers = 2 * 10 * (6 * 2 * 4 + 2 * (2 * 4 + 2 * 4 + 2 * 2 + 4 * 16))
    assert tensors == 16_000 + max(6000, layers + 6 * 500 + 2 * 200 + 4 * 40)
    assert rank_bytes(section, SMALL, logits=True) == tensors + COMMUNICATOR_OF_ONE + CONTEXT
    # Between updates it packs the buckets of a push, of which the next is begun before the last has left.
    resting = 2000 + PASSING + 2 * GIB
    assert rank_bytes(section, SMALL, logits=True, bucket=GIB) == resting + COMMUNICATOR_OF_ONE + CONTEXT


def test_a_step_of_zero_3_copies_the_gradient_of_one_group(configs: Configs) -> None:
    """Four ranks with 2 billion parameters each, and with a quarter of the largest weight."""
    size, most = ModelSize(8 * 10**9, 2, 1000, 1000, 100_000, queries=1000, keys=1000), 2**27 + 25_000_000
    section = configs.learner(dtype="bfloat16", zero_stage=3, ranks=4, micro_batch_tokens=10)
    assert memory._step(section, size) == 6 * most < memory._gathered(section, size)
    assert learner_bytes(section, size, logits=True) < kept_bytes(section, size) + 6 * 10**9


def test_a_learner_holds_less_where_ranks_divide_or_the_host_takes_over(configs: Configs) -> None:
    def held(**fields: Any) -> int:
        section = configs.learner(dtype="bfloat16", **fields)
        bucket = 2 * REDUCE_ELEMENTS if section.ranks > 1 else 0
        return kept_bytes(section, SMALL) - bucket

    assert held(zero_stage=1, ranks=2) == 2000 + 2000 + 6000
    assert held(zero_stage=2, ranks=2) == 2000 + 1000 + 6000
    assert held(zero_stage=3, ranks=2) == 1000 + 1000 + 6000
    # One gradient, of 50 x 4 numbers, is on its way.
    assert held(zero_stage=1, adam_offload=True) == 4000 + 400
    # Rank 8: 2 layers x 8 x (8 x 4 + 3 x 20) = 1472 parameters of 2 + 12 bytes.
    assert held(zero_stage=1, lora={"rank": 8}) == 2000 + 1472 * 14


def test_frozen_models_and_engines(configs: Configs) -> None:
    frozen = FrozenConfig.model_construct(dtype="bfloat16", batch_tokens=10)
    assert frozen_bytes(SMALL, frozen, logits=False) == 2000 + PASSING + CONTEXT
    # A tile of 500 logits in half precision and in single.
    assert frozen_bytes(SMALL, frozen, logits=True) == 2000 + 500 * 6 + CONTEXT
    told = configs.engine(dtype="bfloat16", kv_cache_mib=3, max_num_batched_tokens=100, max_num_seqs=7)
    step = 100 * 2 * (4 * 4 + 2 * 16)
    expected = 2000 + (3 << 20) + step + 3 * 7 * 50 * 4 + GRAPHS + CONTEXT
    assert engine_bytes(told, SMALL, gpu=80 * GIB) == expected
    assert engine_bytes(told, SMALL, 80 * GIB, bucket=GIB) == expected + LOADED_BUCKETS * GIB
    # Rank 8: 1472 parameters of 2 bytes, as they are computed with and as they came.
    adapted = configs.engine(
        dtype="bfloat16", kv_cache_mib=3, max_num_batched_tokens=100, max_num_seqs=7, adapters={"rank": 8}
    )
    assert engine_bytes(adapted, SMALL, gpu=80 * GIB) == expected + 2 * 1472 * 2
    kept = adapted.model_copy(update={"adapter_versions": 3})
    assert engine_bytes(kept, SMALL, gpu=80 * GIB) == expected + 4 * 1472 * 2
    # There is room for rank 16, twice as much, where 9 are needed.
    odd = adapted.model_copy(update={"adapters": LoraConfig(rank=9)})
    assert engine_bytes(odd, SMALL, gpu=80 * GIB) == expected + (2 * 1472 + 1472 * 9 // 8) * 2
    # Without a size of its own the cache takes what its share of the GPU leaves.
    assert engine_bytes(configs.engine(gpu_memory_utilization=0.9), SMALL, gpu=80 * GIB) == 72 * GIB


QWEN = {
    "0.5B": ModelSize(494_032_768, 24, 896, 4864, 151_936, 896, 128),
    "1.5B": ModelSize(1_543_714_304, 28, 1536, 8960, 151_936, 1536, 256),
    "3B": ModelSize(3_085_938_688, 36, 2048, 11_008, 151_936, 2048, 256),
    "7B": ModelSize(7_615_616_512, 28, 3584, 18_944, 152_064, 3584, 512, 152_064 * 3584),
}


@pytest.mark.parametrize(
    ("size", "changes", "expected"),
    [
        ("0.5B", {"&recomputed auto": "&recomputed false"}, 48),
        ("1.5B", {"&recomputed auto": "&recomputed false"}, 105),
        ("1.5B", {"&recomputed auto": "&recomputed true"}, 76),
        ("3B", {"&recomputed auto": "&recomputed true"}, 136),
        ("7B", {"&recomputed auto": "&recomputed true", "# lora:": "lora:"}, 111),
    ],
)
def test_the_sums_at_the_head_of_the_file_for_one_gpu(
    size: str, changes: dict[str, str], expected: int, tmp_path: Path
) -> None:
    deployment = written("ppo-1gpu", tmp_path, **changes)
    parts = footprints(deployment, 139 * GIB, lambda folder: QWEN[size])
    assert [part.name for part in parts] == ["rollout", "reward", "reference", "critic", "policy"]
    assert round(sum(part.size for part in parts) / GIB) == expected
    assert bool(shortage(parts, 79 * GIB)) == (expected > 79)


def test_a_pass_holds_a_sequence_that_is_longer_than_it(tmp_path: Path) -> None:
    """Sequences of 8192 + 57344 tokens, where a pass has 16384; an agent may have several of them."""
    sizes = []
    for tokens, sequences in ((8192, 1), (57_344, 1), (57_344, 4)):
        deployment = written("ppo-1gpu", tmp_path)
        section: Any = deployment.orchestrator
        agent = AgentConfig(kind="a:b", max_tokens=tokens, sequences=sequences)
        data = section.data.model_copy(update={"max_prompt_length": 8192})
        run = section.model_copy(update={"agent": agent, "data": data})
        changed = replace(deployment, orchestrator=run)
        sizes.append({part.name: part.size for part in footprints(changed, 139 * GIB, lambda folder: QWEN["1.5B"])})
    short, long, several = sizes
    assert long == several
    for name in ("reward", "reference", "critic", "policy"):
        assert long[name] > short[name] + GIB // 2, name


def test_the_worst_that_shares_allow_is_what_has_to_fit() -> None:
    rollout, policy = Footprint("rollout", 0.4, 20 * GIB), Footprint("policy", 0.3, 40 * GIB)
    critic, reward, whole = (
        Footprint("critic", 0.7, 50 * GIB),
        Footprint("reward", 0.1, 5 * GIB),
        Footprint("w", 1, 60 * GIB),
    )
    assert most_on_one([rollout, policy, critic, reward, whole]) == (policy, critic)
    assert most_on_one([rollout, policy, reward]) == (rollout, policy, reward)
    assert most_on_one([]) == ()
    assert shortage([rollout, policy, reward], 65 * GIB) == ""
    assert shortage([rollout, policy, reward], 64 * GIB) == (
        "one GPU may have to hold rollout 20.0 + policy 40.0 + reward 5.0 = 65.0 GiB, but has 64.0; "
        "raise their num_gpus so that fewer share it, or make them need less, policy first"
    )


def test_many_alike_are_counted_and_not_tried_out_one_by_one() -> None:
    """2 to the power of 60 sets would never be done."""
    parts = [Footprint("rollout", 0.25, GIB)] * 40 + [Footprint("policy", 0.5, 3 * GIB)] * 20
    assert most_on_one(parts) == (Footprint("policy", 0.5, 3 * GIB),) * 2
    assert most_on_one([Footprint("tensor parallel", 2.0, GIB)]) == (Footprint("tensor parallel", 2.0, GIB),)


def test_what_one_phase_alone_needs_counts_in_that_phase() -> None:
    rollout = Footprint("rollout", 0.4, 20 * GIB, 15 * GIB, TRAINING)
    policy = Footprint("policy", 0.3, 40 * GIB, 30 * GIB, SAMPLING)
    reward = Footprint("reward", 0.3, 2 * GIB)
    together = [rollout, policy, reward]
    assert [sum(part.during(phase) for part in together) // GIB for phase in (SAMPLING, TRAINING)] == [32, 47]
    assert shortage(together, 47 * GIB) == ""
    assert shortage(together, 46 * GIB) == (
        "one GPU may have to hold rollout 5.0 + policy 40.0 + reward 2.0 = 47.0 GiB during training, but has "
        "46.0; raise their num_gpus so that fewer share it, or make them need less, policy first"
    )


@pytest.mark.parametrize(("size", "sampling", "training"), [("0.5B", 20, 28), ("1.5B", 34, 70), ("3B", 53, 130)])
def test_the_sums_with_colocate(size: str, sampling: int, training: int, tmp_path: Path) -> None:
    changes = {"&colocate false": "&colocate true", "&recomputed auto": "&recomputed true"}
    deployment = written("ppo-1gpu", tmp_path, **changes)
    assert deployment.orchestrator.loop.colocate
    assert deployment.orchestrator.policy.colocate
    assert not list(misfits_of_rollout(deployment.orchestrator, deployment.services["rollout"], "rollout"))  # type: ignore[arg-type]
    parts = footprints(deployment, 139 * GIB, lambda folder: QWEN[size])
    sums = [round(sum(part.during(phase) for part in parts) / GIB) for phase in (SAMPLING, TRAINING)]
    assert sums == [sampling, training]


def test_a_push_through_the_gpu_needs_room_for_one_more_copy(tmp_path: Path) -> None:
    file = Path(__file__).parents[4] / "deploy" / "ppo-1gpu.yaml"
    copy, sizes = 2 * QWEN["1.5B"].parameters, []
    for backend in ("cuda-ipc", "ipc", "nccl, stage: gpu"):
        (tmp_path / backend).mkdir()
        changed = tmp_path / backend / file.name
        changed.write_text(file.read_text().replace("backend: cuda-ipc", f"backend: {backend}"))
        rollout, *_, policy = footprints(load(changed, tmp_path), 139 * GIB, lambda folder: QWEN["1.5B"])
        sizes.append((rollout.size, policy.size))
    (reading, sending), (least, learning), staged = sizes
    assert (reading, sending) == (least, learning + copy)
    assert staged == (least + copy, learning + copy)


def test_of_a_push_through_the_gpus_several_workers_have_a_part_each(tmp_path: Path) -> None:
    file, copy = Path(__file__).parents[4] / "deploy" / "ppo-70b-32gpu.yaml", 2 * LLAMA["70B"].parameters
    sizes = []
    for stage in ("host", "gpu"):
        changed = tmp_path / f"{stage}.yaml"
        changed.write_text(
            file.read_text().replace("weights: {backend: nccl,", f"weights: {{backend: nccl, stage: {stage},")
        )
        parts = footprints(load(changed, tmp_path), 80 * GIB, lambda folder: LLAMA["70B"])
        sizes.append({part.name: part.size for part in parts})
    assert sizes[1]["rollout"] - sizes[0]["rollout"] == copy // 4


def test_buckets_of_several_senders_arrive_at_the_same_time(tmp_path: Path) -> None:
    file, sizes = Path(__file__).parents[4] / "deploy" / "ppo-70b-32gpu.yaml", []
    for senders in (1, 3):
        changed = tmp_path / f"{senders}.yaml"
        changed.write_text(file.read_text().replace("bucket_mib: 512,", f"bucket_mib: 512, senders: {senders},"))
        parts = footprints(load(changed, tmp_path), 80 * GIB, lambda folder: LLAMA["70B"])
        sizes.append({part.name: part.size for part in parts})
    head = 2 * LLAMA["70B"].head
    assert head > 512 * MIB
    assert sizes[1]["rollout"] - sizes[0]["rollout"] == LOADED_BUCKETS * (head + 512 * MIB)
    assert sizes[1]["policy"] == sizes[0]["policy"]


@pytest.mark.parametrize(
    ("scale", "count"),
    [
        ({"num_replicas": 3}, 3),
        ({"autoscaling_config": {"min_replicas": 1, "max_replicas": 4}}, 4),
        ({"num_replicas": "auto"}, AUTO_REPLICAS),
        ({}, 1),
    ],
)
def test_as_many_replicas_count_as_there_may_be(scale: dict[str, Any], count: int, tmp_path: Path) -> None:
    deployment = load(Path(__file__).parents[4] / "deploy" / "ppo-1gpu.yaml", tmp_path)
    reward = next(a for a in deployment.raw["applications"] if a["name"] == "reward")
    (entry,) = reward["deployments"]
    del entry["autoscaling_config"]
    entry |= scale
    parts = footprints(deployment, 139 * GIB, lambda folder: QWEN["0.5B"])
    assert [part.name for part in parts].count("reward") == count


LLAMA = {
    "8B": ModelSize(8_030_261_248, 32, 4096, 14_336, 128_256, 4096, 1024, 128_256 * 4096),
    "70B": ModelSize(70_553_706_496, 80, 8192, 28_672, 128_256, 8192, 1024, 128_256 * 8192),
}


@pytest.mark.parametrize(
    ("file", "policy", "most"),
    [
        ("ppo-8b-8gpu", "8B", {"rollout": 70, "policy": 22, "reference": 17, "critic": 21, "reward": 16}),
        ("ppo-70b-32gpu", "70B", {"rollout": 77, "policy": 39, "reference": 46, "critic": 42, "reward": 16}),
    ],
)
def test_the_larger_files_fit_into_80_gb(file: str, policy: str, most: dict[str, int], tmp_path: Path) -> None:
    """The reward model and the critic, whose folder is another, are of 8B."""
    deployment = load(Path(__file__).parents[4] / "deploy" / f"{file}.yaml", tmp_path)
    assert deployment.orchestrator.gpu_gib == 79
    parts = footprints(deployment, 79 * GIB, lambda folder: LLAMA[policy if folder == str(tmp_path) else "8B"])
    assert {part.name: round(part.size / GIB) for part in parts} == most
    assert not shortage(parts, 79 * GIB)
