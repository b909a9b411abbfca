"""Checks of the services' answers, for what their clients leave to the caller, before they are trained on or kept."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import numpy as np

from orchestrator.data.prompts import Prompt
from quartet.columns import Columns
from quartet.config.base import ConfigError
from quartet.wire.codec import Floats
from quartet.wire.errors import DeadlineExceeded, InvalidReply
from services.reward.client import Parts, Scores
from services.rollout.sample import Sample


class StaleSample(RuntimeError):
    """A sample exceeded the bound on staleness. The bound holds by construction, so this is a defect of a service."""


@contextmanager
def within(field: str) -> Iterator[None]:
    """Context of a call; adds `field`, the key of its deadline, to the error if the deadline is exceeded."""
    try:
        yield
    except DeadlineExceeded as error:
        raise DeadlineExceeded(f"{error} (orchestrator.{field})") from error


def check_samples(prompts: Sequence[Prompt], samples: Sequence[Sample]) -> None:
    """Raises InvalidReply unless each sample has at least one token, and all log-probs are finite."""
    for prompt, sample in zip(prompts, samples, strict=True):
        where = f"rollout.Generate: prompt row {prompt.row}"
        if not len(sample.response_ids):
            raise InvalidReply(f"{where}: response_ids: empty; every response has a token")
        check_row(f"{where}: logprobs", sample.logprobs)


def check_tokens(call: str, field: str, columns: Columns, values: Floats) -> None:
    """Raises InvalidReply unless the numbers of all sampled tokens, [M], are finite."""
    finite = np.isfinite(values)
    if not finite.all():
        at = int(np.argmin(finite))
        row = int(columns.owners[at])
        place = at - int(columns.counts[:row].sum())
        where = f"{call}: prompt row {columns['row'][row]}: {field}[{place}]"
        raise InvalidReply(f"{where} is {float(values[at])}; must be finite")


def check_scores(scores: Mapping[str, Floats], names: Sequence[str]) -> None:
    """Raises InvalidReply unless there are scores of each of these names, and none of another name."""
    if {*scores} != {*names}:
        raise InvalidReply(f"reward.Score: scores: of {', '.join(scores)}; must be of {', '.join(names)}")


def process_rewards(columns: Columns, parts: Parts) -> Floats:
    """The parts of scores at the sampled tokens that earned them, [M]. InvalidReply if a part is at a token that its
    sample does not have, or those at a token are not finite together."""
    last = columns.last_sequences().counts.astype(np.int64)
    if (beyond := parts.places > last[parts.pairs]).any():
        at = int(np.argmax(beyond))
        raise InvalidReply(
            f"reward.Score: part_places: {parts.places[at]} for sample {parts.pairs[at]} of the call, whose last "
            f"sequence has {last[parts.pairs[at]]} sampled tokens"
        )
    ends = np.cumsum(columns.counts, dtype=np.int64)
    at_tokens = (ends - last)[parts.pairs] + parts.places - 1
    with np.errstate(over="ignore"):
        earned = np.bincount(at_tokens, parts.rewards, minlength=columns.size("sampled")).astype(np.float32)
    check_tokens("reward.Score", "part_rewards", columns, earned)
    return earned


def check_scorer(before: str, scores: Scores) -> str:
    """The scorer of these scores; raises ConfigError if `before`, the scorer of earlier ones, is another one."""
    now = f"{scores.scorer} ({scores.model_hash[:12]})"
    if before not in ("", now):
        raise ConfigError(
            f"reward.scorer: {before} gave the scores of this run until now, {now} gives them now: deploy the "
            "former again and `quartet train --resume`, or go on with the new one by "
            "--resume --accept-changed-services"
        )
    return now


def check_own_logprobs(rows: Sequence[Floats]) -> None:
    """Raises InvalidReply unless all of the policy learner's log-probs of a batch are finite."""
    for row in rows:
        check_row("policy: the learner's own log-probs", row)


def check_ages(columns: Columns, step: int, version: int, bound: int) -> None:
    """Raises StaleSample if a token for `step` was sampled by a version more than `bound` behind `version`."""
    if not (late := version - columns["versions"] > bound).any():
        return
    row = int(columns.owners[np.argmax(late)])
    oldest = int(columns.rows("versions")[row].min())
    raise StaleSample(
        f"step {step}, sample {columns['number'][row]}: sampled by version {oldest}, {version - oldest} behind the "
        f"policy's {version}; loop.max_staleness is {bound}"
    )


def check_row(where: str, row: Floats) -> None:
    """Raises InvalidReply, which begins with `where`, unless all numbers of a row are finite."""
    finite = np.isfinite(row)
    if not finite.all():
        at = int(np.argmin(finite))
        raise InvalidReply(f"{where}[{at}] is {float(row[at])}; must be finite")
