"""Environments for tests, named by import path."""

import asyncio
from pathlib import Path

from examples.second_try import SecondTry
from orchestrator.environments.contract import Answer, Turn
from orchestrator.environments.tools import Tools

HOLD, HELD = Path("hold"), Path("held")
"""Files in the folder of a run: while the first is there, answers wait, and the second has a line for each."""


class Held(SecondTry):
    """Gives a second try as SecondTry does, in a message, but keeps conversations between their turns while HOLD
    exists."""

    async def answer(self, turn: Turn) -> Answer:  # type: ignore[override]
        """Waits, and answers a message."""
        if HOLD.exists():
            with HELD.open("a") as file:
                file.write(f"{turn.sample}\n")
        while HOLD.exists():
            await asyncio.sleep(0.05)
        answer = super().answer(turn)
        return None if answer is None else [{"role": "user", "content": answer}]


class InMessages(SecondTry):
    """Gives a second try as SecondTry does, in a message."""

    def answer(self, turn: Turn) -> Answer:
        """Answers a message."""
        answer = super().answer(turn)
        return None if answer is None else [{"role": "user", "content": str(answer)}]


class Doubling(Tools):
    """Tools that a random policy calls by chance, as their names are words."""

    def w7(self, w: int) -> str:
        """Doubles.

        Args:
            w: the number of a word.
        """
        return f"w{2 * w}"

    async def w8(self, w: int) -> str:
        """Halves.

        Args:
            w: the number of a word.
        """
        await asyncio.sleep(0)
        return f"w{w // 2}"
