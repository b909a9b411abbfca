"""The contract of an agent: a program that has a conversation with the policy, by OpenAI's protocol.

A new one is a function in a file of the user's, and a line in the run's file, `agent: my_agent:solve`:

    async def solve(task: Task) -> float:
        model = AsyncOpenAI(base_url=task.base_url, api_key=task.api_key)
        question = [{"role": "user", "content": task.prompt}]
        answer = (await model.chat.completions.create(model=task.model, messages=question)).choices[0].message
        return float(task.label in answer.content)
"""

import hashlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from quartet.config.base import ConfigError
from quartet.config.functions import imported, source_of

FIELD = "orchestrator.agent.kind"
"""Key that names the agent of a run."""
RESULT = "result"
"""Column in which a reward function finds what the agent returned."""


@dataclass(frozen=True, slots=True)
class Task:
    """One conversation to have."""

    base_url: str
    """Address of OpenAI's protocol."""
    api_key: str = field(repr=False)
    """Key that is good for this conversation alone: what is sampled with it is what is trained on."""
    model: str
    """Name of the model."""
    sample: int
    """Number of the sample in its run, another one in each pass over the data. Evaluations count from 0 again."""
    row: int
    """Row of the prompt in its split of the data set, of training or of evaluation."""
    prompt: str
    """Text of the prompt."""
    label: str
    """Label of the prompt; empty if there is none."""
    columns: Mapping[str, Any]
    """Values of further columns (data.columns)."""
    seed: int | None
    """Seed for whatever the agent draws itself; None where requests are not seeded. The policy's own samples are
    seeded."""


@dataclass(frozen=True, slots=True)
class Agent:
    """An agent of the user's."""

    name: str
    """Import path."""
    function: Callable[[Task], Any] = field(repr=False)
    identity: str
    """Digest of the source of its file, and of those beside it that this one imports: samples are only compared, or
    read from a journal, where it is the same."""


def load_agent(path: str) -> Agent:
    """The agent at `module:function`, as FIELD of the configuration names it.

    Raises:
        ConfigError: it does not exist, is not a function of one argument, or has no source to identify it by.
    """
    function = imported(path, FIELD)
    try:
        inspect.signature(function).bind(None)
    except (TypeError, ValueError):
        raise ConfigError(
            f"{FIELD}: {path!r} should be a function of one argument, a Task (orchestrator/environments/agent.py), "
            f"got {function!r}"
        ) from None
    source = source_of(function, path, FIELD)
    return Agent(path, function, hashlib.sha256(source.encode()).hexdigest())
