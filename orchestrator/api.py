"""The Python API: what the commands do, for scripts and notebooks. `import quartet` offers its names.

    import quartet

    quartet.up("ppo.yaml")
    with quartet.Training("ppo.yaml") as training:
        for step in training:
            print(step.number, step.metrics["score/mean"])
    print(quartet.evaluate("ppo.yaml", model=training.policy).table())
    quartet.down()

Errors are those of the commands: ConfigError for input that is wrong, ServiceError for a service that fails.
"""

import asyncio
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from queue import Queue
from typing import TYPE_CHECKING, Self, TypeVar

from orchestrator.deployment import cluster
from orchestrator.deployment.file import Deployment
from orchestrator.monitoring.metrics import read_metrics
from quartet import tasks
from quartet.wire.callers import Purpose
from quartet.wire.errors import leaves

if TYPE_CHECKING:
    from orchestrator.clients import Services
    from orchestrator.commands.evaluate import Evaluation

Result = TypeVar("Result")
Note = Callable[[str], None]
"""Takes a message for the user."""
_LOOK_S = 1.0
"""Seconds between two looks of a run at whether the program ends."""


def up(file: str | Path, timeout_s: float = 600, note: Note = print) -> None:
    """Starts a Ray head in this folder unless one runs, deploys the file and returns when every model answers, as
    `quartet up` does.

    Raises:
        ConfigError, PortError, ClusterError: the file, a port or a service is wrong; the message says how.
    """
    from orchestrator.commands import up as commands

    _alone(lambda: commands.up(Path(file), timeout_s, note))


def down() -> bool:
    """Stops what `up` started in this folder; False if nothing of it runs."""
    started = cluster.last()
    if started is None:
        return False
    cluster.stop(started)
    return True


def connect(file: str | Path, purpose: Purpose = Purpose.EVALUATION) -> "Services":
    """Clients of the services that the file names, as the commands use them. Their methods are coroutines; they
    connect at the first call, and `await services.close()` ends them."""
    from orchestrator.clients import Services

    return Services.connect(Deployment.load(file).orchestrator, purpose)


def evaluate(
    file: str | Path,
    model: str | Path = "current",
    split: str | None = None,
    output: str | Path | None = None,
    note: Note = print,
) -> "Evaluation":
    """Generates on a split of the data and has the deployed reward service score it, as `quartet evaluate` does.

    Args:
        file: the YAML file whose services are up.
        model: a model's folder, or `current` for the rollout service's weights.
        split: such as `train[:100]`; None: the file's `data.eval_split`.
        output: where the samples are written as JSONL; None: beside the run's other files.
        note: gets messages for the user.
    """
    from orchestrator.commands.evaluate import evaluate_model

    deployment, path = Deployment.load(file), None if output is None else Path(output)
    return _alone(lambda: tasks.run(evaluate_model(deployment, str(model), split, path, note=note)))


def metrics(run_dir: str | Path) -> list[dict[str, float]]:
    """The metrics of each step of a run, from its folder; step 0 is an evaluation before training. NaN stands for
    numbers that are not finite.

    Raises:
        ConfigError: the folder holds no metrics, or they are damaged.
    """
    return read_metrics(Path(run_dir) / "metrics.jsonl")


@dataclass(frozen=True, slots=True)
class Step:
    """One step of a run that is done."""

    number: int
    """Counted from 1."""
    metrics: Mapping[str, float]
    """The step's line in metrics.jsonl."""


