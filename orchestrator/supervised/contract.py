"""The contract of a training on examples: its file, its examples, its model, its objective, and what is measured.

A new one is a class in a file beside this one and a row in `registry`, which makes it a command; each setting has a
docstring, which the user reads. `sft.py` is one.
"""

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

from pydantic import NonNegativeInt

from orchestrator.config.checkpoint import SnapshotsConfig
from orchestrator.config.data import SplitsConfig
from orchestrator.config.run import LogConfig, RunName
from orchestrator.data.examples import Examples, Part, answered_chat, chats_as_parts, texts_as_parts
from orchestrator.data.splits import Row
from quartet.columns import Columns
from quartet.config.base import ConfigError, Count, ModelPath, Seed
from quartet.config.learner import LearnerConfig
from quartet.wire.codec import Floats

if TYPE_CHECKING:  # torch takes a second that an error in a file need not wait for
    from torch import Tensor, nn

    from quartet.learner.objective import Objective
    from quartet.models.sequences import PairTensors


class ExamplesConfig(SplitsConfig):
    """The examples to learn from."""

    path: str
    """A .jsonl, .json or .parquet file, a folder of such files named after splits (train.jsonl, eval.jsonl), a
    Hugging Face data set saved with `save_to_disk`, or a data set of the hub, as ORG/NAME@REVISION or
    ORG/NAME@REVISION/FOLDER."""
    chat_template: bool = False
    """Write conversations by the tokenizer's chat template. False: texts as they are."""
    append_eos: bool = True
    """End each answer that is a text with the tokenizer's end token, by which the model learns to stop. False: texts
    hold it themselves, where they end. A chat template writes its own."""

    def parts(
        self, rows: Sequence[Row], answers: Sequence[str], tokenizer: Any, ends: Sequence[int]
    ) -> list[list[Part]]:
        """The token ids of each row's prompt with each of its answers, which are in these columns."""
        both = [(row, answer) for row in rows for answer in answers]
        if self.chat_template:
            chats = [answered_chat(row, self.input_key, answer) for row, answer in both]
            return chats_as_parts(chats, tokenizer, ends)
        texts = [(row.text(self.input_key), row.text(answer)) for row, answer in both]
        return texts_as_parts(texts, tokenizer, append_eos=self.append_eos)

    def _problems(self) -> Iterator[str]:
        if self.chat_template and not self.append_eos:
            yield "append_eos: a chat template writes its own end of a reply; leave it out"


class Supervised(LearnerConfig):
    """The settings that all trainings on examples share; each adds its own. Those of the learner are at the top of
    the file: `model`, `optimizer` and the rest."""

    about: ClassVar[str]
    """A line for the command's help."""
    owner: ClassVar[str]
    """Kind of the model that is written, such as policy."""

    model: ModelPath
    """The model to start from: a folder in Hugging Face's format; or ORG/NAME@REVISION of the hub, fetched once and
    pinned in a lock beside this file."""
    name: RunName
    """The run's name: results go to runs/<name>. Letters, digits, `_`, `-` and `.`."""
    data: ExamplesConfig
    """Examples."""
    seed: Seed = 0
    """Seed of the order of examples and of new weights."""
    epochs: Count = 1
    """Passes over the examples."""
    batch_size: Count = 64
    """Examples of an optimizer step. What remains of the last pass is a smaller last batch."""
    shuffle: bool = True
    """Take the examples of each pass in a new random order. False: in the file's order."""
    max_length: Count | None = None
    """Longest sequence, in tokens. Examples with longer ones are left out, and their number is reported. Null: what
    the model takes, 1024 at most."""
    evaluate_every: NonNegativeInt = 0
    """Steps between evaluations on data.eval_split. There is always one before the first step and one after the last,
    if the data have such a split. 0: only these."""
    checkpoint: SnapshotsConfig = SnapshotsConfig()
    """Checkpoints, in runs/<name>/checkpoints."""
    log: LogConfig = LogConfig()
    """Metrics."""
    save: str | None = None
    """Folder to which the trained model is written at the end, in Hugging Face's format. Null: runs/<name>/model."""

    def for_steps(self, steps: int) -> Self:
        """The same for a run of so many steps, with which a schedule without an end ends. ConfigError if its warm-up
        does not."""
        optimizer = self.optimizer.for_steps(steps)
        if optimizer != self.optimizer and optimizer.warmup_steps >= steps:
            raise ConfigError(
                f"optimizer.warmup_steps: {optimizer.warmup_steps}; must be less than the run's {steps} steps "
                "(epochs * examples / batch_size)"
            )
        return self.model_copy(update={"optimizer": optimizer})

    def _problems(self) -> Iterator[str]:
        if self.colocate:
            yield "colocate gives memory to services between updates, and this training has none beside it"
        if given := self.place_without_ranks:
            yield (
                f"{', '.join(given)}: for several ranks; with ranks: 1 the command's own process trains, "
                "with its environment and its GPU; leave it out"
            )

    @abstractmethod
    def read(self, split: str, tokenizer: Any, ends: tuple[int, ...], vocabulary: int) -> Examples:
        """The examples of a split.

        Args:
            split: the split, with a range if wanted.
            tokenizer: the model's tokenizer.
            ends: tokens that end a text.
            vocabulary: upper limit of ids.

        Raises:
            ConfigError: a row cannot be an example; the message names file, line and column.
        """

    @abstractmethod
    def load(self) -> "nn.Module":
        """The model to train, with its adapters if it gets any."""

    @abstractmethod
    def objective(self) -> "Objective":
        """The objective that is minimised."""

    @abstractmethod
    def outputs(self, model: Any, pairs: "PairTensors") -> "Tensor":
        """The model's numbers for response tokens, from which `measured` follows; [R, C]."""

    @abstractmethod
    def measured(self, examples: Columns, outputs: Floats) -> dict[str, float]:
        """Metrics of an evaluation, `<name>_low` and `<name>_high` being the bounds of their intervals; from a number
        for each sampled token, [M]."""

    def described(self, examples: Columns, outputs: Floats) -> dict[str, float]:
        """Entries of the trained model's config.json, from the same numbers of the examples that it is evaluated on,
        or else of those that it was trained on; none by default, which takes no pass."""
        return {}

    describes: ClassVar[bool] = False
    """True if `described` gives entries."""

    @abstractmethod
    def write(self, module: "nn.Module", folder: Path, weights: "Mapping[str, Tensor]") -> None:
        """Writes the model in Hugging Face's format, without a tokenizer."""
