"""Agents for tests, named by import path."""

import asyncio
from pathlib import Path

import httpx

from examples.agent import MODEL, WRONG, solve
from orchestrator.environments.agent import Task
from tests.environments import HELD, HOLD

FAILED = Path("failed")
"""File in the folder of a run that has a line for each conversation that failed on purpose."""


async def held(task: Task) -> int:
    """Asks as examples/agent.py does, but waits before that while HOLD exists, and before its end too."""
    for _ in range(2):
        if HOLD.exists():
            with HELD.open("a") as file:
                file.write(f"{task.sample}\n")
        while HOLD.exists():
            await asyncio.sleep(0.05)
    return await solve(task)


async def failing(task: Task) -> int:
    """Fails after its conversation, the first time that it has one with each third sample."""
    tries = await solve(task)
    known = FAILED.read_text().split() if FAILED.exists() else []
    if task.sample % 3 == 0 and str(task.sample) not in known:
        with FAILED.open("a") as file:
            file.write(f"{task.sample}\n")
        raise ConnectionError("a sandbox was lost")
    return tries


async def rewriting(task: Task) -> int:
    """Asks for the prompt's label; then, for an answer without it, which it gives the reward 0.5, twice in a history
    of its own that begins with the question before; and goes on with the first history in the end."""
    model = MODEL.with_options(base_url=task.base_url, api_key=task.api_key)

    numbers: list[str] = []

    async def ask(*texts: str) -> str:
        said = [{"role": ("user", "assistant")[at % 2], "content": text} for at, text in enumerate(texts)]
        answer = await model.chat.completions.create(model=task.model, messages=said)  # type: ignore[arg-type]
        numbers.append(answer.id)
        return answer.choices[0].message.content or ""

    first = await ask(task.prompt)
    if task.label in first.split():
        return 1
    async with httpx.AsyncClient(headers={"authorization": f"Bearer {task.api_key}"}) as client:
        address = task.base_url.removesuffix("/v1") + "/rl/set_reward"
        said = await client.post(address, json={"reward": 0.5, "interaction_id": numbers[0]})
        assert said.status_code == httpx.codes.OK, said.text
    again, other = await asyncio.gather(ask(f"w9 {task.prompt}"), ask(f"w10 {task.prompt}"))
    await ask(f"w9 {task.prompt}", again, other or "w11")
    await ask(task.prompt, first, WRONG)
    return 2
