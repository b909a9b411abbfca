"""The commands of trainings on examples, such as `quartet sft`: from a file to a trained model."""

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from orchestrator.commands.restarts import restarting
from orchestrator.commands.run_folder import RUNS, check_untrained, differences, locked
from orchestrator.commands.train import connected_ray, ended_like_interrupted
from orchestrator.data.examples import Examples, evaluation_split
from orchestrator.data.prompts import check_rows
from orchestrator.deployment.facts.hub import Pinned
from orchestrator.deployment.record import record
from orchestrator.loop.checkpoint import Checkpoints, end_if_stuck
from orchestrator.loop.checkpoint_folder import Checkpoint, clear, latest
from orchestrator.monitoring.metrics import CHECKPOINTS, MetricsLog
from orchestrator.monitoring.progress import Progress
from orchestrator.monitoring.record import Record
from orchestrator.monitoring.run_log import RunLog
from orchestrator.supervised.contract import Supervised
from orchestrator.supervised.ranks import SupervisedModel, ranks_of
from orchestrator.supervised.registry import TRAININGS
from orchestrator.supervised.state import ExamplesState
from quartet.columns import Columns
from quartet.config.base import ConfigError, read_yaml
from quartet.folders import unreplaceable
from quartet.models.device import default_device
from quartet.models.distribution import end_ids
from quartet.models.loading import load_config, load_tokenizer, max_length
from quartet.ranks.group import RankGroup, RanksLost
from quartet.wire.codec import Floats
from quartet.wire.errors import NotFinite, ServiceError

LONGEST = 1024
"""Most tokens of a sequence where the file does not say, and the model takes more."""
_ORDER = {"examples": "data", "seed": "seed", "batch_size": "batch_size", "shuffle": "shuffle"}
"""Key of a checkpoint's state on which the examples of each step depend -> the field that sets it."""


@dataclass(frozen=True, slots=True)
class TrainingFile:
    """The file of a training on examples."""

    training: Supervised
    record: Mapping[str, Any]
    """The contents without secrets."""

    @classmethod
    def load(cls, command: str, path: Path, pinned: Pinned | None = None) -> "TrainingFile":
        """Reads a file; its model and data are fetched first if they are of a hub and not there.

        Args:
            command: name of the training, such as sft.
            path: the YAML file, beside which its lock is.
            pinned: models and data sets of a hub; None: those of Hugging Face's.

        Raises:
            ConfigError: a line for each wrong field.
        """
        raw = {key: value for key, value in read_yaml(path).items() if key != "shared"}
        if of_a_run := sorted(raw.keys() & {"applications", "orchestrator", "prompts", "algorithm"}):
            raise ConfigError(
                f"{path}: is a file of `quartet train`, as it has {', '.join(of_a_run)}; `quartet {command}` takes "
                "one with name, model, data and optimizer (docs/before-ppo.md)"
            )
        pinned, data = pinned or Pinned.beside(path), raw.get("data")
        if isinstance(data, str):
            raw["data"] = data = {"path": data}
        written = record(raw)
        if isinstance(model := raw.get("model"), str):
            raw["model"] = pinned.place(model, "model", "model")
        if isinstance(data, Mapping) and isinstance(place := data.get("path"), str):
            raw["data"] = {**data, "path": pinned.place(place, "dataset", "data.path")}
        return cls(TRAININGS[command].parse(raw, ""), written)


@dataclass(frozen=True, slots=True)
class Inputs:
    """All that a training reads before its model is loaded."""

    train: Examples
    held_out: Examples | None
    """The examples to evaluate on, if there are any."""
    digest: str
    """sha256 of the examples that are trained on."""

    @property
    def notes(self) -> Iterator[str]:
        """Remarks for the user that are not errors."""
        for part in (self.train, self.held_out):
            if part is not None and part.left_out:
                count = part.left_out + len(part)
                yield f"{part.left_out} of {count} examples of {part.name} are longer than max_length and left out"


def read_inputs(training: Supervised) -> Inputs:
    """Reads and checks the examples.

    Raises:
        ConfigError: a row cannot be an example, or the files do not fit the model. The message names file, line and
            column.
    """
    model = load_config(training.model)
    limit = max_length(model.get_text_config())
    if training.max_length is not None and training.max_length > limit:
        raise ConfigError(f"max_length: {training.max_length}, but {training.model} takes {limit} tokens at most")
    if training.max_length is None:
        training = training.model_copy(update={"max_length": min(limit, LONGEST)})
    tokenizer = load_tokenizer(training.model)
    ends, vocabulary = end_ids(training.model, tokenizer), int(model.get_text_config().vocab_size)
    train = training.read(training.data.prompt_split, tokenizer, ends, vocabulary)
    split = evaluation_split(training.data)
    held_out = training.read(split, tokenizer, ends, vocabulary) if split else None
    if held_out is not None:
        check_rows((train.name, train.rows), (held_out.name, held_out.rows))
    return Inputs(train, held_out, train.columns.digest())


