"""A model trained by DeepSpeed that can be saved and resumed: the policy in the orchestrator's actors, the critic in
its service."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from quartet.config.learner import LearnerConfig
from quartet.folders import replace_model
from quartet.learner.layout import LAYOUT, Layout
from quartet.learner.lora import is_adapter, write_adapters
from quartet.learner.module import TrainedModule
from quartet.learner.optimizer import rate_factor
from quartet.learner.snapshot import Snapshot
from quartet.learner.tensor_parallel import whole_shape
from quartet.models.loading import load_tokenizer
from quartet.ranks.ranks import Ranks
from quartet.seams.deepspeed import clip_as_configured, save_by

WriteModel = Callable[[Any, Path, dict[str, torch.Tensor]], None]
"""Writes a module with these weights to a folder in Hugging Face's format, without a tokenizer."""

MODEL = "model"
"""Subfolder of a snapshot for the model."""
ADAPTERS = "adapters"
"""Subfolder of a model for its adapters alone, in peft's format."""


def write_pretrained(module: Any, folder: Path, weights: dict[str, torch.Tensor]) -> None:
    """Writes a model of transformers."""
    module.save_pretrained(folder, state_dict=weights)


class RankLearner(TrainedModule):
    """A trained module with its saved models and its snapshots. All ranks get the same calls in the same order.

    For example a run that checkpoints every 10 steps calls `take_snapshot(folder, 10)` between two steps and
    `write_snapshot()` in another thread while step 11 trains; after a crash `restore(folder)` returns 10.
    """

    def __init__(
        self,
        module: nn.Module,
        config: LearnerConfig,
        ranks: Ranks | None = None,
        *,
        kind: str = "model",
        write: WriteModel = write_pretrained,
        exported: bool = False,
    ) -> None:
        """Takes over `module`, as TrainedModule does. `write` writes the model; if `exported`, snapshots hold the
        model too. A saved model says its `kind`, such as policy, and one of another kind never replaces it."""
        super().__init__(module, config, ranks)
        self._kind, self._write_model, self._exported = kind, write, exported
        self._snapshot = Snapshot()
        save_by(self._engine, self._snapshot)

    def save(self, folder: Path, run: str = "") -> None:
        """Writes the weights, or their running mean if configured, and the tokenizer from rank 0; a temporary folder
        is renamed at the end, so that `folder` is never incomplete. With a `run` only that run may replace it.

        Raises:
            NotFinite: a weight is not finite.
            InvalidArgument: `folder` holds something other than a model of this kind and run, which would be lost, or
                cannot be made.
        """
        owner = f"{self._kind} of {run}" if run else self._kind
        gathers = self._config.zero_stage == 3 or self._config.tensor_parallel.size > 1
        first, weights = self.ranks.rank == 0, dict[str, torch.Tensor]()
        self.check_weights()
        with self.averaged():
            for name, tensor in self.saved_weights():
                if first:
                    # A gathered tensor is on the device, and may be valid only until the next one.
                    weights[name] = tensor.to("cpu", copy=True) if gathers else tensor
            if first:
                replace_model(folder.resolve(), partial(self._write, weights | _buffers(self.module)), owner)

    def take_snapshot(self, folder: Path, step: int, *, copies: bool = True) -> None:
        """Copies the state that training resumes from (weights, optimizer, schedule, running mean, random states)
        into host memory; `write_snapshot` writes it to files in `folder`.

        Args:
            folder: a new or empty folder, the same for all ranks, on a disk that all of them share.
            step: number of the step, stored with the state.
            copies: False writes everything at once, for models that leave no memory for copies.
        """
        self.check_weights()
        snapshot = self._snapshot
        snapshot.begin(copies=copies)
        self._engine.save_checkpoint(str(folder.parent), tag=folder.name, save_latest=False)
        snapshot.save(self._own_state(), str(self._own_file(folder)))
        first = self.ranks.rank == 0
        if first:
            snapshot.hold(self._layout(step), folder / LAYOUT, Layout.write)
        if self._exported:
            with self.averaged():  # until the weights are written: without copies they are the parameters themselves
                weights = {name: snapshot.copy(tensor) for name, tensor in self.saved_weights() if first}
                if first:
                    buffers = {name: snapshot.copy(buffer) for name, buffer in _buffers(self.module).items()}
                    snapshot.hold(weights | buffers, folder / MODEL, self._write)

    def _write(self, tensors: dict[str, torch.Tensor], folder: Path) -> None:
        """Writes the model and its tokenizer, and its adapters, if there are some among the tensors, to a
        subfolder."""
        adapters = {name: tensor for name, tensor in tensors.items() if is_adapter(name)}
        self._write_model(self.module, folder, {name: t for name, t in tensors.items() if name not in adapters})
        load_tokenizer(self._config.model).save_pretrained(folder)
        if self._config.lora is not None and adapters:
            write_adapters(folder / ADAPTERS, adapters, self.module, self._config.lora)

    def write_snapshot(self) -> None:
        """Writes the snapshot that was taken last, on every rank. May run in another thread beside any other call."""
        self._snapshot.write()

    def restore(self, folder: Path) -> int:
        """Restores the snapshot in `folder`, before any training; returns its step.

        Raises:
            InvalidArgument: the folder holds no snapshot, or one of another layout; the message names the
                differences.
        """
        layout = Layout.read(folder / LAYOUT)
        layout.check(self._layout(layout.step))
        own = self._snapshot.load(str(self._own_file(folder)))
        with self.optimizer_state.resident():
            self._engine.load_checkpoint(str(folder.parent), tag=folder.name)
            self._reapply()
        if self._average:
            self._average.load(own["average"])
        torch.set_rng_state(own["random"])
        if self.device.type == "cuda":
            torch.cuda.set_rng_state(own["device_random"], self.device)
        return layout.step

    def averaged(self) -> AbstractContextManager[None]:
        """Context in which the weights are their running mean, if one is configured, as in saved models. Every rank
        enters it, and none trains in it."""
        return self._average.in_place() if self._average else nullcontext()

    def _reapply(self) -> None:
        """Applies the present configuration of the optimizer in place of the checkpoint's."""
        optimizer, schedule = self._config.optimizer, self._engine.lr_scheduler
        schedule.base_lrs = [optimizer.learning_rate] * len(schedule.base_lrs)
        rate = optimizer.learning_rate * rate_factor(schedule.last_epoch, optimizer)
        for group in self._engine.optimizer.param_groups:
            group |= {"lr": rate, "initial_lr": optimizer.learning_rate, "betas": optimizer.betas}
            group |= {"eps": optimizer.eps, "weight_decay": optimizer.weight_decay}
        clip_as_configured(self._engine)

    def _layout(self, step: int) -> Layout:
        numbers = sum(whole_shape(parameter).numel() for parameter in self.module.parameters())
        return Layout.of(self._config, numbers, step, grouped=self.has_groups)

    def _own_state(self) -> dict[str, Any]:
        """The part of the state that DeepSpeed does not save."""
        state: dict[str, Any] = {"random": torch.get_rng_state()}
        if self.device.type == "cuda":
            state["device_random"] = torch.cuda.get_rng_state(self.device)
        if self._average:
            state["average"] = self._average.means
        return state

    def _own_file(self, folder: Path) -> Path:
        return folder / f"rank-{self.ranks.rank}.pt"


def _buffers(module: nn.Module) -> dict[str, torch.Tensor]:
    """The buffers that a saved model holds besides its parameters."""
    saved = module.state_dict().keys()
    return {name: buffer for name, buffer in module.named_buffers() if name in saved}
