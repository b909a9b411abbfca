"""Sessions: the exact tokens of conversations that are had over HTTP, as the engine read and sampled them.

An agent sends messages, and its history as text each time. Rendered and tokenised again, that text need not be the
tokens that were sampled. A session keeps those: a request that goes on where a response of it ended is put together
from them, and what the policy sampled is trained on as it was sampled.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from quartet.trajectory import Segment, Trajectory
from quartet.wire.codec import Floats, Ints
from quartet.wire.errors import FailedPrecondition, InvalidArgument, NotFound, ResourceExhausted

MOST_SESSIONS, MOST_OF_ONE = 4096, 2048
"""Most sessions at a time, in all and of one caller."""
MOST_BYTES, MOST_OF_A_SESSION = 512 << 20, 8 << 20
"""Most bytes of all sessions' tokens, and of one's."""
MOST_TURNS = 1024
"""Most responses of a session."""
KEPT_S = 3600.0
"""Seconds after its last call for which a session is kept."""
PAUSE_S = 5.0
"""Pause that a caller is asked to make where there are too many."""
LONGEST_TASK = 256
"""Most characters of a task's name."""
_EACH_TOKEN, _EACH_TURN = 9, 1024
"""Bytes that a token (id, log-prob and whether it was sampled) and a turn are counted as."""


class Begun(NamedTuple):
    """The tokens on which a request goes on."""

    ids: Ints
    """Token ids, [T]; none if it goes on none."""
    messages: int
    """Number of the request's messages that they stand for."""


NOTHING = Begun(np.empty(0, np.int32), 0)
"""The tokens before a request that begins a conversation: none."""


class Recorded(NamedTuple):
    """The place of a response in its session."""

    sequence: int
    """Number of its sequence, from 0."""
    forks: int
    """Number of sequences after the first: each began where a request did not go on where the last response ended."""


@dataclass(slots=True, eq=False)
class _Sequence:
    """Tokens one after the other: given, sampled, given, sampled."""

    segments: list[Segment] = field(default_factory=list)
    ids: Ints = field(default_factory=lambda: np.empty(0, np.int32))
    """Token ids of all segments, [T]."""

    def add(self, *segments: Segment) -> None:
        """Appends segments, of which an empty one is left out."""
        kept = [segment for segment in segments if len(segment.ids)]
        self.segments += kept
        self.ids = np.concatenate([self.ids, *(segment.ids for segment in kept)])


@dataclass(slots=True, eq=False)
class _Turn:
    """One response."""

    interaction: str
    """Number of the answer over HTTP, such as chatcmpl-..."""
    sequence: int
    end: int
    """Number of tokens of its sequence up to its own end."""
    digest: bytes
    """Digest of the messages up to its own; empty if none were sent."""
    reward: float | None = None


@dataclass(slots=True, eq=False)
class _Session:
    owner: str
    task: str
    temperature: float
    touched: float
    sequences: list[_Sequence] = field(default_factory=list)
    turns: list[_Turn] = field(default_factory=list)
    reward: float | None = None
    ended: bool = False

    @property
    def bytes(self) -> int:
        tokens = sum(len(sequence.ids) for sequence in self.sequences)
        return _EACH_TOKEN * tokens + _EACH_TURN * (1 + len(self.turns))


