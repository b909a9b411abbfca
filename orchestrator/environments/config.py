"""Settings of a run whose responses an environment answers, or whose conversations an agent has."""

import math
from typing import Annotated

from pydantic import Field

from quartet.config.base import Config, Count, Seconds, matching
from quartet.config.functions import PATH
from quartet.tasks import CLEAN_UP_S


class EnvironmentConfig(Config):
    """An environment, and the bounds of its conversations."""

    kind: Annotated[str, matching(PATH, "module:Class")]
    """`package.module:Class` of the environment (orchestrator/environments/contract.py), found as reward functions
    are."""
    max_turns: Annotated[int, Field(ge=2)] = 2
    """Most responses in a conversation. The environment is not asked after the last of them."""
    max_tokens: Count | None = None
    """Most tokens of a conversation after its prompt: responses and answers. A response is only begun where
    sampling.max_new_tokens fit, so that this limit cuts none off; a conversation that it ends counts as truncated.
    Null: room for max_turns responses of sampling.max_new_tokens, and for answers of as many between them."""
    answer_s: Seconds = 60
    """Longest time, in seconds, for one answer."""
    attempts: Count = 3
    """Times that the environment is asked for an answer, if it fails or is late, before the run ends."""

    def longest(self, response: int) -> int:
        """Most tokens after a prompt, where a response has at most `response`."""
        return self.max_tokens or self.parts * response

    @property
    def parts(self) -> int:
        """Most responses and answers of a conversation together."""
        return 2 * self.max_turns - 1

    def longest_answer_s(self, conversations: int) -> float:
        """Longest time for one answer, attempts included, where so many conversations may ask: each attempt may come
        after those of all others, of which THREADS are made at a time."""
        turns = math.ceil(conversations / THREADS)
        return self.attempts * (turns * (self.answer_s + CLEAN_UP_S) + self.attempts * PAUSE_S)


class AgentConfig(Config):
    """An agent, and the bounds of its conversations."""

    kind: Annotated[str, matching(PATH, "module:function")]
    """`package.module:function` of the agent (orchestrator/environments/agent.py), found as reward functions are."""
    max_tokens: Count | None = None
    """Most tokens of a conversation beyond data.max_prompt_length: responses, and what the agent adds. A response
    that reaches the limit is cut off, and the conversation counts as truncated. Null: room for 7 times
    sampling.max_new_tokens."""
    conversation_s: Annotated[float, Field(gt=0, le=86_400)] = 600
    """Longest time, in seconds, for one conversation; a day at most."""
    at_once: Annotated[int, Field(ge=1, le=1024)] = 256
    """Most conversations that go on at a time; others wait. 1024 at most, as an owner may hold 2048 sessions, among
    them those of a run that was killed. A plain function has each in a thread of its own."""
    sequences: Annotated[int, Field(ge=1, le=64)] = 1
    """Most sequences of a conversation. A request that does not go on from all tokens of an earlier one and its
    response begins another: an agent that shortens its history, or asks several things side by side, has several.
    `max_tokens` bounds each of them."""
    attempts: Count = 3
    """Times that a conversation is begun, if the agent fails or is late, before the run ends."""

    def longest(self, response: int) -> int:
        """Most tokens after a prompt, where a response has at most `response`."""
        return self.max_tokens or PARTS * response

    @property
    def parts(self) -> int:
        """Responses, and as many answers between them, for which a conversation has room by default."""
        return PARTS

    def longest_s(self, conversations: int) -> float:
        """Longest time for all of so many conversations, attempts included."""
        turns = math.ceil(conversations / self.at_once)
        return self.attempts * (turns * (self.conversation_s + CLEAN_UP_S) + self.attempts * PAUSE_S)


PARTS = 7
"""Responses of the usual length that a conversation with an agent has room for, if nothing else is said: four, and
three answers of the agent's as long."""
PAUSE_S = 1.0
"""Seconds before the second attempt, twice as many before the third, and so on."""
THREADS = 64
"""Most conversations that a plain function answers at a time, each in a thread. A coroutine function answers
any number, but a configuration does not tell which of the two it names."""
