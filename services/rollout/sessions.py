"""Sessions: the exact tokens of conversations that are had over HTTP, as the engine read and sampled them.

An agent sends messages, and its history as text each time. Rendered and tokenised again, that text need not be the
tokens that were sampled. A session keeps those: a request that goes on where a response of it ended is put together
from them, and what the policy sampled is trained on as it was sampled.
"""

import hashlib
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from typing import Any, NamedTuple

import numpy as np

from quartet.trajectory import Segment, VersionSpans
from quartet.wire.codec import Floats, Ints
from quartet.wire.errors import FailedPrecondition, InvalidArgument, NotFound, ResourceExhausted, ServiceError
from services.rollout.session_terms import Terms

MOST_SESSIONS = 4096
"""Sessions at a time with which callers that hold more than their part get no other; one has half of them at most."""
MOST_BYTES, MOST_OF_A_SESSION = 1 << 30, 8 << 20
"""The same in bytes of their tokens, and most bytes of one session."""
MOST_TURNS = 1024
"""Most responses of a session."""
PAUSE_S = 5.0
"""Pause that a caller is asked to make where there are too many."""
LONGEST_TASK = 256
"""Most characters of a task's name."""
_EACH_TOKEN, _EACH_TURN = 8, 1024
"""Bytes that a token (its id and log-prob) and a turn are counted as."""


class Begun(NamedTuple):
    """The tokens on which a request goes on."""

    ids: Ints
    """Token ids, [T]; none if it goes on none."""
    messages: int
    """Number of the request's messages that they stand for."""


NOTHING = Begun(np.empty(0, np.int32), 0)
"""The tokens before a request that begins a conversation: none."""


class Admitted(NamedTuple):
    """Tokens and terms on which a request of a session goes on."""

    begun: Begun
    terms: Terms
    turn: int
    """Number of the request among the session's requests, from 0."""


class Recorded(NamedTuple):
    """The place of a response in its session."""

    sequence: int
    """Number of its sequence, from 0."""
    forks: int
    """Number of sequences after the first: each began where a request did not go on where the last response ended."""


class _Part(NamedTuple):
    """Tokens that were given, or sampled."""

    length: int
    logprobs: Floats | None
    """Log-probs of tokens that were sampled, [T]."""
    spans: VersionSpans


@dataclass(slots=True, eq=False)
class _Sequence:
    """Tokens one after the other: given, sampled, given, sampled."""

    parts: list[_Part] = field(default_factory=list)
    ids: Ints = field(default_factory=lambda: np.empty(0, np.int32))
    """Token ids of all parts, [T]."""

    def add(self, *segments: Segment) -> None:
        """Appends segments, of which an empty one is left out."""
        # Copies, as these are views of what the request brought, which would be kept whole.
        for segment in segments:
            if len(segment.ids):
                logprobs = None if segment.logprobs is None else np.array(segment.logprobs, np.float32)
                self.parts.append(_Part(len(segment.ids), logprobs, segment.spans))
        self.ids = np.concatenate([self.ids, *(segment.ids for segment in segments)])


@dataclass(slots=True, eq=False)
class _Turn:
    """One response."""

    interaction: str
    """Number of the answer over HTTP, such as chatcmpl-..."""
    sequence: int
    start: int
    """Number of tokens that its sequence had before."""
    end: int
    """Number of tokens of its sequence up to its own end."""
    prompt: bytes
    """Digest of all tokens that it responds to."""
    digest: bytes
    """Digest of the messages up to its own; empty if none were sent."""
    checksum: str
    """Checksum of the weights of its last token."""
    finish_reason: str
    """Reason for which it ended: stop, or length."""
    reward: float | None = None