class Sessions:
    """The sessions of one application, bounded in number, bytes and age."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._sessions: dict[str, _Session] = {}
        self._bytes = 0
        self.forks = 0
        """Number of forks that were counted, also of sessions that are gone."""

    def start(self, owner: str, name: str, task: str, temperature: float) -> None:
        """Starts a session, or finds that of a caller which asks for its key again.

        Raises:
            InvalidArgument: it is another caller's.
            ResourceExhausted: there are too many, or they hold too much.
        """
        self._forget()
        if name in self._sessions:
            self._of(owner, name)
            return
        own = sum(session.owner == owner for session in self._sessions.values())
        for count, most, whose in (
            (own, MOST_OF_ONE, f"{owner} has"),
            (len(self._sessions), MOST_SESSIONS, "all have"),
        ):
            if count >= most:
                raise ResourceExhausted(f"{whose} {count} sessions, and the most is {most}", PAUSE_S)
        self._check_room()
        self._sessions[name] = _Session(owner, task, temperature, self._clock())
        self._bytes += self._sessions[name].bytes

    def begun(self, owner: str, name: str, digests: Sequence[bytes]) -> tuple[Begun, float]:
        """The tokens on which a request goes on by its messages, the most of which a response of the session ended;
        and the session's temperature.

        Args:
            owner, name: the caller, and the session.
            digests: of the messages up to each of them (`digests`), or none for a request of tokens.

        Raises:
            NotFound: the session does not exist, or no longer.
            FailedPrecondition: it has ended.
            ResourceExhausted: it, or all together, hold as much as they may.
        """
        session = self._open(owner, name)
        if len(session.turns) >= MOST_TURNS or session.bytes >= MOST_OF_A_SESSION:
            raise ResourceExhausted(
                f"{name} has {len(session.turns)} responses and {session.bytes} bytes; the most are {MOST_TURNS} and "
                f"{MOST_OF_A_SESSION}. End it and start another"
            )
        self._check_room()
        places = {digest: count for count, digest in enumerate(digests, 1)}
        found = [turn for turn in session.turns if turn.digest in places]
        if not found:
            return NOTHING, session.temperature
        # Of several that answered the same messages alike, the last.
        turn = max(reversed(found), key=lambda turn: places[turn.digest])
        return Begun(session.sequences[turn.sequence].ids[: turn.end], places[turn.digest]), session.temperature

    def record(
        self, owner: str, name: str, interaction: str, prompt_ids: Ints, response: Segment, digest: bytes
    ) -> Recorded:
        """Records a response to a prompt.

        If the prompt begins with all tokens of one of the session's sequences, it goes on with that. Otherwise a new
        sequence begins, whose tokens are given, also those that another sequence holds as sampled: each sampled token
        is trained on once.

        Args:
            owner, name: the caller, and the session.
            interaction: number of the answer.
            prompt_ids: token ids, [P].
            response: what was sampled.
            digest: of the messages up to the answer; empty if none were sent.

        Raises:
            NotFound, FailedPrecondition: as `begun`.
        """
        session = self._open(owner, name)
        before = session.bytes
        begun = [place for place, each in enumerate(session.sequences) if _begins(prompt_ids, each.ids)]
        at = max(begun, key=lambda place: len(session.sequences[place].ids), default=len(session.sequences))
        if at == len(session.sequences):
            self.forks += at > 0
            session.sequences.append(_Sequence())
        sequence = session.sequences[at]
        sequence.add(Segment(prompt_ids[len(sequence.ids) :]), response)
        session.turns.append(_Turn(interaction, at, len(sequence.ids), digest))
        self._bytes += session.bytes - before
        return Recorded(at, len(session.sequences) - 1)

    def set_reward(self, owner: str, name: str, reward: float, interaction: str) -> None:
        """Sets the reward of a response, or of the whole session if none is named.

        Raises:
            InvalidArgument: no response has this number.
            NotFound, FailedPrecondition: as `begun`.
        """
        session = self._open(owner, name)
        if not interaction:
            session.reward = reward
            return
        turn = next((turn for turn in session.turns if turn.interaction == interaction), None)
        if turn is None:
            raise InvalidArgument(f"interaction_id: {interaction[:64]!r} is no response of {name}")
        turn.reward = reward

    def end(self, owner: str, name: str) -> int:
        """Ends a session, which takes no further request; returns its number of responses. A repeated call changes
        nothing."""
        session = self._of(owner, name)
        session.ended = True
        return len(session.turns)

    def trajectory(self, owner: str, name: str, remove: bool) -> dict[str, Any]:
        """All of a session's tokens, as JSON (docs/openai.md). With `remove` it exists no longer.

        Raises:
            NotFound: as `begun`.
        """
        session = self._of(owner, name)
        told = _told(name, session)
        if remove:
            self._drop(name)
        return told

    @property
    def counts(self) -> dict[str, int]:
        """Numbers for the metrics."""
        self._forget()
        return {"sessions": len(self._sessions), "session_bytes": self._bytes, "session_forks": self.forks}

    def _of(self, owner: str, name: str) -> _Session:
        self._forget()
        session = self._sessions.get(name)
        if session is None or session.owner != owner:
            raise NotFound(
                f"{name} is not here: it was removed, or nothing was heard of it for {KEPT_S / 60:g} minutes, or the "
                "process that held it has died, and its tokens are lost. Start another with POST /rl/start_session"
            )
        session.touched = self._clock()
        return session

    def _open(self, owner: str, name: str) -> _Session:
        session = self._of(owner, name)
        if session.ended:
            raise FailedPrecondition(f"{name} has ended; start another with POST /rl/start_session")
        return session

    def _check_room(self) -> None:
        if self._bytes >= MOST_BYTES:
            raise ResourceExhausted(f"all sessions hold {self._bytes} bytes, and the most is {MOST_BYTES}", PAUSE_S)

    def _forget(self) -> None:
        """Removes the sessions of which nothing was heard for too long."""
        old = self._clock() - KEPT_S
        for name in [name for name, session in self._sessions.items() if session.touched < old]:
            self._drop(name)

    def _drop(self, name: str) -> None:
        self._bytes -= self._sessions.pop(name).bytes


def _begins(ids: Ints, with_ids: Ints) -> bool:
    return len(with_ids) <= len(ids) and bool(np.array_equal(ids[: len(with_ids)], with_ids))


def _told(name: str, session: _Session) -> dict[str, Any]:
    return {
        **{"session_id": name, "task_id": session.task, "ended": session.ended, "temperature": session.temperature},
        **{"reward": session.reward, "forks": max(len(session.sequences) - 1, 0)},
        "sequences": [
            {
                "ids": sequence.ids.tolist(),
                "segments": [_told_segment(segment) for segment in sequence.segments],
            }
            for sequence in session.sequences
        ],
        "interactions": [
            {"id": turn.interaction, "sequence": turn.sequence, "end": turn.end, "reward": turn.reward}
            for turn in session.turns
        ],
    }


def _told_segment(segment: Segment) -> dict[str, Any]:
    if segment.logprobs is None:
        return {"length": len(segment.ids), "sampled": False}
    spans = [{"version": version, "start": start, "end": end} for version, start, end in segment.spans]
    return {
        **{"length": len(segment.ids), "sampled": True},
        **{"logprobs": segment.logprobs.tolist(), "version_spans": spans},
    }


def trajectories_of(told: dict[str, Any], number: int, group: int, row: int) -> list[Trajectory]:
    """The trajectories of a session from the answer of `/rl/trajectory`, one for each sequence, with numbers from
    `number` on, for `quartet.trajectory.columns_of`. The reward of each is the session's.

    Args:
        told: the answer's contents.
        number, group, row: of the first of them, as in Trajectory.

    Raises:
        ValueError: lengths of segments do not add up to those of the ids, or of log-probs to those of a segment.
    """
    made = []
    for place, sequence in enumerate(told["sequences"]):
        ids = np.asarray(sequence["ids"], np.int32)
        lengths = [segment["length"] for segment in sequence["segments"]]
        if sum(lengths) != len(ids):
            raise ValueError(f"sequences[{place}]: {len(ids)} ids, but segments of {sum(lengths)}")
        parts = np.split(ids, np.cumsum(lengths)[:-1]) if lengths else []
        segments = [_segment(part, each) for part, each in zip(parts, sequence["segments"], strict=True)]
        made.append(Trajectory(number + place, group, row, segments))
    return made


def _segment(ids: Ints, told: dict[str, Any]) -> Segment:
    if not told["sampled"]:
        return Segment(ids)
    logprobs: Floats = np.asarray(told["logprobs"], np.float32)
    if len(logprobs) != len(ids):
        raise ValueError(f"a segment of {len(ids)} ids has {len(logprobs)} log-probs")
    return Segment(
        ids, logprobs, tuple((span["version"], span["start"], span["end"]) for span in told["version_spans"])
    )


def check_reward(value: Any) -> float:
    """The reward. InvalidArgument if it is not a finite number."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise InvalidArgument(f"reward: should be a finite number, got {str(value)[:32]!r}")
    return float(value)
