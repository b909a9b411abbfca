"""Bytes that a rank holds, against the formula of the ZeRO paper."""

import gc
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import distributed, multiprocessing

from quartet.config.learner import REDUCE_ELEMENTS, LearnerConfig, OptimizerConfig
from quartet.learner.learner import RankLearner
from quartet.ranks.ranks import Ranks
from quartet.ranks.rendezvous import reach_store, serve_store

HOST = "127.0.0.1"
TIMEOUT_S = 120
Stage = Literal[1, 2, 3]
STAGES: tuple[Stage, ...] = (1, 2, 3)


@dataclass(frozen=True, slots=True)
class Held:
    """Bytes per parameter of the model, on one rank."""

    parameters: float
    gradients: float
    optimizer: float
    """fp32 master weights and Adam's two moments."""

    @property
    def total(self) -> float:
        """All three."""
        return self.parameters + self.gradients + self.optimizer


def formula(stage: int, ranks: int) -> Held:
    """Mixed precision with Adam: 2 bytes for a parameter, 2 for its gradient and K = 12 for the optimizer, and what
    each stage divides among the ranks (Rajbhandari et al. 2019, arXiv:1910.02054, section 5)."""
    return Held(2 / (ranks if stage == 3 else 1), 2 / (ranks if stage >= 2 else 1), 12 / ranks)


def measure(folder: Path, ranks: int = 2) -> list[dict[int, Held]]:
    """Memory that is alive between two micro-batches of each rank's second step, for each stage, in bfloat16.

    Every storage that the process holds is counted once, however many objects share it. DeepSpeed's communication
    bucket, of one size for any model, is left out.
    """
    store = serve_store(HOST, TIMEOUT_S)
    results = multiprocessing.get_context("spawn").Queue()
    started = multiprocessing.spawn(_rank, (ranks, store.port, str(folder), results), ranks, join=False)
    by_rank = dict(results.get(timeout=TIMEOUT_S) for _ in range(ranks))
    started.join()
    return [by_rank[rank] for rank in range(ranks)]


def _rank(rank: int, ranks: int, port: int, folder: str, results: Any) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    place = Ranks(rank, ranks, reach_store(HOST, port, TIMEOUT_S), TIMEOUT_S)
    results.put((rank, {stage: _held(stage, folder, place) for stage in STAGES}))
    distributed.barrier()
    distributed.destroy_process_group()  # a rank whose peer ends first is otherwise aborted now and then as it ends


def _held(stage: Stage, folder: str, place: Ranks) -> Held:
    from quartet.models.loading import load_causal

    before = _storages().keys()
    config = LearnerConfig(
        model=folder,
        dtype="bfloat16",
        zero_stage=stage,
        ranks=place.world_size,
        optimizer=OptimizerConfig(learning_rate=1e-3),
    )
    learner = RankLearner(load_causal(folder, "bfloat16"), config, place)
    ids = torch.arange(16)[None]
    alive: dict[int, int] = {}

    def loss(micro: int) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        if micro == 1:
            alive.clear()
            alive.update({key: size for key, size in _storages().items() if key not in before})
        return learner.model(input_ids=ids, use_cache=False).logits.float().logsumexp(-1).mean(), {}

    for _ in range(2):
        learner.step([0, 1], loss)
    return _divided(learner, alive)


def _divided(learner: RankLearner, alive: dict[int, int]) -> Held:
    zero = learner.model.optimizer
    optimizer = zero.optimizer
    # Stage 3 gives AdamW one master partition at a time; the others name them all in its groups.
    masters = getattr(zero, "fp32_partitioned_groups_flat", None)
    adam = masters or [parameter for group in optimizer.param_groups for parameter in group["params"]]
    adam = adam + [value for state in optimizer.state.values() for value in state.values()]
    kept = [getattr(parameter, "ds_tensor", parameter) for parameter in learner.module.parameters()]
    bucket = REDUCE_ELEMENTS * torch.bfloat16.itemsize
    count = sum(shape.numel() for shape in learner.shapes().values())
    states = {key: alive[key] for key in _keys(adam) if key in alive}
    weights = {key: alive[key] for key in _keys(kept) if key in alive and key not in states}
    others = [size for key, size in alive.items() if key not in states and key not in weights and size != bucket]
    return Held(sum(weights.values()) / count, sum(others) / count, sum(states.values()) / count)


def _keys(tensors: list[torch.Tensor]) -> set[int]:
    return {tensor.untyped_storage().data_ptr() for tensor in tensors}


def _storages() -> dict[int, int]:
    """Address and bytes of every tensor storage that Python can reach."""
    gc.collect()
    storages: dict[int, int] = {}
    for thing in gc.get_objects():
        # By type, since isinstance wakes lazy module attributes among the objects.
        if issubclass(type(thing), torch.Tensor) and thing.device.type != "meta":
            for tensor in (thing, thing.grad) if thing.is_leaf else (thing,):
                if tensor is not None:
                    storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
    return storages
