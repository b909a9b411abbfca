"""Tools of an environment: described, checked, carried out, and nothing else of the object reachable."""

import asyncio
import datetime
import functools
import inspect
import json
import re
import threading
from typing import Any, Literal

import numpy as np
import pytest

from examples.calculator import Calculator
from orchestrator.environments.contract import Answer, Call, Environment, Results, Turn
from orchestrator.environments.tools import MOST_TOLD, ToolError, Tools
from orchestrator.loop.identities import user_identities
from quartet.config.base import ConfigError


class Library(Tools):
    """Methods of each kind, and what is none."""

    shelves = 3

    def __init__(self) -> None:
        self.both = asyncio.Barrier(2)
        self.order: list[str] = []

    def count(self, words: list[str], *, of: Literal["all", "first"] = "all") -> int:
        """Counts words.

        Args:
            words: the words.
            of: which of them.
        """
        self.order.append(threading.current_thread().name)
        return len(words) if of == "all" else 1

    async def borrow(self, number: int) -> str:
        """Borrows a book.

        Args:
            number: its number.
        """
        await self.both.wait()
        return f"book {number}"

    @staticmethod
    def opens(day: str | None = None) -> str:
        """Says when it opens.

        Args:
            day: the day, such as today.
        """
        if day == "never":
            raise ToolError("it is closed for good")
        return "at nine"

    @property
    def address(self) -> str:
        raise AssertionError("asked for")

    def _secret(self) -> str:
        raise AssertionError("called")


class Mixed:
    def of_no_tool(self) -> str:
        raise AssertionError("called")


class Branch(Library, Mixed):
    opens = None  # type: ignore[assignment]

    def close(self) -> None:
        """Closes."""


def turn(*calls: Call, number: int = 1) -> Turn:
    return Turn(number, 0, 0, "w1", "", ("w2",), np.asarray([1, 2]), True, calls)


async def answered(environment: Environment, *calls: Call) -> Results:
    given = await asyncio.to_thread(environment.answer, turn(*calls))
    if inspect.isawaitable(given):
        given = await given
    assert isinstance(given, Results)
    return given


async def said(environment: Environment, name: str, **arguments: Any) -> tuple[str, int]:
    results = await answered(environment, Call(name, arguments))
    [message] = results.messages
    assert message["role"] == "tool"
    return message["content"], results.wrong


def test_a_tool_is_described_by_its_name_docstring_and_types() -> None:
    multiply, divide = (dict(each["function"]) for each in Calculator().tools)
    number = {"type": "integer"}
    assert multiply == {
        "name": "multiply",
        "description": "Multiplies two whole numbers.",
        "parameters": {
            "type": "object",
            "properties": {"a": number | {"description": "the first."}, "b": number | {"description": "the second."}},
            "required": ["a", "b"],
        },
        "return": {"type": "string"},
    }
    assert divide["name"] == "divide"


def test_public_methods_of_the_class_are_tools_and_nothing_else() -> None:
    def names(environment: Environment) -> list[str]:
        return [each["function"]["name"] for each in environment.tools]

    assert names(Library()) == ["count", "borrow", "opens"]
    # What a class inherits from another class of tools, but for what it takes away.
    assert names(Branch()) == ["count", "borrow", "close"]


