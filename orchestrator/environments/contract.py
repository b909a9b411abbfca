"""The contract of an environment: what comes after a finished response, before the policy samples again.

A new one is a class in a file of the user's, and a line in the run's file, `environment: my_file:Patient`:

    class Patient(Environment):

        def answer(self, turn: Turn) -> Answer:
            return None if turn.label in turn.response else "No. Try again: "
"""

import functools
import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from quartet.config.base import ConfigError
from quartet.config.functions import imported, source_of
from quartet.wire.codec import Ints

FIELD = "orchestrator.environment.kind"
"""Key that names the environment of a run."""
Schema = Mapping[str, Any]
"""JSON schema of a function, as chat templates take it: `{"type": "function", "function": {"name": ...}}`."""


@dataclass(frozen=True, slots=True)
class Call:
    """A call of a tool in a response. What it holds is a policy's, and not to be trusted."""

    name: str
    arguments: Mapping[str, Any]
    problem: str = ""
    """Reason for which it cannot be read; empty if it can."""


@dataclass(frozen=True, slots=True)
class Results:
    """Chat messages that answer the calls of a response."""

    messages: Sequence[Mapping[str, Any]]
    wrong: int
    """Number of the calls that could not be made as the policy wrote them."""


@dataclass(frozen=True, slots=True)
class Rewarded:
    """An answer, and a reward of the response before it, which counts besides the score of the whole."""

    answer: "Answer"
    reward: float


Answer = str | Sequence[Mapping[str, Any]] | Results | Rewarded | Sequence[int] | Ints | None
"""Text, which is tokenised as it stands; or chat messages, which the tokenizer's template renders as what follows the
response, up to where the next one begins; or token ids. None ends the conversation."""


@dataclass(frozen=True, slots=True)
class Turn:
    """A finished response, and what came before it."""

    number: int
    """Number of the response in its conversation, from 1."""
    sample: int
    """Number of the sample in its run, another one in each pass over the data. Evaluations count from 0 again."""
    row: int
    """Row of the prompt in its split of the data set, of training or of evaluation."""
    prompt: str
    """Text of the prompt."""
    label: str
    """Label of the prompt; empty if there is none."""
    texts: tuple[str, ...]
    """Everything after the prompt as text, without special tokens: a response, the answer to it, a response."""
    ids: Ints
    """All token ids, [T]: of the prompt, the responses and the answers."""
    ended: bool
    """False if the length limit cut the last response off."""
    calls: tuple[Call, ...] = ()
    """Calls in the last response, where the environment has tools; none in one that was cut off."""

    @property
    def response(self) -> str:
        """Text of the last response."""
        return self.texts[-1]


class Environment(ABC):
    """Answers responses. One object answers all conversations of a run, several at the same time.

    An answer should follow from the turn alone: a conversation that is lost with its run begins again with the same
    seed, and has to come to the same end.
    """

    def __init_subclass__(cls, **options: Any) -> None:
        """Has an `identity` of the class's own, if it is a property, read once as well."""
        super().__init_subclass__(**options)
        if isinstance(own := cls.__dict__.get("identity"), property) and own.fget is not None:
            once = functools.cached_property(own.fget)
            once.__set_name__(cls, "identity")
            cls.identity = once  # type: ignore[method-assign, assignment]

    @property
    def name(self) -> str:
        """Name for messages."""
        return f"{type(self).__module__}:{type(self).__qualname__}"

    @functools.cached_property
    def identity(self) -> str:
        """Digest of everything that decides the answers: samples are only compared, or read from a journal, where it
        is the same. By default of the source of the class's file as it was imported, and of those beside it that this
        one imports. Read once, when the run begins,
        as is a property of this name in a class of yours: files may change while the run goes on."""
        return hashlib.sha256(source_of(type(self), self.name, "orchestrator.environment").encode()).hexdigest()

    @property
    def tools(self) -> Sequence[Schema]:
        """Functions that the policy may call, which the chat template writes into each prompt; none by default."""
        return ()

    @abstractmethod
    def answer(self, turn: Turn) -> Answer | Awaitable[Answer]:
        """The tokens that follow the response. A plain function is called in a thread of its own; a coroutine
        function on the event loop of the run, which it must not block.

        An exception, or no answer in time, makes the run ask again, and then end with an error.
        """


def load_environment(path: str) -> Environment:
    """The environment at `module:Class`, as FIELD of the configuration names it.

    Raises:
        ConfigError: it does not exist, is not a class of Environment, has no source to identify it by, or cannot be
            made without arguments.
    """
    kind = imported(path, FIELD)
    if not (isinstance(kind, type) and issubclass(kind, Environment)):
        raise ConfigError(
            f"{FIELD}: {path!r} should be a class of Environment (orchestrator/environments/contract.py), "
            f"got {kind!r}"
        )
    try:
        environment = kind()
        tools: object = environment.tools  # which it cannot have undescribed
        identity: object = environment.identity  # kept from here on, as the file is the one that was imported
    except ConfigError:
        raise
    except (Exception, SystemExit) as error:  # the user's own code, which may raise anything
        raise ConfigError(f"{FIELD}: {path}() fails with {type(error).__name__}: {error}") from None
    if not isinstance(identity, str):
        raise ConfigError(f"{FIELD}: {path}.identity should be text, got {identity!r}")
    if not _are_schemas(tools):
        raise ConfigError(
            f"{FIELD}: {path}.tools should be a list of JSON schemas of functions, "
            f'{{"type": "function", "function": {{"name": ...}}}}, got {repr(tools)[:200]}'
        )
    return environment


def _are_schemas(tools: object) -> bool:
    try:
        json.dumps(tools)
    except (TypeError, ValueError):
        return False
    return isinstance(tools, list | tuple) and all(
        isinstance(each, dict)
        and isinstance(function := each.get("function"), dict)
        and isinstance(function.get("name"), str)
        for each in tools
    )
