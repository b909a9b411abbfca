"""Held-out evaluation."""

from pydantic import Field, NonNegativeInt, field_validator

from quartet.config.base import Config, Count, Seconds

MEASURED = frozenset({"score", "kl", "length", "truncated", "loss", "accuracy", "unscored"})
"""Names of what every evaluation measures itself."""
NAMED = ("score/", "task/")
"""Beginnings of what an evaluation measures by the names of scores and by tasks."""
BOUNDS = ("_low", "_high")
"""Endings of the bounds of each interval."""


class EvaluationConfig(Config):
    """Evaluation on held-out prompts while training runs."""

    every: NonNegativeInt = 10
    """Steps between evaluations; there is one before the first step and one after the last. 0: never."""
    max_prompts: Count | None = None
    """Number of prompts of eval_split to use, from its start. Null: all."""
    samples_per_prompt: Count = 1
    """Responses to each prompt, sampled at the training temperature."""
    judges: dict[str, str] = Field(default_factory=dict)
    """Name -> import path, such as `recipes.reviews.gold:score`, of functions that also score the evaluation's
    samples. Training never uses them. They run in a thread beside the loop."""
    judge_s: Seconds = 600
    """Longest time, in seconds, for each judge's verdicts of an evaluation; one that takes longer ends the run."""

    @field_validator("judges")
    @classmethod
    def _names_are_free(cls, judges: dict[str, str]) -> dict[str, str]:
        if taken := MEASURED & judges.keys():
            raise ValueError(
                f"{', '.join(sorted(taken))}: measured by every evaluation; call the judge something else"
            )
        if wrong := [name for name in judges if name.startswith(NAMED) or name.endswith(BOUNDS)]:
            raise ValueError(
                f"{', '.join(wrong)}: the name of a judge cannot begin with {' or '.join(NAMED)}, nor end in "
                f"{' or '.join(BOUNDS)}, as other measures do"
            )
        return judges