@dataclass(frozen=True, slots=True)
class Order:
    """The examples of each step: passes over all of them, each in an order of its own."""

    count: int
    """Number of examples."""
    epochs: int
    batch_size: int
    seed: int | None
    """Seed of the orders; None: that of the file, in each pass."""

    @property
    def steps(self) -> int:
        """Number of steps."""
        return math.ceil(self.count * self.epochs / self.batch_size)

    def taken(self, step: int) -> list[int]:
        """Indices of the examples of the step with this number, from 0. It follows from the number alone, so that a
        resumed run needs nothing else."""
        first = step * self.batch_size
        numbers = range(first, min(first + self.batch_size, self.count * self.epochs))
        orders = {epoch: self._order(epoch) for epoch in {number // self.count for number in numbers}}
        return [int(orders[number // self.count][number % self.count]) for number in numbers]

    def _order(self, epoch: int) -> np.ndarray:
        if self.seed is None:
            return np.arange(self.count)
        return np.random.default_rng([self.seed, epoch]).permutation(self.count)


def connection(training: Supervised) -> AbstractContextManager[None]:
    """Context with what the ranks of a training need: a Ray cluster for several."""
    return connected_ray() if training.ranks > 1 else ended_like_interrupted()


async def fit(
    file: TrainingFile,
    progress: Progress,
    *,
    run_dir: Path | None = None,
    overwrite: bool = False,
    resume: bool = False,
    start: Callable[[Supervised], RankGroup] = ranks_of,
    connect: Callable[[Supervised], AbstractContextManager[None]] = connection,
) -> Path:
    """Carries out one training from start to end; returns the folder of its model.

    Everything that it reads is checked before the model is loaded.

    Args:
        file: the configuration.
        progress: shows each step.
        run_dir: the run's folder; None: the one below `runs` that has its name.
        overwrite: True to replace an earlier run of the same name.
        resume: True to continue that run from its last checkpoint.
        start: makes the ranks.
        connect: opened before ranks are made, and closed at the end.

    Raises:
        ConfigError: the configuration, the data and the model do not fit together; or the only rank, a thread that
            cannot be ended, missed its deadline.
        NotFinite: the weights or too many gradients are not finite.
        RanksLost, ServiceError: a rank was lost, and the restarts are used up.
    """
    training, run_dir = file.training, run_dir or RUNS / file.training.name
    if not (resume or overwrite):
        clear((run_dir / CHECKPOINTS).resolve(), overwrite=False)  # before the examples are read, which may be many
    inputs = read_inputs(training)
    seed = training.seed if training.shuffle else None
    order = Order(len(inputs.train), training.epochs, training.batch_size, seed)
    if training.gradient_checkpointing == "auto":
        training = training.model_copy(update={"gradient_checkpointing": default_device().type == "cuda"})
    with RunLog.of(progress) as log:
        run = Run(training.for_steps(order.steps), file.record, inputs, order, log, run_dir, start)
        if problem := unreplaceable(run.save_to, training.owner):
            raise ConfigError(f"save: {problem}")
        with locked(run_dir, run.checkpoints):
            if resume:  # also where it cannot go on
                log.keep_in(run_dir)
            with connect(training):
                await run.finish(overwrite=overwrite, resume=resume)
    return run.save_to


@dataclass(frozen=True, slots=True)
class Run:
    """The parts of a training that survive a restart of its ranks."""

    training: Supervised
    record: Mapping[str, Any]
    inputs: Inputs
    order: Order
    progress: RunLog
    run_dir: Path
    start: Callable[[Supervised], RankGroup]

    @property
    def checkpoints(self) -> Path:
        """The folder of checkpoints."""
        return (self.run_dir / CHECKPOINTS).resolve()

    @property
    def save_to(self) -> Path:
        """The folder of the trained model."""
        return Path(self.training.save or self.run_dir / "model").resolve()

    async def finish(self, *, overwrite: bool, resume: bool) -> None:
        """Trains to the end; goes back to the last checkpoint when a rank is lost."""
        checkpoint = self._to_resume() if resume else None
        if not resume:
            clear(self.checkpoints, overwrite=overwrite)
        for note in self.inputs.notes:
            self.progress.note(note)

        async def carry_out(checkpoint: Checkpoint[ExamplesState] | None, attempt: int) -> None:
            model = SupervisedModel(self.start(self.training), self.training)
            try:
                await self._train(model, checkpoint, overwrite=overwrite, resume=resume or attempt > 0)
            except (RanksLost, ServiceError) as error:
                if not model.goes_on:
                    raise
                # A restart would build a second model beside the one that this thread still holds.
                raise ConfigError(
                    f"{error}; it runs in a thread of this process and cannot be ended alone. If it only needs "
                    f"longer, raise rank_timeout_s ({self.training.rank_timeout_s:g}) or, for checkpoints, "
                    f"checkpoint.timeout_s ({self.training.checkpoint.timeout_s:g}); then go on with --resume"
                ) from error

        def last() -> Checkpoint[ExamplesState] | None:
            return latest(self.checkpoints, ExamplesState)

        await restarting(carry_out, checkpoint, last, self.training.checkpoint, self.progress.note)

    def _to_resume(self) -> Checkpoint[ExamplesState] | None:
        """The last checkpoint, if there is one. ConfigError if the run cannot go on from it, or was trained and has
        none."""
        checkpoint = latest(self.checkpoints, ExamplesState)
        if checkpoint is None:
            check_untrained(self.run_dir, self.checkpoints)
            self.progress.note(f"{self.run_dir} has no checkpoint yet: beginning at step 1")
            return None
        state, now = checkpoint.state, self._state(0)
        if changed := [field for name, field in _ORDER.items() if getattr(state, name) != getattr(now, name)]:
            raise ConfigError(
                f"{', '.join(changed)}: not what the checkpoint of step {state.step} was trained with, and each step "
                "would take other examples; set it back, or begin again with --overwrite"
            )
        if state.step > self.order.steps:
            raise ConfigError(
                f"epochs: {self.training.epochs} makes {self.order.steps} steps, but the last checkpoint is of "
                f"step {state.step}"
            )
        if state.step == self.order.steps:
            self.progress.note(
                f"{self.run_dir} is finished, at step {state.step}; its model is written again, and more epochs go on"
            )
        else:
            self.progress.note(f"resuming {self.run_dir} after step {state.step} of {self.order.steps}")
        with contextlib.suppress(ConfigError):
            for line in differences(read_yaml(self.run_dir / "config.yaml"), self.record):
                self.progress.note(line)
        return checkpoint

    def _state(self, step: int, skipped_in_a_row: int = 0) -> ExamplesState:
        training = self.training
        return ExamplesState(
            step=step,
            examples=self.inputs.digest,
            batch_size=training.batch_size,
            seed=training.seed,
            shuffle=training.shuffle,
            skipped_in_a_row=skipped_in_a_row,
        )

    async def _train(
        self,
        model: SupervisedModel,
        checkpoint: Checkpoint[ExamplesState] | None,
        *,
        overwrite: bool,
        resume: bool,
    ) -> None:
        """Trains from a checkpoint, or from the start."""
        training, after = self.training, checkpoint.state.step if checkpoint else -1 if resume else None
        log = MetricsLog.open(self.run_dir, training.log, self.record, overwrite=overwrite, resume_after=after)
        with log, contextlib.closing(model):
            self.progress.keep_in(self.run_dir)
            await model.start()
            if checkpoint:
                await model.restore(checkpoint.folder)
            state = checkpoint.state if checkpoint else self._state(0)
            kept = Checkpoints(self.checkpoints, training.checkpoint, [model], None, self.progress.note)
            shown = Record(log, self.progress, self.order.steps)
            async with kept:
                with shown.running(state.step):
                    if checkpoint is None:
                        if first := await self._evaluated(model):
                            shown.before_training(first)
                        await kept.first(state)
                    for step in range(state.step, self.order.steps):
                        state = await self._step(step, model, kept, shown)
            if training.describes:
                measured = (self.inputs.held_out or self.inputs.train).columns
                await model.describe(training.described(measured, await _outputs(model, measured)))
            await model.save(self.save_to)

    async def _step(self, step: int, model: SupervisedModel, kept: Checkpoints, shown: Record) -> ExamplesState:
        """Carries out the step after `step` others; the state after it."""
        began, done = time.monotonic(), step + 1
        batch = self.inputs.train.take(self.order.taken(step))
        learned = await model.train(batch, self.training.seed * 1_000_003 + done)
        train_s = time.monotonic() - began
        state = self._state(done, int(learned["skipped_in_a_row"]))
        metrics = {f"train/{name}": value for name, value in learned.items()}
        metrics |= {"train/epoch": min(done * self.order.batch_size / self.order.count, float(self.order.epochs))}
        metrics |= {"seconds/train": train_s, "tokens_per_s/training": batch.tokens / train_s}
        every = self.training.evaluate_every
        if done == self.order.steps or (every and done % every == 0):
            metrics |= await self._evaluated(model)
        # Before its checkpoint, as a resumed run keeps the lines up to there.
        shown.step(done, metrics | {"seconds/checkpoint": kept.waited_s(), "seconds/step": time.monotonic() - began})
        end_if_stuck(state, self.training.checkpoint, kept.last_step)
        # Also after the last step, by which a finished run is known.
        await kept.take_if_due(state, last=done == self.order.steps)
        await shown.pause()
        return state

    async def _evaluated(self, model: SupervisedModel) -> dict[str, float]:
        """Metrics of an evaluation; none without examples to evaluate on."""
        if self.inputs.held_out is None:
            return {}
        began, examples = time.monotonic(), self.inputs.held_out.columns
        measured = self.training.measured(examples, await _outputs(model, examples))
        metrics = {f"eval/{name}": value for name, value in measured.items()}
        return metrics | {"seconds/evaluate": time.monotonic() - began}


async def _outputs(model: SupervisedModel, examples: Columns) -> Floats:
    """The model's outputs for examples. NotFinite if one of them is not finite: no figure can be made of it."""
    outputs = await model.outputs(examples)
    if not np.isfinite(outputs).all():
        raise NotFinite(
            "the model's outputs for the examples that measure it are not finite: it has diverged, or was so from "
            "the start; begin again with --overwrite and a lower optimizer.learning_rate"
        )
    return outputs