class Training:
    """A run of the file's training, by the loop of `quartet train`, step by step: an iterator over its steps.

    The run begins with the first step that is asked for, and waits after each until the next is asked for; sampling
    goes on meanwhile as far as `loop.max_staleness` lets it. A run that is left before its last step may be continued
    with `resume=True` from its last checkpoint. One that is never closed is interrupted when the program ends.
    """

    def __init__(
        self,
        file: str | Path,
        *,
        overwrite: bool = False,
        resume: bool = False,
        take_over: bool = False,
        accept_changed_services: bool = False,
        note: Note = print,
    ) -> None:
        """Reads the file.

        Args:
            file: the YAML file, whose services are up.
            overwrite: replace an earlier run of the same name.
            resume: continue that run from its last checkpoint.
            take_over: claim the services even if another run holds them, which ends that run.
            accept_changed_services: resume although services have other models than at the checkpoint.
            note: gets messages for the user.

        Raises:
            ConfigError: the file is wrong, or it is to begin again and to go on.
        """
        from orchestrator.commands.run_folder import check_beginning

        check_beginning(overwrite=overwrite, resume=resume)
        self._deployment = Deployment.load(file)
        self._options = {
            "overwrite": overwrite,
            "resume": resume,
            "take_over": take_over,
            "accept_changed_services": accept_changed_services,
        }
        self._paced = _Paced(note)
        self._thread: threading.Thread | None = None
        self._task: asyncio.Task[Path] | None = None
        self._closed = False

    @property
    def folder(self) -> Path:
        """Folder of the run's metrics, journal and evaluations."""
        from orchestrator.commands.run_folder import RUNS

        return RUNS / self._deployment.orchestrator.name

    @property
    def policy(self) -> Path:
        """Folder of the trained policy, written after the last step."""
        from orchestrator.commands.run_folder import policy_folder

        return policy_folder(self._deployment.orchestrator)

    def __iter__(self) -> Iterator[Step]:
        return self

    def __next__(self) -> Step:
        """Carries out the next step.

        Raises:
            StopIteration: the last step is done, and the policy is saved; or the run was closed.
            ConfigError, LeaseLost, ServiceError, RanksLost: as `quartet train` ends with.
        """
        if self._closed and self._thread is None:
            raise StopIteration
        if self._thread is None:
            # A thread with an event loop of its own: a notebook's is running already.
            self._thread = threading.Thread(target=self._run, name="quartet-training")
            self._thread.start()
        else:
            self._paced.allow()
        told = self._paced.told.get()
        if isinstance(told, Step):
            return told
        self._paced.told.put(told)  # for those who ask again
        if told is None:
            raise StopIteration
        raise told

    def close(self) -> None:
        """Ends the run; what it has done stays, as after a Ctrl-C. After its last step only waits until the policy is
        saved."""
        self._closed = True
        if self._thread is None:
            return
        if self._paced.finishes:
            self._paced.let_go()
        elif self._task is not None:
            _call_in(self._task.get_loop(), self._task.cancel)
        self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self) -> None:
        end: BaseException | None = None
        try:
            tasks.run(self._trained())
        except asyncio.CancelledError:
            pass  # by close, or at the end of the program
        except BaseException as error:
            end = _single(error)
        self._paced.told.put(end)

    async def _trained(self) -> None:
        # Must come before Ray is imported, which then fixes its own address and its token.
        cluster.join()
        from orchestrator.commands.train import train

        self._paced.begin()
        self._task = asyncio.ensure_future(train(self._deployment, self._paced, **self._options))
        if self._closed:  # meanwhile, when there was no task to cancel
            self._task.cancel()
        leaving = asyncio.ensure_future(_leave_with_program(self._task))
        try:
            await self._task
        finally:
            leaving.cancel()


async def _leave_with_program(run: "asyncio.Task[Path]") -> None:
    """Interrupts the run when the program's main thread has ended, which then waits for the run's thread: before
    whatever is registered for the end of the program, such as the end of Ray, without which a run cannot end in
    order."""
    while threading.main_thread().is_alive():
        await asyncio.sleep(_LOOK_S)
    run.cancel()


class _Paced:
    """A run's progress, which hands over each step and waits until the next is asked for."""

    def __init__(self, note: Note) -> None:
        self._note = note
        self.told: Queue[Step | BaseException | None] = Queue()
        """Steps, and then the error that ended the run, or None."""
        self._total = self._done = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._allowed = asyncio.Event()
        self._let_go = False

    def begin(self) -> None:
        """Begins, in the event loop of the run."""
        self._loop = asyncio.get_running_loop()

    def allow(self) -> None:
        """Lets the next step begin; called by another thread than the run's."""
        if self._loop is not None:
            _call_in(self._loop, self._allowed.set)

    def let_go(self) -> None:
        """Lets all further steps begin, without a pause between them; called by another thread than the run's."""
        # Set first: a pause may begin between this and its wake, as the last step is done before its checkpoint is.
        self._let_go = True
        self.allow()

    @property
    def finishes(self) -> bool:
        """True if the last step is done."""
        return 0 < self._total <= self._done

    def start(self, total_steps: int, done: int) -> None:
        self._total, self._done = total_steps, done

    def before_training(self, metrics: Mapping[str, float]) -> None:
        """Does nothing: `metrics` has them."""

    def step(self, step: int, metrics: Mapping[str, float], seconds_left: float) -> None:
        self._done, self._last = step, Step(step, dict(metrics))

    async def pause(self) -> None:
        self._allowed.clear()
        self.told.put(self._last)
        if not self._let_go:
            await self._allowed.wait()

    def note(self, text: str) -> None:
        self._note(text)

    def stop(self) -> None:
        """Does nothing, as nothing is shown."""


def _call_in(loop: asyncio.AbstractEventLoop, function: Callable[[], object]) -> None:
    """Has an event loop of another thread call the function, unless it has ended."""
    with suppress(RuntimeError):
        loop.call_soon_threadsafe(function)


def _alone(work: Callable[[], Result]) -> Result:
    """The result of `work` in a thread without an event loop, since a notebook's is running."""
    results: list[Result] = []
    errors: list[BaseException] = []

    def carry_out() -> None:
        try:
            results.append(work())
        except BaseException as error:
            errors.append(_single(error))

    thread = threading.Thread(target=carry_out, name="quartet")
    thread.start()
    thread.join()
    for error in errors:
        raise error
    return results[0]


def _single(error: BaseException) -> BaseException:
    """The only error of a group; the group if it has several."""
    found = leaves(error)
    return found[0] if len(found) == 1 else error