@dataclass(slots=True, eq=False)
class _Session:
    owner: str
    tokenizer: str
    task: str
    terms: Terms
    touched: float
    taken: set[int] = field(default_factory=set)
    """Numbers of requests, without those that ended without a response."""
    full: bool = False
    """True if a request was refused as its prompt left no room for a response."""
    sequences: list[_Sequence] = field(default_factory=list)
    turns: list[_Turn] = field(default_factory=list)
    reward: float | None = None
    ended: bool = False

    @property
    def bytes(self) -> int:
        tokens = sum(len(sequence.ids) for sequence in self.sequences)
        return _EACH_TOKEN * tokens + _EACH_TURN * (1 + len(self.turns))

    @property
    def superseded(self) -> set["_Turn"]:
        """Responses whose request was repeated and that nothing shows to have arrived: no turn went on after them,
        and they have no reward of their own. If this is so of all to one prompt, the last is not among them."""
        last = {turn.sequence: turn for turn in self.turns}
        asked: dict[bytes, list[_Turn]] = {}
        for turn in self.turns:
            asked.setdefault(turn.prompt, []).append(turn)
        found: set[_Turn] = set()
        for turns in asked.values():
            unseen = [turn for turn in turns if turn is last[turn.sequence] and turn.reward is None]
            found.update(unseen if len(unseen) < len(turns) else unseen[:-1])
        return found


