"""An environment of two tools. `environment: {kind: examples.calculator:Calculator, max_turns: 4}` takes it, with
`chat_template: true` in `prompts:` and a model whose chat template takes tools.

The template writes names, docstrings and types of the methods into each prompt. The policy's calls are carried out
and answered, its responses are trained on, and the answers are not. The reward sees all of it: a function of pairs
finds the last response in `pair.last`.
"""

from typing import Annotated

from pydantic import Field

from orchestrator.environments.tools import ToolError, Tools

Number = Annotated[int, Field(ge=-(10**12), le=10**12)]
"""A number within bounds. The policy is told of them where it writes a larger one, which no method sees."""


class Calculator(Tools):
    """Whole numbers."""

    def multiply(self, a: Number, b: Number) -> str:
        """Multiplies two whole numbers.

        Args:
            a: the first.
            b: the second.
        """
        return str(a * b)

    def divide(self, a: Number, b: Number) -> str:
        """Divides two whole numbers, and rounds down.

        Args:
            a: what is divided.
            b: what it is divided by.
        """
        if b == 0:
            raise ToolError("error: division by zero")
        return str(a // b)
