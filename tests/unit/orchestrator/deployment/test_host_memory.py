"""Host memory of a deployment, against sums by hand."""

from pathlib import Path
from typing import Any

import pytest

from orchestrator.deployment.file import Deployment
from orchestrator.deployment.host_memory import (
    ARRIVING,
    COMPUTING,
    LIBRARIES,
    PROCESS,
    SENT,
    SHARED,
    STAGED,
    SYSTEM,
    WHOLE,
    HostPart,
    host_parts,
    most_on_one,
    shortage,
    summed,
)
from orchestrator.deployment.memory import Footprint
from orchestrator.deployment.memory_sums import MemorySums
from quartet.config.base import GIB
from quartet.config.learner import LearnerConfig
from quartet.learner.host_memory import COPIES, OPTIMIZER, READING, WEIGHTS, held_bytes, pinned
from quartet.models.size import ModelSize
from tests.gpu_requests import DEPLOY, written
from tests.unit.orchestrator.deployment.test_memory import LLAMA, QWEN

SIZES = {"ppo-1gpu": "1.5B", "ppo-gpu": "1.5B", "ppo-8b-8gpu": "8B", "ppo-70b-32gpu": "70B"}


def part(name: str, gib: float, gpus: float = 0, *resources: str) -> HostPart:
    return HostPart(name, gpus, frozenset(resources), (("weights", int(gib * GIB)),))