class Sessions:
    """The sessions of one application, bounded in number, bytes and age."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._sessions: dict[str, _Session] = {}
        self._count, self._bytes = Counter[str](), Counter[str]()
        """Caller -> number of its sessions, and bytes of their tokens."""
        self.forks = 0
        """Number of forks that were counted, also of sessions that are gone."""

    def start(
        self, owner: str, name: str, tokenizer: str, task: str = "", terms: Mapping[str, Any] | None = None
    ) -> None:
        """Starts a session, or finds that of a caller which asks for its key again.

        Args:
            owner, name: the caller, and the session.
            tokenizer: hash of the tokenizer of its tokens.
            task: label for the caller's own use.
            terms: fields of Terms that are not as by default; None for none.

        Raises:
            NotFound: it is another caller's.
            InvalidArgument: it was started on other terms.
            ResourceExhausted: there are too many, or they hold too much.
        """
        self._forget()
        if name in self._sessions:
            has = self._of(owner, name).terms
            for term, value in (terms or {}).items():
                if value != (should := getattr(has, term)):
                    raise InvalidArgument(f"{term}: {value!r}; should be {should!r}, as {name} was started with")
            return
        self._check_room(owner, self._count, MOST_SESSIONS, "sessions")
        self._check_room(owner, self._bytes, MOST_BYTES, "bytes of sessions")
        self._sessions[name] = _Session(owner, tokenizer, task, Terms(**(terms or {})), self._clock())
        self._count[owner] += 1
        self._bytes[owner] += self._sessions[name].bytes

    def start_all(self, owner: str, tokenizer: str, sessions: Sequence[tuple[str, str, Mapping[str, Any]]]) -> None:
        """Starts several sessions, each given by its name, task and terms: all, or none. Those that were there before
        stay in any case. Raises as `start`."""
        begun = []
        try:
            for name, task, terms in sessions:
                before = self._sessions.get(name)
                self.start(owner, name, tokenizer, task, terms)
                if self._sessions[name] is not before:
                    begun.append(name)
        except ServiceError:
            for name in begun:
                self._drop(name)
            raise

    def begun(self, owner: str, name: str, digests: Sequence[bytes], tokenizer: str) -> Admitted:
        """The tokens on which a request goes on by its messages, the most of which a response of the session ended;
        and the terms on which it is sampled.

        Args:
            owner, name: the caller, and the session.
            digests: of the messages up to each of them (`digests`), or none for a request of tokens.
            tokenizer: hash of the tokenizer of the model that will respond.

        Raises:
            NotFound: the session does not exist, or no longer.
            FailedPrecondition: it has ended, or its tokens are of another model.
            ResourceExhausted: it, or all together, hold as much as they may.
        """
        session = self._open(owner, name)
        if session.tokenizer != tokenizer:
            raise FailedPrecondition(
                f"{name} holds tokens of another tokenizer than this model's, which was put in the place of its own; "
                "start another with POST /rl/start_session"
            )
        if len(session.turns) >= MOST_TURNS or session.bytes >= MOST_OF_A_SESSION:
            raise ResourceExhausted(
                f"{name} has {len(session.turns)} responses and {session.bytes} bytes; the most are {MOST_TURNS} and "
                f"{MOST_OF_A_SESSION}. End it and start another"
            )
        self._check_room(owner, self._bytes, MOST_BYTES, "bytes of sessions")
        turn = next(number for number in count() if number not in session.taken)
        session.taken.add(turn)
        places = {digest: place for place, digest in enumerate(digests, 1)}
        found = [each for each in session.turns if each.digest in places]
        if not found:
            return Admitted(NOTHING, session.terms, turn)
        # Of several that answered the same messages alike, the last.
        last = max(reversed(found), key=lambda each: places[each.digest])
        begun = Begun(session.sequences[last.sequence].ids[: last.end], places[last.digest])
        return Admitted(begun, session.terms, turn)

    def record(
        self,
        owner: str,
        name: str,
        interaction: str,
        prompt_ids: Ints,
        response: Segment,
        digest: bytes,
        checksum: str = "",
        finish_reason: str = "stop",
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
            checksum: of the weights that sampled its last token; empty for the model's own. A version says less: it
                comes again when a run goes back to a checkpoint.
            finish_reason: stop or length.

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
        start, prompt = len(sequence.ids), hashlib.blake2b(prompt_ids.tobytes(), digest_size=16).digest()
        sequence.add(Segment(prompt_ids[start:]), response)
        turn = _Turn(interaction, at, start, len(sequence.ids), prompt, digest, checksum, finish_reason)
        session.turns.append(turn)
        self._bytes[owner] += session.bytes - before
        return Recorded(at, len(session.sequences) - 1)

    def leave(self, owner: str, name: str, turn: int, full: bool) -> None:
        """Notes that the request of this number ended without a response, and if it was as its prompt left no room
        for one. The next request has its number, and so its seed: long responses are lost more often, and with new
        seeds a run would have fewer of them. NotFound: as `begun`."""
        session = self._of(owner, name)
        session.taken.discard(turn)
        session.full |= full

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

    def trajectory(self, owner: str, name: str) -> dict[str, Any]:
        """All of a session's tokens but those of superseded responses (docs/openai.md), for
        `session_trajectory.as_json`.

        Raises:
            NotFound: as `begun`.
        """
        return _told(name, self._of(owner, name))

    def trajectories(self, owner: str, names: Sequence[str], remove: Sequence[str] = ()) -> list[dict[str, Any]]:
        """The tokens of several sessions, as `trajectory` gives them, in this order: one at least, and no more than
        MOST_OF_A_SESSION bytes of tokens, so that some may have to be asked for again. A session that is not there
        has an `error` instead. Those of `remove` are removed first, if they are there."""
        for name in remove:
            with suppress(NotFound):
                self.remove(owner, name)
        told: list[dict[str, Any]] = []
        size = 0
        for name in names:
            try:
                session = self._of(owner, name)
            except NotFound as error:
                told.append({"session_id": name, "error": str(error)})
                continue
            size += session.bytes
            if size > MOST_OF_A_SESSION and told:
                break
            told.append(_told(name, session))
        return told

    def remove(self, owner: str, name: str) -> None:
        """Removes a session, which exists no longer. NotFound: as `begun`."""
        self._of(owner, name)
        self._drop(name)

    def counts(self) -> dict[str, int]:
        """Numbers for the metrics."""
        self._forget()
        held, size = len(self._sessions), self._bytes.total()
        return {"sessions": held, "session_bytes": size, "session_forks_total": self.forks}

    def _of(self, owner: str, name: str) -> _Session:
        self._forget()
        session = self._sessions.get(name)
        if session is None or session.owner != owner:
            raise NotFound(
                f"{name} is not here: it was removed, or nothing was heard of it for long, or the "
                "process that held it has died, and its tokens are lost. Start another with POST /rl/start_session"
            )
        session.touched = self._clock()
        return session

    def _open(self, owner: str, name: str) -> _Session:
        session = self._of(owner, name)
        if session.ended:
            raise FailedPrecondition(f"{name} has ended; start another with POST /rl/start_session")
        return session

    def _check_room(self, owner: str, held: Counter[str], most: int, what: str) -> None:
        """Raises ResourceExhausted if a caller holds half of the most, or all together hold the most and it more than
        its part of that half: what others hold refuses nothing to a caller that holds little."""
        full = held.total() >= most
        part = most // 2 // (len({owner, *self._count}) if full else 1)
        if held[owner] >= part:
            why = f" of a caller, as all have {held.total()}" if full else ""
            raise ResourceExhausted(f"{owner} has {held[owner]} {what}, and the most is {part}{why}", PAUSE_S)

    def _forget(self) -> None:
        """Removes the sessions of which nothing was heard for too long."""
        now = self._clock()
        for name in [name for name, each in self._sessions.items() if each.touched + each.terms.kept_s < now]:
            self._drop(name)

    def _drop(self, name: str) -> None:
        session = self._sessions.pop(name)
        self._count[session.owner] -= 1
        self._bytes[session.owner] -= session.bytes
        if not self._count[session.owner]:
            del self._count[session.owner], self._bytes[session.owner]


def _begins(ids: Ints, with_ids: Ints) -> bool:
    return bool(np.array_equal(ids[: len(with_ids)], with_ids))


def _told(name: str, session: _Session) -> dict[str, Any]:
    superseded = session.superseded
    # Each of them is the last of its sequence, which ends before it then.
    ends = {turn.sequence: turn.start for turn in superseded}
    sequences = [
        _told_sequence(sequence, ends.get(place, len(sequence.ids)))
        for place, sequence in enumerate(session.sequences)
    ]
    moved = _join(sequences, session, superseded)
    return {
        **{"session_id": name, "task_id": session.task, "ended": session.ended},
        **{"temperature": session.terms.temperature, "full": session.full, "reward": session.reward},
        **{"forks": max(len(session.sequences) - 1, 0)},
        "sequences": sequences,
        "interactions": [
            {"id": turn.interaction, "sequence": moved[turn.sequence], "end": turn.end, "reward": turn.reward}
            | {"weights_checksum": turn.checksum, "superseded": turn in superseded}
            | {"finish_reason": turn.finish_reason}
            for turn in session.turns
        ],
    }


def _join(sequences: list[dict[str, Any]], session: _Session, superseded: set[_Turn]) -> list[int]:
    """Has the sequence that a repeated request began go on from the one in which its first answer was lost: they are
    one conversation, and its sampled tokens carry loss there. Returns the place of each sequence's tokens."""
    places = list(range(len(sequences)))
    repeats = {turn.prompt: turn.sequence for turn in session.turns if turn not in superseded and turn.start == 0}
    for lost in sorted(superseded, key=lambda turn: -turn.start):
        # The longest of several that the same request went on from has it.
        if lost.start and (repeat := repeats.pop(lost.prompt, None)) is not None:
            before, at = sequences[lost.sequence], places[repeat]
            given, *rest = sequences[at]["segments"]
            added = given["length"] - lost.start
            between = [{"length": added, "sampled": False}] if added else []
            sequences[at]["segments"] = [*before["segments"], *between, *rest]
            sequences[lost.sequence] = {"ids": before["ids"][:0], "segments": []}
            places = [at if place == lost.sequence else place for place in places]
    return places


def _told_sequence(sequence: _Sequence, end: int) -> dict[str, Any]:
    lengths = np.cumsum([part.length for part in sequence.parts])
    parts = sequence.parts[: int(np.searchsorted(lengths, end, side="right"))]
    return {"ids": sequence.ids[:end], "segments": [_told_part(part) for part in parts]}


def _told_part(part: _Part) -> dict[str, Any]:
    if part.logprobs is None:
        return {"length": part.length, "sampled": False}
    spans = [{"version": version, "start": start, "end": end} for version, start, end in part.spans]
    return {"length": part.length, "sampled": True, "logprobs": part.logprobs, "version_spans": spans}
