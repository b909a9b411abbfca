"""The answer of `/rl/trajectory`, a session's tokens: written as JSON, and read again as columns for the learner."""

import json
import math
from typing import Any

import numpy as np

from quartet.columns import Columns
from quartet.trajectory import Segment, Trajectory, columns_of
from quartet.wire.codec import Floats, Ints

_PIECE = 4096
"""Most numbers that are written as JSON at a time."""


def as_json(told: Any) -> str:
    """Writes as JSON what `Sessions.trajectory` returns, in a thread beside an event loop: json lets no other thread
    run until it has written a value, so that arrays are written in pieces."""
    if isinstance(told, np.ndarray):
        pieces = (json.dumps(told[at : at + _PIECE].tolist())[1:-1] for at in range(0, len(told), _PIECE))
        return f"[{', '.join(pieces)}]"
    if isinstance(told, dict):
        return "{" + ", ".join(f"{json.dumps(name)}: {as_json(value)}" for name, value in told.items()) + "}"
    if isinstance(told, list):
        return f"[{', '.join(map(as_json, told))}]"
    return json.dumps(told)


def trajectories_of(told: dict[str, Any], number: int, group: int, row: int) -> list[Trajectory]:
    """The trajectories of a session from the answer of `/rl/trajectory`, one for each sequence that has tokens, with
    numbers from `number` on, for `quartet.trajectory.columns_of`.

    Args:
        told: the answer's contents.
        number, group, row: of the first of them, as in Trajectory.

    Raises:
        ValueError: lengths of segments do not add up to those of the ids, or of log-probs to those of a segment.
    """
    counted = [turn for turn in told["interactions"] if not turn["superseded"] and turn["reward"] is not None]
    rewards = {(turn["sequence"], turn["end"]): float(turn["reward"]) for turn in counted}
    made: list[Trajectory] = []
    for place, sequence in enumerate(told["sequences"]):
        ids = np.asarray(sequence["ids"], np.int32)
        lengths = [segment["length"] for segment in sequence["segments"]]
        if sum(lengths) != len(ids):
            raise ValueError(f"sequences[{place}]: {len(ids)} ids, but segments of {sum(lengths)}")
        ends = np.cumsum(lengths).tolist()
        parts = np.split(ids, ends[:-1]) if lengths else []
        segments = [
            _segment(part, each, rewards.get((place, end), 0.0))
            for part, each, end in zip(parts, sequence["segments"], ends, strict=True)
        ]
        if segments:
            made.append(Trajectory(number + len(made), group, row, segments))
    return made


def columns_of_session(told: dict[str, Any], number: int, group: int, row: int) -> Columns:
    """The trajectories of a session as columns for the learner, with `score`: the sum of the rewards of a sequence's
    responses, if they have some, else the session's; NaN if that was not set either. Arguments and errors as of
    `trajectories_of`."""
    places = [place for place, sequence in enumerate(told["sequences"]) if sequence["segments"]]
    scores = np.full(len(places), math.nan if told["reward"] is None else told["reward"], np.float32)
    for at, place in enumerate(places):
        own = [turn["reward"] for turn in told["interactions"] if turn["sequence"] == place]
        if rewards := [reward for reward in own if reward is not None]:
            scores[at] = sum(rewards)
    return columns_of(trajectories_of(told, number, group, row)).with_rows(score=scores)


def _segment(ids: Ints, told: dict[str, Any], reward: float) -> Segment:
    if not told["sampled"]:
        return Segment(ids)
    logprobs: Floats = np.asarray(told["logprobs"], np.float32)
    if len(logprobs) != len(ids):
        raise ValueError(f"a segment of {len(ids)} ids has {len(logprobs)} log-probs")
    spans = tuple((span["version"], span["start"], span["end"]) for span in told["version_spans"])
    return Segment(ids, logprobs, spans, reward=reward)
