"""A rank that answers what it is told to."""

import asyncio
from collections.abc import Awaitable
from typing import Any, TypeVar

from quartet.ranks.thread_rank import ThreadRank

Part = TypeVar("Part")
NEVER = 3600.0


class FakeRank:
    """Answers its calls in order, each after a delay; an exception is raised."""

    def __init__(self, *answers: Any, after_s: float = 0.0) -> None:
        self.answers = list(answers)
        self.after_s = after_s
        self.called: list[tuple[Any, ...]] = []
        self.killed = 0
        self.death = ""
        self.stopped = False

    def call(self, method: str, *arguments: Any, **options: Any) -> Awaitable[Any]:
        self.called.append((method, *arguments, *options.values()))
        return self._answer(self.answers.pop(0) if self.answers else None)

    async def _answer(self, answer: Any) -> Any:
        await asyncio.sleep(self.after_s)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def kill(self) -> bool:
        self.killed += 1
        return True


def part(rank: ThreadRank, kind: type[Part]) -> Part:
    """The object of this class whose methods the rank runs."""
    assert rank.rank is not None
    found: Part = rank.rank._parts[kind.__qualname__]
    return found
