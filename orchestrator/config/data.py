"""Rows of data, prompts and sampling."""

from collections.abc import Iterator
from typing import Annotated

from pydantic import Field, NonNegativeInt

from quartet.config.base import Config, Count
from services.rollout.sample import MOST_STOPS

EVAL = "eval"
"""Usual name of the split to evaluate on."""


class SplitsConfig(Config):
    """Rows of a data set: their place, and those to train and to evaluate on."""

    path: str
    """A .jsonl, .json or .parquet file, a folder of such files named after splits (train.jsonl, eval.jsonl), or
    a Hugging Face data set saved with `save_to_disk`."""
    input_key: str = "prompt"
    """Column that holds the prompt: text, or a list of chat messages when `chat_template` is on."""
    prompt_split: str = "train"
    """Split to train on, with an optional range of rows or of per cents: `train`, `train[:1000]`, `train[500:]`,
    `train[:90%]`."""
    eval_split: str | None = None
    """Split to evaluate on, in the same form. Must share no row with prompt_split. Null: `eval`, if the data have
    such a split."""
    split_seed: NonNegativeInt | None = None
    """Shuffles the rows of a split with this seed before its range is taken. Null keeps the file's order."""
    chat_template: bool = False
    """Apply the tokenizer's chat template to the prompt."""


class PromptsConfig(SplitsConfig):
    """Source of the prompts: their place, columns and splits."""

    label_key: str | None = None
    """Column whose value function scorers get as the pair's label: a text as it is, any other value as JSON."""
    columns: tuple[str, ...] = ()
    """Further columns whose values function scorers get as the pair's `columns`, such as tests that a program has to
    pass."""
    task_key: str | None = None
    """Column whose value names the prompt's task, such as its data set or difficulty: scores and lengths are measured
    for each task too, of which there may be 64."""
    eval_split: str | None = None
    """Split to evaluate on, in the same form. Must share no row with prompt_split. Null: `eval`; a run whose data
    have no such split and whose file has no section `evaluation` is not evaluated."""


class DataConfig(PromptsConfig):
    """The prompts of a run."""

    max_prompt_length: Count = 1024
    """Longest prompt, in tokens. Longer ones are left out, and their number is reported."""


class SamplingConfig(Config):
    """Sampling of responses."""

    temperature: Annotated[float, Field(ge=0.01, le=2)] = 1.0
    """Divisor of the logits in the rollout engine, the reference and the learner. At least 0.01: for less vLLM uses
    0.01, and its log-probs would differ from the learner's. At most 2, as vLLM takes no higher one."""
    max_new_tokens: Count = 256
    """Longest response, in tokens."""
    min_new_tokens: NonNegativeInt = 0
    """Fewest tokens of a response. Before them, tokens that end a response have probability 0 in the rollout engine,
    the reference and the learner."""
    stop_token_ids: Annotated[tuple[NonNegativeInt, ...], Field(max_length=MOST_STOPS)] = ()
    """Tokens that end a response, in addition to those of the policy's generation configuration and tokenizer; 256 at
    most."""
    seeded: bool = True
    """Give each request a seed of its own, derived from the run's `seed` and the sample's number."""

    def _problems(self) -> Iterator[str]:
        if self.min_new_tokens > self.max_new_tokens:
            yield f"min_new_tokens ({self.min_new_tokens}) must not exceed max_new_tokens ({self.max_new_tokens})"
