"""Functions of the user's: in their thread or on the loop, in time, and again where they fail."""

import asyncio
import contextlib
import gc
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from orchestrator.environments.agent import Task
from orchestrator.experience import user_function as module
from orchestrator.experience.user_function import Failed, UserFunction
from quartet import tasks
from quartet.config.base import ConfigError

TASK = Task("http://x/v1", "key", "m", sample=5, row=2, prompt="w1", label="", columns={}, seed=None)
Given = Callable[[Callable[[Task], Any]], Callable[[Task], Any]]


def plain(function: Callable[[Task], Any]) -> Callable[[Task], Any]:
    return function


def coroutine(function: Callable[[Task], Any]) -> Callable[[Task], Awaitable[Any]]:
    async def called(task: Task) -> Any:
        await asyncio.sleep(0)
        return function(task)

    return called


def gives_a_coroutine(function: Callable[[Task], Any]) -> Callable[[Task], Any]:
    """A plain function such as a decorator makes of a coroutine function."""
    called = coroutine(function)
    return lambda task: called(task)


of_each_kind = pytest.mark.parametrize("kind", [plain, coroutine, gives_a_coroutine])


@pytest.fixture(autouse=True)
def pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PAUSE_S", 0.0)


def made(function: Callable[[Any], Any], seconds: float = 60, attempts: int = 3, **options: Any) -> UserFunction:
    return UserFunction(function, "agent", "conversation_s", seconds, attempts, **options)


async def carried_out(function: UserFunction, repeats: list[int]) -> Any:
    return await function.attempted(lambda: function(TASK), "agent a:b: sample 5", repeats.append)


@of_each_kind
async def test_what_it_returns_is_the_result(kind: Given) -> None:
    tasks: list[Task] = []
    repeats: list[int] = []
    assert await carried_out(made(kind(tasks.append)), repeats) is None
    assert (tasks, repeats) == ([TASK], [])
    assert await made(kind(lambda task: task.row), result=str)(TASK) == "2"


async def test_a_plain_function_leaves_the_loop_to_the_run() -> None:
    loop = asyncio.get_running_loop()

    def waits(task: Task) -> str:
        asyncio.run_coroutine_threadsafe(asyncio.sleep(0), loop).result(60)
        return threading.current_thread().name

    assert await made(waits)(TASK) == "agent, sample 5"


@of_each_kind
@pytest.mark.parametrize(
    ("error", "said"),
    [
        (OSError("gone"), r"failed with OSError\('gone'\)"),
        (TimeoutError("its own"), r"failed with TimeoutError\('its own'\)"),
        (SystemExit(0), r"failed with RuntimeError\('SystemExit\(0\)'\)"),
        (asyncio.CancelledError("its own"), r"failed with CancelledError\('its own'\)"),
        (ValueError("x" * 10_000), r"failed with ValueError\('x{480,500}"),
    ],
)
async def test_whatever_it_raises_is_a_failure_that_is_tried_again(
    kind: Given, error: BaseException, said: str
) -> None:
    tried: list[Task] = []
    repeats: list[int] = []

    def fails(task: Task) -> str:
        tried.append(task)
        if len(tried) < 6:
            raise error
        return "done"

    function = made(kind(fails))
    line = f" at line {fails.__code__.co_firstlineno + 3} of {__name__}"
    said = rf"^agent a:b: sample 5: {said}{line}, the last of 3 attempts \(orchestrator\.agent\.conversation_s, "
    said += r"attempts\); mend it, and go on with --resume, after a change of the agent's file with "
    with pytest.raises(ConfigError, match=said + "--accept-changed-services$"):
        await carried_out(function, repeats)
    assert (len(tried), repeats) == (3, [1, 1])
    assert await carried_out(function, repeats) == "done"
    assert (len(tried), repeats) == (6, [1, 1, 1, 1])


async def test_each_attempt_waits_longer_than_the_one_before(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)

    monkeypatch.setattr(module, "PAUSE_S", 3.0)
    monkeypatch.setattr(asyncio, "sleep", sleep)
    with pytest.raises(ConfigError):
        await carried_out(made(lambda task: 1 / 0), [])
    assert pauses == [3.0, 6.0]


async def test_a_result_that_cannot_be_made_is_a_failure() -> None:
    with pytest.raises(Failed, match=r"^failed with ValueError\(.*'seven'"):
        await made(lambda task: "seven", result=int)(TASK)


