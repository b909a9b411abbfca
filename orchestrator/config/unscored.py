"""Responses that get no score."""

from typing import Literal

from pydantic import NonNegativeInt

from quartet.config.base import Config, Count

PAUSE_S = 1.0
"""Seconds before a response is sent again for the first time; each later pause is so much longer."""


class UnscoredConfig(Config):
    """Responses that the reward service does not score, for instance because a function fails on them. None of them
    ever counts as a number."""

    retries: NonNegativeInt = 2
    """Times that a response is sent again whose outcome may be another then: timeout, failed or refused. The others
    of its batch do not wait for it."""
    then: Literal["end", "drop"] = "end"
    """end: the run ends with an error that names prompt, outcome and reason; it goes on with --resume. drop: the
    response is discarded with all others to its prompt, and another prompt takes their place; an evaluation leaves it
    out."""
    max_dropped: Count = 9
    """With drop: most prompts that are discarded in a step for each one of its batch; the run then ends with an
    error, as the scorer hardly scores."""
