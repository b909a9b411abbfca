"""Tasks that are cancelled: waited for while they clean up, and left behind where they go on."""

import asyncio
import subprocess
import sys

import pytest

from quartet import tasks

STUBBORN = """
import asyncio, contextlib
from quartet import tasks

tasks.CLEAN_UP_S = 0.05

async def stubborn():
    while True:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.Event().wait()

async def main():
    several = asyncio.gather(stubborn(), stubborn())
    await asyncio.sleep(0)
    if {left}:
        await tasks.ended([asyncio.ensure_future(stubborn())])
    return "the end"

print(tasks.run(main()))
"""


@pytest.mark.parametrize("left", [False, True])
def test_the_end_of_a_loop_does_not_wait_for_those_that_go_on(left: bool) -> None:
    command = [sys.executable, "-c", STUBBORN.format(left=left)]
    ran = subprocess.run(command, timeout=60, capture_output=True, text=True, check=True)
    assert ran.stdout == "the end\n"


async def test_those_that_clean_up_are_waited_for() -> None:
    cleaned: list[int] = []

    async def clean(number: int) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0.01 * number)
            cleaned.append(number)

    begun = [asyncio.create_task(clean(number)) for number in range(3)]
    await asyncio.sleep(0)
    assert await tasks.ended(begun) == set()
    assert cleaned == [0, 1, 2]
    assert await tasks.ended([]) == set()


def test_the_error_of_a_loop_is_its_own() -> None:
    async def fails() -> None:
        raise LookupError("gone")

    with pytest.raises(LookupError, match="gone"):
        tasks.run(fails())
