"""An environment of two turns, which gives a wrong answer a second try. `environment: examples.second_try:SecondTry`
takes it.

The policy is told that its answer was wrong and samples another; both answers are trained on, and what it was told is
not. The reward sees all of it: a function of pairs finds the last try in `pair.last`.
"""

from orchestrator.environments.contract import Answer, Environment, Turn

WRONG = "\nThat is wrong. Try again: "


class SecondTry(Environment):
    """Compares the response with the prompt's label."""

    def answer(self, turn: Turn) -> Answer:
        """Ends the conversation where the response holds the label. For a chat model, whose prompts are rendered by
        its template, the answer is a message: `[{"role": "user", "content": WRONG}]`."""
        return None if turn.label in turn.response.split() else WRONG