@pytest.mark.parametrize(
    "name",
    [
        *(
            "__init__",
            "__class__",
            "__reduce__",
            "_secret",
            "_methods",
            "_made",
            "answer",
            "identity",
            "name",
            "tools",
        ),
        *(
            "address",
            "shelves",
            "order",
            "opens",
            "of_no_tool",
            "longest_answer",
            "",
            "count.__self__",
            "\x00",
            "Count",
        ),
    ],
)
async def test_no_other_attribute_can_be_called(name: str) -> None:
    text, wrong = await said(Branch(), name)
    assert text == f"error: there is no tool {name!r}; the tools are count, borrow, close"
    assert wrong == 1


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"a": 6, "b": 7}, "42"),
        ({"a": "6", "b": 7.0}, "42"),
        ({"a": 6}, "error: b: Missing required argument"),
        ({"a": "six", "b": 7.5}, "error: a: Input should be a valid integer"),
        ({"a": 6, "b": 10**13}, "error: b: Input should be less than or equal to 1000000000000"),
        ({"a": 6, "b": 7, "self": 1}, "error: self: Unexpected keyword argument"),
        ({"a": 6, "b": 7, "__class__": 1}, "error: __class__: Unexpected keyword argument"),
        ({"a": [[[]]], "b": {"c": None}}, "error: a: Input should be a valid integer"),
    ],
)
async def test_arguments_fit_the_types_or_are_told(arguments: dict[str, Any], told: str) -> None:
    text, wrong = await said(Calculator(), "multiply", **arguments)
    assert text.startswith(told)
    assert wrong == told.startswith("error")


async def test_what_is_told_of_a_wrong_call_is_short() -> None:
    for call in (Call("x" * 10**6, {}), Call("multiply", {"y" * 10**6: 1}), Call("", {}, "z" * 10**6)):
        results = await answered(Calculator(), call)
        assert results.wrong == 1
        assert len(results.messages[0]["content"]) == MOST_TOLD
        assert results.messages[0]["name"] in ("multiply", "unknown")


async def test_calls_are_answered_in_their_order_and_coroutines_at_the_same_time() -> None:
    library = Library()
    calls = (
        Call("borrow", {"number": 1}),
        Call("count", {"words": ["a", "b"]}),
        Call("lend", {}),
        Call("borrow", {"number": 2}),
        Call("count", {"words": ["a", "b"], "of": "first"}),
    )
    async with asyncio.timeout(60):  # each of the two waits for the other
        results = await answered(library, *calls)
    texts = [message["content"] for message in results.messages]
    assert texts == [
        "book 1",
        "2",
        "error: there is no tool 'lend'; the tools are count, borrow, opens",
        "book 2",
        "1",
    ]
    assert [message["name"] for message in results.messages] == ["borrow", "count", "unknown", "borrow", "count"]
    assert results.wrong == 1
    # Plain methods keep the run's event loop free.
    assert threading.current_thread().name not in library.order


async def test_a_tools_own_error_is_its_answer_and_any_other_a_failure() -> None:
    assert await said(Calculator(), "divide", a=7, b=2) == ("3", 0)
    assert await said(Calculator(), "divide", a=7, b=0) == ("error: division by zero", 0)
    assert await said(Library(), "opens", day="never") == ("it is closed for good", 0)

    loop = asyncio.get_running_loop()

    class Broken(Tools):
        def plain(self) -> None:
            """Fails."""
            raise OSError("gone")

        async def awaited(self) -> None:
            """Fails."""
            raise LookupError("gone too")

        async def told(self) -> None:
            """Is told."""
            raise ToolError("try another")

        def given(self) -> Any:
            """Is none."""
            return asyncio.Future(loop=loop)

    assert await said(Broken(), "told") == ("try another", 0)
    for name, kind in (("plain", OSError), ("awaited", LookupError)):
        with pytest.raises(kind, match="gone"):
            await said(Broken(), name)
    with pytest.raises(TypeError, match="a coroutine function itself"):
        await said(Broken(), "given")


async def test_a_long_answer_is_cut_off_and_says_so() -> None:
    class Long(Tools):
        longest_answer = 10

        def write(self, length: int) -> str:
            """Writes.

            Args:
                length: how much.
            """
            return "x" * length

    assert await said(Long(), "write", length=10) == ("x" * 10, 0)
    assert await said(Long(), "write", length=13) == ("x" * 10 + "\n(3 further characters are left out)", 0)


async def test_a_coroutine_that_exits_fails_and_does_not_end_the_run() -> None:
    class Leaving(Tools):
        async def leave(self) -> None:
            """Leaves."""
            raise SystemExit(0)

    with pytest.raises(RuntimeError, match=r"SystemExit\(0\)"):
        await said(Leaving(), "leave")


