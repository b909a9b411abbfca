"""An agent that gives the model the tools of an environment which OpenEnv serves, such as one of the Hugging Face hub
that was started by its container. `agent: examples.openenv_tools:play` takes it.

OPENENV_URL is the address of the environment, `ws://127.0.0.1:8000` by default. Each conversation is a session of its
own there: the prompt is the first message, the model calls tools until it calls none or the environment is done, and
what is returned is the sum of the environment's rewards, which `reward: {kind: column}` makes the score. A column
`reset` of a row, if `data.columns` names it, has arguments of the environment's reset, such as the number of a task.
"""

import json
import os
from contextlib import suppress
from typing import Any

from openai import AsyncOpenAI
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed

from orchestrator.environments.agent import Task

MODEL = AsyncOpenAI(base_url="http://127.0.0.1", api_key="of each task", max_retries=10)


async def play(task: Task) -> float:
    """Has the model call the environment's tools, and returns what that earned."""
    model = MODEL.with_options(base_url=task.base_url, api_key=task.api_key)  # which shares the connections
    said: list[Any] = [{"role": "user", "content": task.prompt}]
    earned, done = 0.0, False
    async with connect(f"{os.environ.get('OPENENV_URL', 'ws://127.0.0.1:8000')}/ws", max_size=None) as session:
        await _ask(session, "reset", {"seed": task.seed} | (task.columns.get("reset") or {}))
        listed = await _ask(session, "step", {"type": "list_tools"})
        tools: list[Any] = [
            {"type": "function", "function": _schema(tool)} for tool in listed["observation"]["tools"]
        ]
        while not done:
            completion = await model.chat.completions.create(model=task.model, messages=said, tools=tools)
            answer = completion.choices[0].message
            if not answer.tool_calls:
                break
            said.append(answer.model_dump(exclude_none=True))
            for call in answer.tool_calls:
                text, reward, done = await _called(session, call)
                earned += reward
                said.append({"role": "tool", "tool_call_id": call.id, "content": text})
                if done:
                    break
    return earned


async def _called(session: ClientConnection, call: Any) -> tuple[str, float, bool]:
    """The text of a tool's answer, its reward, and whether the environment is done. What the model wrote wrongly is
    answered by what is wrong."""
    try:
        arguments = json.loads(call.function.arguments)
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        return "error: the arguments are no JSON object", 0.0, False
    step = await _ask(session, "step", {"type": "call_tool", "tool_name": call.function.name, "arguments": arguments})
    observation = step["observation"]
    if error := observation.get("error"):
        text = f"error: {error['message']}"
    else:
        text = "\n".join(part["text"] for part in observation["result"]["content"] if part["type"] == "text")
    return text, float(step["reward"] or 0), bool(step["done"])


async def _ask(session: ClientConnection, kind: str, data: dict[str, Any]) -> dict[str, Any]:
    """The answer to a message of OpenEnv's protocol. RuntimeError if it is an error, such as that the server is full:
    the conversation is begun again then."""
    with suppress(ConnectionClosed):  # what the server said before is still to be read
        await session.send(json.dumps({"type": kind, "data": data}))
    answer: dict[str, Any] = json.loads(await session.recv())
    if answer["type"] == "error":
        raise RuntimeError(f"the environment refused {kind}: {json.dumps(answer['data'])[:500]}")
    given: dict[str, Any] = answer["data"]
    return given


def _schema(tool: dict[str, Any]) -> dict[str, Any]:
    return {"name": tool["name"], "description": tool["description"], "parameters": tool["input_schema"]}
