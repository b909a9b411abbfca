"""A model that is trained by DeepSpeed: the policy in the orchestrator's actor, the critic in its service."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from services.common.adapters import weight_buckets, weights_of
from services.common.arrays import Floats, Ints
from services.common.average import Average
from services.common.device import default_device
from services.common.folders import replace_model
from services.common.layout import LAYOUT, Layout
from services.common.learner_config import LearnerConfig, OptimizerConfig, describe
from services.common.ranks import Ranks, start_distributed
from services.common.schedule import rate_factor
from services.common.sequences import PairTensors, length_batches, pack_pairs, packed_batches, pad_pairs
from services.common.shards import Part, shards
from services.common.snapshot import Snapshot
from services.common.tensor_parallel import check_divided, check_divisible, data_parallel, total_norm, whole_shape

Micro = TypeVar("Micro")
Loss = Callable[[Micro], tuple[torch.Tensor, Mapping[str, torch.Tensor]]]

WriteModel = Callable[[Path, dict[str, torch.Tensor]], None]
"""Writes a model of these weights to a folder."""

MODEL = "model"
"""Folder, in a snapshot, of the model itself."""


class Learner:
    """A module, its AdamW and its schedule, one optimizer step at a time."""

    def __init__(self, module: nn.Module, config: LearnerConfig, ranks: Ranks | None = None) -> None:
        """Takes `module` over: after this its parameters live where DeepSpeed puts them.

        All ranks construct it together, each with the same module; RuntimeError if one does not come.
        """
        self._ranks = ranks or Ranks()
        self._config = config
        start_distributed(self._ranks)
        import deepspeed

        if config.gradient_checkpointing:
            module.gradient_checkpointing_enable()  # type: ignore[operator]
        size = config.tensor_parallel.size
        if size > 1:
            check_divisible(module, size)
        elif config.zero_stage == 3:
            # One weight at a time. DeepSpeed itself would first move the whole model to each GPU, and then divide it.
            deepspeed.zero.Init(module=module, config_dict_or_path=describe(config))
            for buffer in module.buffers():
                buffer.data = buffer.data.to(default_device())
        trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
        self._engine: Any = deepspeed.initialize(
            model=module,
            model_parameters=trained,
            config=describe(config),
            lr_scheduler=lambda optimizer: scheduler(optimizer, config.optimizer),
        )[0]
        if size > 1:
            check_divided(module)
            # DeepSpeed would have ranks compare their first batch, by pickling it. `parts` gives them the same.
            self._engine.first_dataloader_check.remove()
        # Those that have other sequences than this rank; with tensor parallelism not all are.
        self._data = data_parallel(self._ranks, size) if size > 1 else self._ranks
        self._average = Average(trained, config.ema_decay) if config.ema_decay else None
        self._own_norm = config.zero_stage == 0 and config.dtype == "float32"
        self._snapshot = Snapshot()
        self._engine.checkpoint_engine = self._snapshot

    @property
    def ranks(self) -> Ranks:
        """This process's place."""
        return self._ranks

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
            micro_batches: this rank's parts, as many as every other rank has (see `parts`).
            loss: of one part, already divided by the token count of the whole minibatch over all parts and ranks,
                and metrics divided likewise: both are summed here, metrics named `..._max` excepted.

        Returns:
            The metrics, joined over all ranks, `grad_norm` before clipping, and the `learning_rate` used.
        """
        rate = float(self._engine.get_lr()[0])
        totals: dict[str, torch.Tensor] = {}
        self._engine.train()
        for index, micro in enumerate(micro_batches):
            self._engine.set_gradient_accumulation_boundary(index == len(micro_batches) - 1)
            value, metrics = loss(micro)
            # DeepSpeed averages over ranks; these losses are parts of a sum.
            self._engine.backward(value * self._data.world_size)
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
        if self._average:
            self._average.update()
        joined = self._data.joined({name: float(total) for name, total in totals.items()}, self.device)
        return joined | {"grad_norm": norm, "learning_rate": rate}

    def _gradient_norm(self) -> float:
        """DeepSpeed reports none in fp32 at ZeRO 0, where every rank holds all of its weights' gradients."""
        return total_norm(self.module.parameters())

    def parts(self, prompts: Sequence[Ints], responses: Sequence[Ints]) -> list[Part]:
        """This rank's share of these pairs, in parts of at most micro_batch_tokens; equally many on all ranks."""
        ranks = self._data
        batches = packed_batches if self._config.packing else length_batches
        limit = self._config.micro_batch_tokens
        return shards(prompts, responses, batches, max_tokens=limit, world_size=ranks.world_size)[ranks.rank]

    def tensors(self, prompts: Sequence[Ints], responses: Sequence[Ints]) -> PairTensors:
        """Pairs of one part as the model takes them: packed or padded, on this rank's device."""
        make = pack_pairs if self._config.packing else pad_pairs
        return make(prompts, responses, self.device)

    def shared(self, rows: Mapping[int, Floats], lengths: Sequence[int]) -> list[Floats]:
        """All rows, from those that each rank has; every rank calls it.

        Args:
            rows: this rank's, by index, row `i` of `lengths[i]` values; each index in one copy of the model.
            lengths: of all rows.
        """
        ends = np.cumsum(lengths, dtype=np.int64)
        flat = np.zeros(sum(lengths), np.float32)
        for index, row in rows.items():
            flat[ends[index] - lengths[index] : ends[index]] = row
        # Zero on all ranks but one, so that the sum is that rank's value to the bit.
        values = self._data.sums(torch.from_numpy(flat).to(self.device)).cpu().numpy()
        return [values[end - length : end] for end, length in zip(ends, lengths, strict=True)]

    def shapes(self) -> dict[str, torch.Tensor]:
        """The parameters by name as tensors without data (`meta`), whole also where ranks have them in pieces."""
        return {
            weight.name: torch.empty(whole_shape(weight.parameter), dtype=weight.parameter.dtype, device="meta")
            for weight in weights_of(self.module)
        }

    def full_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every parameter's name and its whole tensor, in the same order on all ranks; adapters are merged in.

        With ZeRO 3 this gathers bucket by bucket, with tensor parallelism one by one: every rank has to exhaust it,
        and a tensor is valid only until the next one is asked for. Otherwise these are the parameters themselves.
        """
        if self._config.zero_stage < 3:
            for weight in weights_of(self.module):
                yield weight.name, weight.merged()
            return
        import deepspeed

        for bucket in weight_buckets(self.module):
            with deepspeed.zero.GatheredParameters([part for weight in bucket for part in weight.parts]):
                for weight in bucket:
                    yield weight.name, weight.merged()

    def gathered(self) -> dict[str, torch.Tensor]:
        """On rank 0 every parameter, whole, by name; nothing on the others. Every rank calls it.

        With ZeRO 3 or tensor parallelism these are copies in host memory, otherwise the parameters themselves.
        """
        first = self._ranks.rank == 0
        copied = self._config.zero_stage == 3 or self._config.tensor_parallel.size > 1
        return {
            name: tensor.to("cpu", copy=True) if copied else tensor for name, tensor in self.full_weights() if first
        }

    def save(self, folder: str | Path, write: WriteModel) -> Path:
        """Rank 0 writes the weights, or their running mean if there is one, through `write` beside `folder` and
        renames at the end, so that no half model is ever seen. Every rank calls it.

        Raises:
            InvalidArgument: something other than a model or an empty folder is there, which would be lost, or
                no folder can be made there.
        """
        target = Path(folder).resolve()
        with self._averaged():
            weights = self.gathered()
            if self._ranks.rank == 0:
                replace_model(target, lambda aside: write(aside, weights | _buffers(self.module)))
        return target

    def take_snapshot(self, folder: Path, step: int, write: WriteModel | None = None, *, copies: bool = True) -> None:
        """Copies all that training goes on from (weights, optimizer, schedule, running mean, random states) into
        host memory, for `write_snapshot` to bring to files in `folder`. Every rank calls it.

        Args:
            folder: new or empty, the same for all ranks, on a disk that all of them see.
            step: kept with the rest.
            write: given, the model itself is copied too, and written through it to the subfolder `model`.
            copies: False writes everything now, without copies: for models that leave no memory for them.
        """
        snapshot = self._snapshot
        snapshot.begin(copies=copies)
        self._engine.save_checkpoint(str(folder.parent), tag=folder.name, save_latest=False)
        snapshot.save(self._own_state(), str(self._own_file(folder)))
        first = self._ranks.rank == 0
        if first:
            snapshot.hold(self._layout(step), folder / LAYOUT, Layout.write)
        if write:
            with self._averaged():
                weights = {name: snapshot.copy(tensor) for name, tensor in self.full_weights() if first}
            if first:
                buffers = {name: snapshot.copy(buffer) for name, buffer in _buffers(self.module).items()}
                snapshot.hold(weights | buffers, folder / MODEL, lambda held, path: write(path, held))

    def write_snapshot(self) -> None:
        """Writes what was taken last. May run beside any other call, in a thread of its own; on every rank."""
        self._snapshot.write()

    def restore(self, folder: Path) -> int:
        """Goes on from a snapshot in `folder`; its step. Every rank calls it, before any training.

        Raises:
            InvalidArgument: there is none, or it is of another layout; the message names what differs.
        """
        layout = Layout.read(folder / LAYOUT)
        layout.check(self._layout(layout.step))
        own = self._snapshot.load(str(self._own_file(folder)))
        self._engine.load_checkpoint(str(folder.parent), tag=folder.name)
        self._reapply(self._config.optimizer)
        if self._average:
            self._average.load(own["average"])
        torch.set_rng_state(own["random"])
        if self.device.type == "cuda":
            torch.cuda.set_rng_state(own["device_random"], self.device)
        return layout.step

    def _reapply(self, optimizer: OptimizerConfig) -> None:
        """The configuration as it is now, and not as it was when the checkpoint was taken."""
        schedule = self._engine.lr_scheduler
        schedule.base_lrs = [optimizer.learning_rate] * len(schedule.base_lrs)
        rate = optimizer.learning_rate * rate_factor(schedule.last_epoch, optimizer)
        for group in self._engine.optimizer.param_groups:
            group |= {"lr": rate, "initial_lr": optimizer.learning_rate, "betas": optimizer.betas}
            group |= {"eps": optimizer.eps, "weight_decay": optimizer.weight_decay}

    def _layout(self, step: int) -> Layout:
        numbers = sum(whole_shape(parameter).numel() for parameter in self.module.parameters())
        return Layout.of(self._config, numbers, step)

    def _own_state(self) -> dict[str, Any]:
        """What DeepSpeed does not save."""
        state: dict[str, Any] = {"random": torch.get_rng_state()}
        if self.device.type == "cuda":
            state["device_random"] = torch.cuda.get_rng_state(self.device)
        if self._average:
            state["average"] = self._average.means
        return state

    def _own_file(self, folder: Path) -> Path:
        return folder / f"rank-{self._ranks.rank}.pt"

    def _averaged(self) -> AbstractContextManager[None]:
        """While this is open the weights are their running mean, if there is one."""
        return self._average.in_place() if self._average else nullcontext()


def _buffers(module: nn.Module) -> dict[str, torch.Tensor]:
    """What a saved model holds besides its parameters."""
    saved = module.state_dict().keys()
    return {name: buffer for name, buffer in module.named_buffers() if name in saved}


def scheduler(optimizer: torch.optim.Optimizer, config: OptimizerConfig) -> LambdaLR:
    """The configured schedule as torch's."""
    return LambdaLR(optimizer, lambda step: rate_factor(step, config))
