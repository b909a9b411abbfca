"""A module under DeepSpeed, trained one optimizer step at a time."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from quartet.columns import Columns
from quartet.config.learner import GROUP_ELEMENTS, LearnerConfig, describe
from quartet.learner.ema import Average
from quartet.learner.finite import agreed, check_weights
from quartet.learner.frozen import freeze_attention
from quartet.learner.lora import Weight, adapters_of, separable, weights_of
from quartet.learner.optimizer import OptimizerState, rate_factor
from quartet.learner.recomputed import recompute_activations
from quartet.learner.shards import Pass, shards
from quartet.learner.tensor_parallel import (
    check_divided,
    check_divisible,
    data_parallel,
    total_norm,
    whole_shape,
)
from quartet.models.compiled import compile_layers
from quartet.models.device import default_device, on_device
from quartet.models.runs import runs
from quartet.models.sequences import PairTensors, length_batches, packed_batches, pair_tensors
from quartet.ranks.ranks import Ranks, start_distributed
from quartet.seams.deepspeed import (
    with_norm_in_one_pass,
    without_average,
    without_comparison_of_batches,
    without_reduction,
)
from quartet.wire.codec import Floats, Ints

GATHER_BYTES = 64 << 20
"""Most bytes of weights that ZeRO 3 gathers at once, their adapters not counted; a larger weight is alone."""
NORM = "grad_norm"
"""Name of the gradient's norm among the metrics."""
Micro = TypeVar("Micro")
Loss = Callable[[Micro], tuple[torch.Tensor, Mapping[str, torch.Tensor]]]


