"""An environment of tools: a class of a user's, whose public methods the policy may call (examples/calculator.py)."""

import asyncio
import dataclasses
import functools
import inspect
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from typing import Any, get_args, get_type_hints

from pydantic import BaseModel, PydanticUserError, ValidationError, validate_call
from transformers.utils import get_json_schema
from transformers.utils.chat_template_utils import DocstringParsingException, TypeHintParsingException

from orchestrator.environments.contract import FIELD, Answer, Call, Environment, Results, Schema, Turn
from quartet.config.base import ConfigError

MOST_TOLD = 300
"""Most characters of what is told about a wrong call, as some of them are the policy's own."""
_UNDESCRIBED = (
    *(DocstringParsingException, TypeHintParsingException, PydanticUserError),
    *(ValueError, NameError, TypeError),
)
"""Errors of a method whose schema cannot be made."""
_WRITTEN = (Any, str, int, float, bool, type(None), list, tuple, object)


class ToolError(Exception):
    """An error that the policy is told: its text is the tool's answer. Any other is a failure of the environment."""


class Tools(Environment):
    """Carries out the calls in a response, and answers with a message for each. A response without calls, or one that
    was cut off, ends the conversation.

    Plain methods are carried out in the order of their calls, in a thread; coroutine functions after them, all at the
    same time, on the event loop of the run. Arguments fit the types of the parameters. A call that is wrong is
    answered with what is wrong. An exception other than ToolError makes the run ask again for all answers to the
    response.
    """

    longest_answer = 1 << 16
    """Most characters of a tool's answer; the rest is left out."""

    @functools.cached_property
    def _methods(self) -> Mapping[str, tuple[Schema, Callable[..., Any]]]:
        """Name -> the schema of a tool, and a function that makes a call of its arguments."""
        kinds = [kind for kind in reversed(type(self).__mro__) if issubclass(kind, Tools) and kind is not Tools]
        names = dict.fromkeys(name for kind in kinds for name in vars(kind) if not name.startswith("_"))
        public = [name for name in names if _is_method(inspect.getattr_static(self, name))]
        kind = f"{type(self).__module__}:{type(self).__qualname__}"
        if taken := [name for name in public if hasattr(Tools, name) and not self._is_own_answer(name)]:
            raise ConfigError(f"{FIELD}: {kind}.{taken[0]}: every environment has this name; a tool needs another")
        most: object = self.longest_answer
        if type(most) is not int or most < 1:
            raise ConfigError(
                f"{FIELD}: {kind}.longest_answer: should be a whole number of characters, 1 or more, got {most!r}"
            )
        found = {name: _described(self, name) for name in public if name != "answer"}
        if not found:
            raise ConfigError(f"{FIELD}: {self.name} has no tools; each public method that it defines is one")
        return found

    def _is_own_answer(self, name: str) -> bool:
        """True for an `answer` to a turn, in the place of this class's, and not a tool of that name."""
        return name == "answer" and list(inspect.signature(self.answer).parameters) == ["turn"]

    @functools.cached_property
    def tools(self) -> Sequence[Schema]:
        """The public methods that a class and those between it and Tools define."""
        return [schema for schema, _ in self._methods.values()]

    def answer(self, turn: Turn) -> Answer | Awaitable[Answer]:
        """A message for each call, in order."""
        if not turn.calls:
            return None
        made = [self._made(call) for call in turn.calls]
        begun = [each if isinstance(each, str) or _is_awaited(each) else self._text(each) for each in made]
        return self._messages(turn.calls, begun, sum(isinstance(each, str) for each in made))

    def _made(self, call: Call) -> functools.partial[Any] | str:
        """The call of a method; or what is wrong with it."""
        wrong = call.problem
        if not wrong and call.name not in self._methods:
            wrong = f"there is no tool {call.name!r}; the tools are {', '.join(self._methods)}"
        if not wrong:
            try:
                made: functools.partial[Any] = self._methods[call.name][1](**call.arguments)
                return made
            except ValidationError as error:
                said = error.errors()
                wrong = "; ".join(f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in said)
        return f"error: {wrong}"[:MOST_TOLD]

    def _text(self, call: functools.partial[Any]) -> str:
        try:
            return self._shortened(call())
        except ToolError as error:
            return self._shortened(error)

    async def _awaited(self, call: functools.partial[Any]) -> str:
        try:
            return self._shortened(await call())
        except ToolError as error:
            return self._shortened(error)
        except SystemExit as error:  # which would end the run as if it were the run's own
            raise RuntimeError(repr(error)) from error

    def _shortened(self, result: object) -> str:
        if inspect.isawaitable(result):
            raise TypeError("a tool gave something to await; it should be a coroutine function itself")
        text = str(result).encode("utf-8", "replace").decode()  # halves of characters have no tokens
        most = self.longest_answer
        return text if len(text) <= most else f"{text[:most]}\n({len(text) - most} further characters are left out)"

    async def _messages(
        self, calls: Sequence[Call], begun: Sequence[functools.partial[Any] | str], wrong: int
    ) -> Answer:
        waited = [self._awaited(each) for each in begun if not isinstance(each, str)]
        come = iter(await asyncio.gather(*waited, return_exceptions=True))
        texts = [each if isinstance(each, str) else next(come) for each in begun]
        for each in texts:
            if isinstance(each, BaseException):
                raise each
        named = [call.name if call.name in self._methods else "unknown" for call in calls]
        messages = [{"role": "tool", "name": name, "content": text} for name, text in zip(named, texts, strict=True)]
        return Results(messages, wrong)


