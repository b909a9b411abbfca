"""The work that a service admits, and its shares for callers: the `limits:` of a service's `args:`."""

from collections.abc import Iterator
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from quartet.config.base import Config, Count, Fraction, Seconds


class LimitsConfig(Config):
    """Limits on calls and on waiting work. A row is a prompt or a pair of prompt and response."""

    max_call_rows: Count = 4096
    """Most rows in one call. Larger calls are refused with RESOURCE_EXHAUSTED, and clients split them."""
    max_call_tokens: Count = 4 << 20
    """Most tokens in one call; rollout counts each prompt and its max_new_tokens. A byte of text counts as a
    token."""
    max_waiting_rows: Count = 32_768
    """Most rows that are admitted and not answered yet. Further calls are refused with RESOURCE_EXHAUSTED and the
    time after which to try again."""
    max_waiting_tokens: Count = 64 << 20
    """Most tokens that are admitted and not answered yet."""
    max_waiting_calls: Annotated[int, Field(ge=2, le=2048)] = 1024
    """Most calls that are admitted and not answered yet. Serve lets a replica have twice the largest value allowed
    here, so that a call too many reaches the replica and is refused, rather than wait in Serve's queue, where shares
    do not count."""
    caller_share: Annotated[Fraction, Field(gt=0)] = 0.5
    """Share of the waiting work that one caller may hold; and share of the engine's requests that a caller outside
    the run may hold."""
    training_reserve: Annotated[Fraction, Field(lt=1)] = 0.25
    """Share of the waiting work, and of the engine's requests, that is kept for training."""
    batch_s: Seconds = 20
    """Longest time, in seconds, that one pass of the model or function may take. After that it counts as hung: its
    callers get UNAVAILABLE, health fails, and Serve replaces the replica."""

    def _problems(self) -> Iterator[str]:
        share = min(self.caller_share, 1 - self.training_reserve)
        for unit in ("rows", "tokens"):
            call, waiting = getattr(self, f"max_call_{unit}"), getattr(self, f"max_waiting_{unit}")
            if call > share * waiting:
                yield (
                    f"max_call_{unit}: {call}; should be at most {int(share * waiting)}, the part of "
                    f"max_waiting_{unit} that caller_share and training_reserve leave to one caller"
                )


def completed_by(default: LimitsConfig) -> BeforeValidator:
    """Has limits that a file gives in part keep the other values of a service's own `default`."""

    def completed(given: Any) -> Any:
        return default.model_dump() | given if isinstance(given, dict) else given

    return BeforeValidator(completed)