async def test_halves_of_characters_in_an_answer_are_replaced() -> None:
    class Reading(Tools):
        def read(self, text: str) -> Any:
            """Reads JSON.

            Args:
                text: the JSON.
            """
            return json.loads(text)

    assert await said(Reading(), "read", text='"a\\ud800b"') == ("a?b", 0)


async def test_a_tool_has_the_name_in_its_class_and_a_cached_property_is_none() -> None:
    class Shop(Calculator):
        product = Calculator.multiply

        @functools.cached_property
        def shelf(self) -> str:
            raise AssertionError("asked for")

    assert [each["function"]["name"] for each in Shop().tools] == ["multiply", "divide", "product"]
    assert await said(Shop(), "product", a=6, b=7) == ("42", 0)


def test_a_response_without_calls_ends_the_conversation() -> None:
    assert Calculator().answer(turn()) is None


def one(method: Any, name: str = "look") -> type[Tools]:
    return type("Mine", (Tools,), {name: method, "__module__": "mine"})


class Odd:
    def undocumented(self, where: str) -> str:
        return where

    def undescribed(self, where: str) -> str:
        """Looks."""
        return where

    def untyped(self, where) -> str:  # type: ignore[no-untyped-def]
        """Looks.

        Args:
            where: the place.
        """
        return str(where)

    def dated(self, where: list[datetime.date] | None) -> str:
        """Looks.

        Args:
            where: the place.
        """
        return str(where)

    def yielding(self):  # type: ignore[no-untyped-def]
        """Looks."""
        yield "here"

    def odd(self, where: threading.Thread) -> str:
        """Looks.

        Args:
            where: the place.
        """
        return str(where)

    def several(self, *where: str) -> str:
        """Looks.

        Args:
            where: the place.
        """
        return str(where)


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        (one(Odd.undocumented), "mine:Mine.look: .*no docstring"),
        (one(Odd.undescribed), "mine:Mine.look: .*no description for the argument 'where'"),
        (one(Odd.untyped), "mine:Mine.look: Argument where is missing a type hint"),
        (one(Odd.odd), "mine:Mine.look: .*Thread"),
        (one(Odd.dated), "mine:Mine.look: a template would write date as an object"),
        (one(Odd.yielding), "mine:Mine.look: yields parts of an answer"),
        (one(functools.partialmethod(Odd.undescribed, "here")), "mine:Mine.look: .*partial"),
        (one(Calculator.multiply, "answer"), "mine:Mine.answer: every environment has this name"),
        (one(Odd.several), r"mine:Mine.look: parameter \*where"),
        (one(Odd.undocumented, "name"), "mine:Mine.name: every environment has this name"),
        (one(Odd.undocumented, "_look"), "mine:Mine has no tools"),
    ],
)
def test_what_cannot_be_described_is_told_with_its_name(kind: type[Tools], told: str) -> None:
    with pytest.raises(ConfigError, match=rf"^orchestrator\.environment\.kind: {told}"):
        _ = kind().tools


@pytest.mark.parametrize("most", ["100", 0, -5, 65536.0, None, True])
def test_a_longest_answer_that_is_no_number_of_characters_is_told(most: Any) -> None:
    kind = type("Mine", (Calculator,), {"__module__": "mine", "longest_answer": most})
    said = r"^orchestrator\.environment\.kind: mine:Mine\.longest_answer: should be a whole number of .*, got "
    with pytest.raises(ConfigError, match=said + re.escape(repr(most))):
        _ = kind().tools


def test_an_environments_identity_knows_its_tools() -> None:
    class Other(Environment):
        name = identity = "other"

        def answer(self, turn: Turn) -> Answer:
            return None

    class With(Other):
        def __init__(self, tool: str) -> None:
            self.tool = tool

        @property
        def tools(self) -> list[dict[str, Any]]:
            return [{"type": "function", "function": {"name": self.tool}}]

    digests = {user_identities(each)["environment"].digest for each in (Other(), With("a"), With("b"))}
    assert len(digests) == 3
    assert user_identities(Other())["environment"].digest == "other"