def _described(tools: Tools, name: str) -> tuple[Schema, Callable[..., Any]]:
    """The schema of a method, and a function that checks arguments and makes a call of them. ConfigError for a method
    that cannot be described."""
    method, where = getattr(tools, name), f"{FIELD}: {tools.name}.{name}"
    if inspect.isgeneratorfunction(method) or inspect.isasyncgenfunction(method):
        raise ConfigError(f"{where}: yields parts of an answer; should return all of it")
    named = {inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY}
    for parameter in inspect.signature(method).parameters.values():
        if parameter.kind not in named:
            raise ConfigError(f"{where}: parameter {parameter} has no name that a call could give; should have one")

    @functools.wraps(method)
    def made(*given: Any, **by_name: Any) -> functools.partial[Any]:
        return functools.partial(method, *given, **by_name)

    try:
        schema = get_json_schema(method)
        hints = get_type_hints(method)
        hints.pop("return", None)
        if odd := [each for hint in hints.values() for each in _leaves(hint) if not _is_written(each)]:
            raise TypeError(
                f"a template would write {odd[0].__name__} as an object, which it is not in JSON: take str, say"
            )
        schema["function"]["name"] = name  # which differs from the function's own, where that is assigned to another
        return schema, validate_call(made)
    except _UNDESCRIBED as error:
        reason = str(error).partition("\n")[0]
        raise ConfigError(
            f"{where}: {reason}; a tool should have a docstring that says what it does and, below `Args:`, what each "
            "parameter is, and a type hint for each; methods that are no tools begin with an underscore"
        ) from None


def _leaves(hint: Any) -> Iterator[Any]:
    """The types of which a type hint is made."""
    if not (inner := get_args(hint)):
        yield hint
    for each in inner:
        yield from _leaves(each)


def _is_written(leaf: Any) -> bool:
    """True for a type whose values are in JSON what transformers says, as those of a class that it does not know are
    not; and for values that a Literal allows."""
    if not isinstance(leaf, type) or dataclasses.is_dataclass(leaf):
        return True
    return leaf in _WRITTEN or issubclass(leaf, dict | BaseModel)


def _is_method(attribute: object) -> bool:
    """True for a method, and not for a property; Python takes a cached one for a routine."""
    return inspect.isroutine(attribute) and not isinstance(attribute, functools.cached_property)


def _is_awaited(call: functools.partial[Any]) -> bool:
    return inspect.iscoroutinefunction(call.func)