class Files:
    """The GPU files with changes, for models of a size."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def load(self, name: str, **changes: str) -> tuple[Deployment, list[HostPart]]:
        deployment = written(name, self._folder, **changes)
        return deployment, host_parts(deployment, lambda path: self.size(name, path))

    def size(self, name: str, path: str) -> ModelSize:
        every = QWEN | LLAMA
        return every[SIZES[name] if path == str(self._folder) or name != "ppo-70b-32gpu" else "8B"]


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return Files(tmp_path)


def needs(parts: list[HostPart], name: str) -> dict[str, int]:
    """The needs of the part of this name that has most."""
    return dict(max((part for part in parts if part.name == name), key=lambda part: part.size).needs)


def test_each_replica_stages_all_weights_and_the_sender_has_a_copy(files: Files) -> None:
    copy = 2 * LLAMA["70B"].parameters
    _, parts = files.load("ppo-70b-32gpu")
    assert needs(parts, "rollout")[WHOLE] == copy  # for all of its four workers
    assert needs(parts, "policy")[SENT] == copy
    # Two send a half each; through shared memory nothing is staged, nor on GPUs.
    _, parts = files.load("ppo-70b-32gpu", **{"{backend: nccl,": "{backend: nccl, senders: 2,"})
    assert [dict(part.needs).get(SENT, 0) for part in parts if part.name == "policy"] == [copy // 2] * 2 + [0] * 6
    _, parts = files.load("ppo-70b-32gpu", **{"{backend: nccl": "{backend: nccl, stage: gpu"})
    assert needs(parts, "rollout")[WHOLE] == copy  # until they know their parts, which then stay on their GPUs
    assert SENT not in needs(parts, "policy")
    _, parts = files.load("ppo-8b-8gpu", **{"weights: {": "weights: {backend: nccl, stage: gpu, "})
    assert STAGED not in needs(parts, "rollout")
    _, parts = files.load("ppo-8b-8gpu", **{"weights: {": "weights: {backend: ipc, "})
    assert needs(parts, "policy")[SHARED] == 2 * LLAMA["8B"].parameters
    assert STAGED not in needs(parts, "rollout")
    # Which of them `auto` takes is known when the run starts.
    _, parts = files.load("ppo-8b-8gpu")
    assert needs(parts, "rollout")[STAGED] == needs(parts, "policy")[SENT] == 2 * LLAMA["8B"].parameters
    _, parts = files.load("ppo-1gpu")
    assert {STAGED, SENT, SHARED}.isdisjoint(needs(parts, "rollout") | needs(parts, "policy"))


@pytest.mark.parametrize(("senders", "large"), [(1, 1), (2, 2), (3, 2)])
def test_what_gloo_brings_to_several_workers_arrives_beside_what_they_keep(
    files: Files, senders: int, large: int
) -> None:
    """At each of four workers one bucket of each sender arrives while the one before is staged, in pieces that are
    one bucket together. Of 512 MiB all but two: the embeddings and the head."""
    shape = LLAMA["70B"]
    changes = {
        "{backend: nccl,": f"{{backend: gloo, senders: {senders},",
        "weight_backend: nccl": "weight_backend: auto",
    }
    _, parts = files.load("ppo-70b-32gpu", **changes)
    buckets = large * 2 * shape.vocabulary * shape.hidden + (senders - large) * (512 << 20)
    assert needs(parts, "rollout")[ARRIVING] == (2 * 4 + 1) * buckets
    assert needs(parts, "rollout")[WHOLE] == 2 * shape.parameters
    # By NCCL they arrive on the GPUs.
    _, parts = files.load("ppo-70b-32gpu")
    assert ARRIVING not in needs(parts, "rollout")


def test_an_engine_whose_model_has_a_process_of_its_own_has_three(files: Files) -> None:
    for fields, processes in (("", 2), ("worker_process: true, ", 3)):
        _, parts = files.load("ppo-1gpu", **{"max_num_batched_tokens: 8192": f"{fields}max_num_batched_tokens: 8192"})
        assert needs(parts, "rollout")[LIBRARIES] == processes * PROCESS


def test_offloaded_states_copies_for_checkpoints_and_the_model_as_it_is_read(files: Files) -> None:
    shape = LLAMA["8B"]
    _, parts = files.load("ppo-8b-8gpu")
    own = shape.parameters // 2
    # Masters and moments; gradients in float32, 4 x 10^9 of which are one tensor, and in bfloat16.
    fours = 4 * pinned(4_000_000_000) + pinned(4 * (own - 4_000_000_000))
    assert needs(parts, "policy")[OPTIMIZER] == 12 * own + fours + pinned(2 * own)
    # Rank 0 copies the model too, for what a run leaves.
    assert needs(parts, "policy")[COPIES] == 12 * own + 2 * shape.parameters
    assert needs(parts, "critic")[COPIES] == 12 * (shape.body.parameters // 2)
    offloaded = needs(parts, "reference")[WEIGHTS]
    assert 2 * shape.parameters < offloaded < 1.15 * 2 * shape.parameters
    _, parts = files.load("ppo-70b-32gpu")
    assert COPIES not in needs(parts, "critic")  # background: false
    # A critic on ZeRO 3 without offload holds little once each rank has read the whole model.
    assert needs(parts, "critic")[READING] == 2 * shape.body.parameters
    _, parts = files.load("ppo-1gpu", **{"&colocate false": "&colocate true"})
    # The embeddings of 223 Mi numbers, ten groups of 115 to 121 Mi, and one of 58 Mi, four bytes each.
    assert needs(parts, "policy")[OPTIMIZER] == 3 * (GIB + 10 * GIB // 2 + GIB // 4)


def test_without_a_gpu_the_model_is_in_host_memory(files: Files) -> None:
    shape = QWEN["1.5B"]
    _, on_gpu = files.load("ppo-gpu")
    _, on_cpu = files.load("ppo-gpu", **{"    num_gpus: 1\n": "    num_gpus: 0\n", "num_gpus: 0.5": "num_gpus: 0"})
    for name, least in (("policy", 16), ("reference", 2)):
        assert sum(needs(on_cpu, name).values()) > least * shape.parameters + PROCESS
        assert sum(needs(on_cpu, name).values()) > sum(needs(on_gpu, name).values())


def test_without_a_gpu_all_workers_of_a_replica_compute_in_its_memory(files: Files) -> None:
    """Each with its part of the model and a cache of its own."""
    shape, computing = QWEN["1.5B"], []
    for workers in (1, 2):
        fields = f"gpu_memory_utilization: 0.85, kv_cache_mib: 1024, tensor_parallel_size: {workers}"
        changes = {"num_gpus: 1}": "num_gpus: 0}", "gpu_memory_utilization: 0.85": fields}
        computing.append(needs(files.load("ppo-gpu", **changes)[1], "rollout")[COMPUTING])
    one, two = computing
    assert one > 2 * shape.parameters + GIB
    assert one + GIB < two < 2 * one
    assert two > 2 * shape.parameters + 2 * GIB


def test_parts_are_on_one_host_as_far_as_gpus_and_custom_resources_allow() -> None:
    rollout, policy, judge = part("rollout", 50, 4, "r"), part("policy", 30, 1, "p"), part("judge", 1)
    every = [rollout] * 4 + [policy] * 8 + [judge]
    assert most_on_one(every, 8) == (judge, *[policy] * 8)
    assert most_on_one(every, 4) == (judge, *[policy] * 4)
    assert most_on_one(every, None) == (*[policy] * 8, judge)
    without = [part("rollout", 50, 4)] * 4 + [part("policy", 30, 1)] * 8
    assert most_on_one(without, None) == tuple(without)
    assert sum(one.size for one in most_on_one(without, 8)) == 8 * 30 * GIB
    # A part that asks for more GPUs than a host has is alone: Ray would wait for it.
    assert most_on_one([part("rollout", 50, 4), part("policy", 30, 1)], 2) == (part("rollout", 50, 4),)
    assert most_on_one([part("small", 1, 0.3)] * 4 + [part("large", 2.5, 0.7)], 1) == (
        part("small", 1, 0.3),
        part("large", 2.5, 0.7),
    )
    assert most_on_one([], 8) == ()


def test_many_fractions_are_added_up_at_once() -> None:
    kinds = [part(f"reward {gib}", gib, 0.1) for gib in range(1, 6)]
    assert sum(one.size for one in most_on_one(kinds * 100, 8)) == 80 * 5 * GIB


def test_a_shortage_names_the_largest_part_and_what_makes_it_less(files: Files) -> None:
    _, parts = files.load("ppo-70b-32gpu")
    problem = shortage(parts, 1000 * GIB, 8)
    assert "one host may have to hold critic 1.0 + policy 431" in problem
    assert f"is {OPTIMIZER} of policy: leave out adam_offload" in problem
    staged = 2 * 2 * LLAMA["70B"].parameters / GIB
    problem = shortage([one for one in parts if one.name == "rollout"], 200 * GIB, 8)
    assert f"the largest part, {staged:.0f}, is {WHOLE} of rollout: put less on a host" in problem
    _, parts = files.load("ppo-8b-8gpu")
    staged = 4 * 2 * LLAMA["8B"].parameters / GIB
    problem = shortage([one for one in parts if one.name == "rollout"], 60 * GIB, 4)
    assert f"the largest part, {staged:.0f}, is {STAGED} of rollout: set weights.stage to gpu where" in problem
    assert not shortage([part("policy", 6)], 10 * GIB, None)
    assert shortage([part("policy", 6.1)], 10 * GIB, None)
    assert summed([part("policy", 6)] * 2) == f"policy 2 x 6.0 + Ray and Serve {SYSTEM / GIB:.1f}"


@pytest.mark.parametrize("name", SIZES)
def test_the_files_fit_the_machines_that_they_name(name: str, files: Files) -> None:
    deployment, parts = files.load(name)
    run = deployment.orchestrator
    assert run.host_gib is not None
    assert not shortage(parts, int(run.host_gib * GIB), run.host_gpus)
    total = SYSTEM + sum(part.size for part in most_on_one(parts, run.host_gpus))
    assert f"{total / GIB:.0f}" in (DEPLOY / f"{name}.yaml").read_text()


def test_what_fits_is_summed_line_by_line() -> None:
    sums = MemorySums(None, 100 * GIB, 8, (), (part("rollout", 50, 4), part("rollout", 50, 4)))
    assert list(sums.lines()) == [
        "memory of rollout, the largest of 2: 50.0 on a host (weights 50.0) GiB",
        "one host: rollout 2 x 50.0 + Ray and Serve 4.0 = 104 of 100 GiB",
    ]
    [problem] = sums.problems()
    assert problem.startswith("orchestrator.host_gib: one host may have to hold rollout 2 x 50.0")


def test_processes_without_a_gpu_are_not_counted_among_those_with_one() -> None:
    """A critic of several ranks has an actor beside them, on a host alone."""
    ranks = (Footprint("critic", 1, 5 * GIB),) * 2
    [line] = MemorySums(None, None, None, ranks, (part("critic", 50), part("critic", 50), part("critic", 2))).lines()
    assert line.startswith("memory of critic, the largest of 3: 5.0 on a GPU (2 of them) and 50.0 on a host (")


def test_colocated_states_are_pinned_and_a_mean_is_kept(policy_folder: Path) -> None:
    shape = ModelSize(parameters=1000, layers=2, hidden=4, intermediate=16, vocabulary=50, queries=4, keys=2)

    def held(**fields: Any) -> int:
        given: dict[str, Any] = {"optimizer": {"learning_rate": 1e-5}, "model": str(policy_folder)}
        section = LearnerConfig.parse(given | {"dtype": "bfloat16"} | fields, "policy")
        return sum(held_bytes(section, shape).values())

    assert held(zero_stage=1) == 0
    assert held(zero_stage=1, colocate=True) == 3 * 4096
    assert held(zero_stage=1, ema_decay=0.9) == 4000
    assert held(zero_stage=3, ema_decay=0.9, ranks=2) == 2000
    assert held(zero_stage=3, ranks=2, param_offload=True) == 1024
