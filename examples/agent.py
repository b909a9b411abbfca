"""An agent that asks twice: a program of its own, which knows the model by OpenAI's protocol alone.
`agent: examples.agent:solve` takes it.

What the model samples for it is trained on, and what it says is not. It returns the number of its questions, which a
reward function finds in `pair.columns["result"]`.
"""

from openai import AsyncOpenAI
from openai.types.chat import ChatCompletionMessageParam

from orchestrator.environments.agent import Task

WRONG = "\nThat is wrong. Try again: "
MODEL = AsyncOpenAI(base_url="http://127.0.0.1", api_key="of each task", max_retries=10)


async def solve(task: Task) -> int:
    """Asks for the prompt's label, and once more where the answer lacks it."""
    model = MODEL.with_options(base_url=task.base_url, api_key=task.api_key)  # which shares the connections
    said: list[ChatCompletionMessageParam] = [{"role": "user", "content": task.prompt}]
    answer = (await model.chat.completions.create(model=task.model, messages=said)).choices[0].message
    if task.label in (answer.content or "").split():
        return 1
    said += [{"role": "assistant", "content": answer.content}, {"role": "user", "content": WRONG}]
    await model.chat.completions.create(model=task.model, messages=said)
    return 2