class TrainedModule:
    """A module, its AdamW and its schedule, trained one optimizer step at a time."""

    def __init__(self, module: nn.Module, config: LearnerConfig, ranks: Ranks | None = None) -> None:
        """Takes over `module`: from now on DeepSpeed decides where its parameters are stored.

        All ranks construct it together, each with the same module; RuntimeError if a rank is missing.
        """
        self.ranks = ranks or Ranks()
        """This process's place."""
        self._config = config
        start_distributed(self.ranks)
        import deepspeed

        if config.freeze_attention:
            freeze_attention(module)
        if config.recomputes:
            recompute_activations(module)
        if config.compile_layers:
            compile_layers(module)
        size = config.tensor_parallel.size
        if size > 1:
            check_divisible(module, size)
        elif config.zero_stage == 3:
            # Divides one weight at a time; initialize() would first move the whole model to each GPU.
            deepspeed.zero.Init(module=module, config_dict_or_path=describe(config))
            for buffer in module.buffers():
                buffer.data = buffer.data.to(default_device())
        trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
        self._engine: Any = deepspeed.initialize(
            model=module,
            model_parameters=_groups(trained, config),
            config=describe(config),
            lr_scheduler=lambda optimizer: LambdaLR(optimizer, lambda step: rate_factor(step, config.optimizer)),
        )[0]
        self.model = self._engine
        """The callable for a forward pass."""
        self.module: nn.Module = self._engine.module
        """The module, with the current weights."""
        self.device: torch.device = self._engine.device
        """The device for batches."""
        if size > 1:
            check_divided(module)
            without_comparison_of_batches(self._engine)  # `passes` makes them equal
        # The ranks with other sequences than this one. With tensor parallelism some ranks share their sequences.
        self._data = data_parallel(self.ranks, size) if size > 1 else self.ranks
        self._spare_passes()
        self._average = Average(trained, config.ema_decay) if config.ema_decay else None
        self.skipped_in_a_row = 0
        """Number of consecutive optimizer steps up to now that were skipped for a gradient that was not finite."""
        self._own_norm = config.zero_stage == 0 and config.dtype == "float32"
        self.optimizer_state = OptimizerState(self._engine, leaves=config.colocate)
        """Brings the optimizer's state to the device, where `step` needs it."""
        self._one_mode()

    def _spare_passes(self) -> None:
        """Leaves out what DeepSpeed does with gradients that changes nothing."""
        config, engine, alone = self._config, self._engine, self._data.world_size == 1
        if self.ranks.world_size == 1 and config.zero_stage == 0:
            without_reduction(engine)
        if config.zero_stage not in (1, 2) or config.adam_offload:
            return
        if alone:
            without_average(engine)
        if config.tensor_parallel.size == 1:
            with_norm_in_one_pass(engine)

    def _one_mode(self) -> None:
        """Keeps the module in evaluation mode, so that training computes exactly as the log-probs and values before
        it. Only layers with gradient checkpointing get training mode; otherwise transformers would not recompute
        them."""
        self._engine.eval()
        for layer in self.module.modules():
            if getattr(layer, "gradient_checkpointing", False):
                layer.training = True

    def step(self, micro_batches: Sequence[Micro], loss: Loss[Micro]) -> dict[str, float]:
        """Takes one optimizer step over one minibatch, given as micro-batches.

        Args:
            micro_batches: one for each of this rank's `passes`, equally many on all ranks.
            loss: computes the loss and metrics of one micro-batch, divided by the token count of the whole minibatch
                over all micro-batches and ranks; both are summed here, except metrics named `..._max`.

        Returns:
            The metrics over all ranks, `grad_norm` before clipping, and the `learning_rate` used. Empty if the norm
            is not finite: all ranks skip the step then, and weights, optimizer and schedule stay as they were.
        """
        rate = float(self._engine.get_lr()[0])
        numbers = self._apply(self._accumulate(micro_batches, loss))
        self.skipped_in_a_row = 0 if numbers else self.skipped_in_a_row + 1
        if not numbers:
            return {}
        if self._average:
            self._average.update()
        norm = numbers.pop(NORM)
        return self._data.joined(numbers, self.device) | {NORM: norm, "learning_rate": rate}

    def _accumulate(self, micro_batches: Sequence[Micro], loss: Loss[Micro]) -> dict[str, torch.Tensor]:
        """Accumulates the gradient of all micro-batches inside DeepSpeed; returns this rank's sums of the metrics."""
        totals: dict[str, torch.Tensor] = {}
        for index, micro in enumerate(micro_batches):
            self._engine.set_gradient_accumulation_boundary(index == len(micro_batches) - 1)
            value, metrics = loss(micro)
            # DeepSpeed averages gradients over ranks, but these losses are parts of a sum.
            self._engine.backward(value * self._data.world_size)
            for name, metric in metrics.items():
                join = torch.maximum if name.endswith("_max") else torch.add
                now = metric.detach().float()
                totals[name] = join(totals[name], now) if name in totals else now
            if index < len(micro_batches) - 1:
                self._engine.step()
        return totals

    def _apply(self, totals: dict[str, torch.Tensor]) -> dict[str, float]:
        """Steps the optimizer with the accumulated gradient; returns metrics and the gradient's norm as numbers, or
        nothing if the norm is not finite and the step was skipped.

        With ZeRO or bf16 DeepSpeed computes the norm over all ranks and skips by itself. In fp32 at ZeRO 0, where
        every rank holds whole gradients, it does neither.
        """
        if not self._own_norm:
            self._engine.step()
            if not self._engine.was_step_applied():
                return {}
            return _numbers(totals | {NORM: torch.as_tensor(self._engine.get_global_grad_norm(), device=self.device)})
        numbers = _numbers(totals | {NORM: total_norm(self.module.parameters())})
        if not agreed(math.isfinite(numbers[NORM]), self.ranks, self.device):
            self._engine.zero_grad()
            return {}
        self._engine.step()
        return numbers

    @property
    def has_groups(self) -> bool:
        """True if the trained parameters are more than a group of the optimizer's; with adam_offload there are fewer
        groups, or only one."""
        trained = (parameter for parameter in self.module.parameters() if parameter.requires_grad)
        # With ZeRO 3 a parameter has no elements but in a pass.
        count = sum(getattr(parameter, "ds_numel", parameter.numel()) for parameter in trained)
        return bool(count > GROUP_ELEMENTS * self._config.copies)

    def check_weights(self) -> None:
        """Raises NotFinite on all ranks unless all weights are finite. Every rank calls it."""
        check_weights(self.module, self.ranks, self.device)

    def passes(self, prompts: Sequence[Ints], responses: Sequence[Ints], *, group: int = 1) -> list[Pass]:
        """Divides sequences among the ranks; returns this rank's passes, of at most micro_batch_tokens tokens,
        equally many on all ranks. Those of a group, which follow each other, stay together."""
        ranks, config = self._data, self._config
        shared = config.shares_prompts and group == 1
        dealt = shards(
            prompts,
            responses,
            partial(packed_batches, shared=shared) if config.packing else length_batches,
            max_tokens=config.micro_batch_tokens,
            world_size=ranks.world_size,
            group=group,
            shared=shared,
        )
        return dealt[ranks.rank]

    def tensors(self, trajectories: Columns, *, last: bool = False) -> PairTensors:
        """The model's input for one pass: packed or padded, on this rank's device. With `last` it holds the last
        token of each response, from which nothing is predicted."""
        packing, shared = self._config.packing, self._config.shares_prompts
        return pair_tensors(trajectories, self.device, packing=packing, shared=shared, last=last)

    def shared(self, rows: Mapping[int, Floats], lengths: Sequence[int]) -> Floats:
        """Collects the rows of all ranks, end to end; every rank calls it.

        Args:
            rows: index -> row, of this rank; row `i` has `lengths[i]` values. Each index is on one copy of the model.
            lengths: the lengths of all rows.
        """
        ends = np.cumsum(lengths, dtype=np.int64)
        flat = np.zeros(sum(lengths), np.float32)
        for index, row in rows.items():
            flat[ends[index] - lengths[index] : ends[index]] = row
        # All ranks but one hold zeros, so that the sum is exactly that rank's value.
        collected: Floats = self._data.sums(on_device(flat, self.device)).cpu().numpy()
        return collected

    def shapes(self, *, adapters: bool = False) -> dict[str, torch.Tensor]:
        """Name -> tensor of `full_weights`, without data (`meta`)."""
        return {
            weight.name: torch.empty(whole_shape(weight.parameter), dtype=weight.parameter.dtype, device="meta")
            for weight in self._weights(adapters)
        }

    def _weights(self, adapters: bool) -> Iterator[Weight]:
        return adapters_of(self.module) if adapters else weights_of(self.module)

    def full_weights(self, *, adapters: bool = False) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields every parameter's name and whole tensor, in the same order on all ranks; adapters are merged in, or
        with `adapters` all that there is.

        With ZeRO 3 parameters are gathered group by group, with tensor parallelism one by one: every rank has to
        exhaust the iterator, and a tensor is valid only until the next one. Otherwise these are the parameters
        themselves.
        """
        if self._config.zero_stage < 3:
            for weight in self._weights(adapters):
                yield weight.name, weight.merged()
            return
        import deepspeed

        def size(weight: Weight) -> int:
            return int(weight.parameter.ds_numel * weight.parameter.element_size())

        for group in runs(self._weights(adapters), size, GATHER_BYTES):
            with deepspeed.zero.GatheredParameters([part for weight in group for part in weight.parts]):
                for weight in group:
                    yield weight.name, weight.merged()

    def saved_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields the tensors of a saved model, as `full_weights` does: all parameters with the adapters merged in;
        then the adapters, if they are all that is trained."""
        yield from self.full_weights()
        if self._config.lora is not None and separable(self.module):
            yield from self.full_weights(adapters=True)


def _groups(trained: list[nn.Parameter], config: LearnerConfig) -> list[nn.Parameter] | list[dict[str, Any]]:
    """Parameters in the groups in which the optimizer steps: of ZeRO 1 and 2 on the device, which divides each.

    They step one group after another, and copy a group's gradient into a flat tensor and to float32: 6 bytes a
    parameter in half precision, of which groups need those of one group only. AdamW treats each element alike, so
    that any groups train the same.
    """
    if config.zero_stage not in (1, 2) or config.adam_offload:
        return trained
    return [{"params": group} for group in runs(trained, nn.Parameter.numel, GROUP_ELEMENTS * config.copies)]


def _numbers(scalars: Mapping[str, torch.Tensor]) -> dict[str, float]:
    """Copies scalars from their device in one transfer, since each transfer waits for all computation in progress."""
    return dict(zip(scalars, torch.stack([scalar.float() for scalar in scalars.values()]).tolist(), strict=True))