async def test_the_line_is_one_of_the_object_s_class() -> None:
    class Mine(Base):
        def mine(self) -> None:
            raise LookupError

    with pytest.raises(Failed, match=rf"at line {Mine.mine.__code__.co_firstlineno + 1} of {__name__}$"):
        await made(Mine().called)(TASK)


class Base:
    """Stands for a class of another module, which calls the user's."""

    def called(self, task: Task) -> None:
        self.mine()

    def mine(self) -> None:
        raise NotImplementedError


Base.called.__module__ = "elsewhere"


@pytest.mark.parametrize("kind", [plain, coroutine])
async def test_a_late_one_is_a_failure_and_never_waited_for(kind: Given) -> None:
    never = threading.Event()

    async def waits(task: Task) -> None:
        await asyncio.Event().wait()

    def hangs(task: Task) -> None:
        never.wait()

    line = "" if kind is plain else f" at line {waits.__code__.co_firstlineno + 1} of {__name__}"
    try:
        async with asyncio.timeout(60):
            with pytest.raises(ConfigError, match=rf"took longer than 0\.05 s{line}, the last of 2 attempts"):
                await carried_out(made(hangs if kind is plain else waits, seconds=0.05, attempts=2), [])
    finally:
        never.set()


async def test_what_a_plain_function_gives_to_await_is_late_as_well() -> None:
    with pytest.raises(Failed, match=r"took longer than 0\.05 s"):
        await made(lambda task: asyncio.sleep(600), seconds=0.05)(TASK)


async def test_what_its_own_awaits_cancel_is_a_failure() -> None:
    async def waits(task: Task) -> None:
        lost = asyncio.ensure_future(asyncio.sleep(10))
        lost.cancel()
        await lost

    with pytest.raises(Failed, match=rf"^failed with CancelledError\(\) at line .* of {__name__}$"):
        await made(waits)(TASK)


@pytest.mark.parametrize("fails", [False, True])
async def test_the_end_of_the_run_is_not_taken_for_a_failure(fails: bool, complaints: list[Any]) -> None:
    tried: list[Task] = []

    async def waits(task: Task) -> None:
        tried.append(task)
        try:
            await asyncio.sleep(600)
        finally:
            if fails:
                raise LookupError("the sandbox is gone")

    asked = asyncio.ensure_future(carried_out(made(waits), []))
    while not tried:
        await asyncio.sleep(0)
    asked.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asked
    del asked
    await asyncio.sleep(0.01)
    gc.collect()
    assert (len(tried), complaints) == (1, [])


class Stubborn:
    """A coroutine function that goes on when it is cancelled, until it is `over`."""

    def __init__(self) -> None:
        self.begun, self.over = asyncio.Event(), asyncio.Event()

    async def solve(self, task: Task) -> None:
        self.begun.set()
        while not self.over.is_set():
            with contextlib.suppress(asyncio.CancelledError):
                await self.over.wait()


@pytest.fixture
async def stubborn(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Stubborn]:
    monkeypatch.setattr(tasks, "CLEAN_UP_S", 0.05)
    held = Stubborn()
    yield held
    held.over.set()


async def test_one_that_goes_on_when_it_is_late_is_left_behind(
    stubborn: Stubborn, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr(module.log, "warning", lambda text, *given: said.append(text % given))
    async with asyncio.timeout(60):
        with pytest.raises(ConfigError, match=r"took longer than 0\.05 s, the last of 2 attempts"):
            await carried_out(made(stubborn.solve, seconds=0.05, attempts=2), [])
    assert said == ["agent, sample 5: goes on though it is cancelled, and is left behind"] * 2


async def test_one_that_goes_on_when_the_run_ends_is_left_behind(stubborn: Stubborn) -> None:
    asked = asyncio.ensure_future(carried_out(made(stubborn.solve), []))
    await stubborn.begun.wait()
    asked.cancel()
    done, _ = await asyncio.wait([asked], timeout=60)
    assert done == {asked}
    assert asked.cancelled()


async def test_one_that_cleans_up_when_it_is_late_is_waited_for() -> None:
    cleaned: list[Task] = []

    async def solve(task: Task) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0.05)
            cleaned.append(task)

    with pytest.raises(Failed, match="took longer"):
        await made(solve, seconds=0.05)(TASK)
    assert cleaned == [TASK]


async def test_one_that_returns_when_it_is_cancelled_is_late() -> None:
    async def solve(task: Task) -> str:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.Event().wait()
        return "half done"

    with pytest.raises(Failed, match=r"^took longer than 0\.05 s$"):
        await made(solve, seconds=0.05)(TASK)
