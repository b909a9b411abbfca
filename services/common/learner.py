"""A model that is trained by DeepSpeed: the policy in the orchestrator's actor, the critic in its service."""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import distributed, nn
from torch.optim.lr_scheduler import LambdaLR

from services.common.errors import InvalidArgument
from services.common.learner_config import LearnerConfig, OptimizerConfig, describe
from services.common.schedule import rate_factor

Micro = TypeVar("Micro")
Loss = Callable[[Micro], tuple[torch.Tensor, Mapping[str, torch.Tensor]]]


@dataclass(frozen=True, slots=True)
class Ranks:
    """This process's place among the learner's ranks."""

    rank: int = 0
    world_size: int = 1
    store: distributed.Store | None = None
    """Where the ranks meet. None: a single rank, which needs nobody."""


def start_distributed(ranks: Ranks) -> None:
    """Makes torch's default process group, nccl on GPUs and gloo elsewhere, and readies DeepSpeed for it."""
    cuda = torch.cuda.is_available()
    # Ray shows each process only its own GPU, so within the process it is always the first.
    os.environ.setdefault("LOCAL_RANK", "0")
    if not cuda:
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    import deepspeed

    # Otherwise DeepSpeed compiles a shared-memory kernel for half a minute on the first start on a CPU.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    if not distributed.is_initialized():
        distributed.init_process_group(
            "nccl" if cuda else "gloo",
            rank=ranks.rank,
            world_size=ranks.world_size,
            store=ranks.store or distributed.HashStore(),
        )
    deepspeed.init_distributed(dist_backend="nccl" if cuda else "gloo")


class Learner:
    """A module, its AdamW and its schedule, one optimizer step at a time."""

    def __init__(self, module: nn.Module, config: LearnerConfig, ranks: Ranks | None = None) -> None:
        """Takes `module` over: after this its parameters live where DeepSpeed puts them."""
        self._ranks = ranks or Ranks()
        start_distributed(self._ranks)
        import deepspeed

        if config.gradient_checkpointing:
            module.gradient_checkpointing_enable()  # type: ignore[operator]
        self._engine: Any = deepspeed.initialize(
            model=module,
            model_parameters=[parameter for parameter in module.parameters() if parameter.requires_grad],
            config=describe(config),
            lr_scheduler=lambda optimizer: scheduler(optimizer, config.optimizer),
        )[0]
        self._own_norm = config.zero_stage == 0 and config.dtype == "float32"

    @property
    def module(self) -> nn.Module:
        """The module, with the current weights."""
        module: nn.Module = self._engine.module
        return module

    @property
    def model(self) -> Any:
        """What to call for a forward pass."""
        return self._engine

    @property
    def device(self) -> torch.device:
        """Where batches go."""
        device: torch.device = self._engine.device
        return device

    def step(self, micro_batches: Sequence[Micro], loss: Loss[Micro]) -> dict[str, float]:
        """One optimizer step over one minibatch, given in parts.

        Args:
            micro_batches: this rank's parts.
            loss: of one part, already divided by the token count of the whole minibatch over all parts and ranks,
                and metrics divided likewise: both are summed here, metrics named `..._max` excepted.

        Returns:
            The joined metrics, `grad_norm` before clipping, and the `learning_rate` used.
        """
        rate = float(self._engine.get_lr()[0])
        totals: dict[str, torch.Tensor] = {}
        self._engine.train()
        for index, micro in enumerate(micro_batches):
            self._engine.set_gradient_accumulation_boundary(index == len(micro_batches) - 1)
            value, metrics = loss(micro)
            # DeepSpeed averages over ranks; these losses are parts of a sum.
            self._engine.backward(value * self._ranks.world_size)
            for name, metric in metrics.items():
                join = torch.maximum if name.endswith("_max") else torch.add
                totals[name] = join(totals.get(name, torch.zeros(())), metric.detach().float().cpu())
            if index < len(micro_batches) - 1:
                self._engine.step()
        norm = self._gradient_norm() if self._own_norm else None
        self._engine.step()
        if norm is None:
            norm = float(self._engine.get_global_grad_norm())
        self._engine.eval()
        return {name: float(total) for name, total in totals.items()} | {"grad_norm": norm, "learning_rate": rate}

    def _gradient_norm(self) -> float:
        """DeepSpeed reports none in fp32 at ZeRO 0, where every rank holds all gradients."""
        gradients = [p.grad for p in self.module.parameters() if p.grad is not None]
        return float(nn.utils.get_total_norm(gradients))

    def save(self, folder: str | Path, write: Callable[[Path], None]) -> Path:
        """Writes through `write` beside `folder` and renames at the end, so that no half model is ever seen.

        Raises:
            InvalidArgument: something other than a model or an empty folder is there, which would be lost, or
                no folder can be made there.
        """
        target = Path(folder).resolve()
        if target.exists() and not _may_go(target):
            raise InvalidArgument(f"path: {target} exists and is no model; name a new folder, or a model to replace")
        aside = target.with_name(f".{target.name}.writing")
        _remove(aside)
        try:
            aside.mkdir(parents=True)
        except OSError as error:
            raise InvalidArgument(f"path: {target} cannot be written: {error.strerror}") from None
        write(aside)
        _remove(target)
        aside.rename(target)
        return target


def _may_go(target: Path) -> bool:
    """It is a model, or an empty folder."""
    return (target / "config.json").is_file() or (target.is_dir() and not any(target.iterdir()))


def _remove(folder: Path) -> None:
    import shutil

    if folder.exists():
        shutil.rmtree(folder)


def scheduler(optimizer: torch.optim.Optimizer, config: OptimizerConfig) -> LambdaLR:
    """The configured schedule as torch's."""
    return LambdaLR(optimizer, lambda step: rate_factor(step, config))
