"""Answers of an environment: asked for within bounds, and turned into token ids."""

import asyncio
import contextlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import replace
from typing import Any, Self, TypeGuard

import numpy as np
from numpy.typing import NDArray

from orchestrator.config.run import OrchestratorConfig
from orchestrator.data.rendering import follow
from orchestrator.environments.config import THREADS
from orchestrator.environments.contract import Answer, Call, Environment, Results, Rewarded, Turn
from orchestrator.experience.beside import together_in_thread
from orchestrator.experience.calls import form_of
from orchestrator.experience.conversation import Conversation
from orchestrator.experience.user_function import UserFunction
from quartet.config.base import ConfigError
from quartet.trajectory import LARGEST_REWARD
from quartet.wire.codec import Ints
from quartet.wire.identity import vocabulary_size

Messages = Sequence[Mapping[str, Any]]


class Answers:
    """Asks an environment about the finished responses of a run."""

    def __init__(
        self, environment: Environment, config: OrchestratorConfig, tokenizer: Any, end_ids: Sequence[int]
    ) -> None:
        """
        Args:
            environment: the one that the configuration names.
            config: bounds of the conversations and of responses.
            tokenizer: the policy's.
            end_ids: the tokens that end a response.
        """
        assert config.environment is not None
        self._environment, self._config, self._tokenizer = environment, config.environment, tokenizer
        self._end_ids = frozenset(end_ids)
        self._own_end_ids = self._end_ids.difference(config.sampling.stop_token_ids)
        self._room = config.longest_response - config.sampling.max_new_tokens
        self._vocabulary = vocabulary_size(tokenizer)
        seconds, attempts = config.environment.answer_s, config.environment.attempts
        self._ask = UserFunction(environment.answer, "environment", "answer_s", seconds, attempts)
        self._threads: AbstractAsyncContextManager[None] = (
            nullcontext() if self._ask.on_loop else asyncio.Semaphore(THREADS)
        )
        # Long answers take seconds. The messages in them take a process, as calls do.
        self._encoded = together_in_thread(self._encode, "answers of the environment")
        form = form_of(environment, config.data.chat_template, tokenizer)
        self._read = None if form is None else together_in_thread(form.read, "calls of tools")

    @classmethod
    def of(
        cls, environment: Environment | None, config: OrchestratorConfig, tokenizer: Any, end_ids: Sequence[int]
    ) -> Self | None:
        """Answers of the run's environment; None if it has none."""
        return None if environment is None else cls(environment, config, tokenizer, end_ids)

    async def to(self, conversation: Conversation) -> Conversation:
        """The conversation with an answer, after which the policy responds again; or as it ends: after its last turn,
        where the environment gives None, or where another response may not fit.

        Raises:
            ConfigError: the environment failed or was late, as often as it may be asked, or gave something that is
                no answer.
        """
        if conversation.turn == self._config.max_turns:
            return conversation
        response = self._text(conversation.segments[-1].ids)
        conversation = replace(conversation, texts=(*conversation.texts, response))
        turn = _turn(conversation, await self._calls(conversation))
        where = (
            f"environment {self._environment.name}: sample {turn.sample}, prompt row {turn.row}, turn {turn.number}"
        )

        async def asked() -> Answer:
            async with self._threads:
                answer: Answer = await self._ask(turn)
                return answer

        answer = await self._ask.attempted(asked, where)
        if isinstance(answer, Rewarded):
            conversation, answer = conversation.rewarded(_reward(answer.reward, where)), answer.answer
        if answer is None:
            return conversation
        messages, wrong = (answer.messages, answer.wrong) if isinstance(answer, Results) else (answer, 0)
        calls, wrong = conversation.calls + len(turn.calls), conversation.wrong_calls + wrong
        conversation = replace(conversation, calls=calls, wrong_calls=wrong)
        ids, text = await self._encoded((messages, turn, where))
        if conversation.follows + len(ids) > self._room:
            return replace(conversation, truncated=True)
        return replace(conversation.answered(ids), texts=(*conversation.texts, text))

    def _encode(self, asked: Sequence[tuple[Any, Turn, str]]) -> list[tuple[Ints, str]]:
        """The token ids and the texts of answers, each with its turn and the place with which errors begin."""
        messages = [(answer, where) for answer, _, where in asked if _is_messages(answer)]
        answers, places = [answer for answer, _ in messages], [where for _, where in messages]
        rendered = iter(follow(answers, self._tokenizer, places, self._environment.tools) if messages else [])
        return [(ids, self._text(ids)) for ids in [self._ids(*each, rendered) for each in asked]]

    def _ids(self, answer: Any, turn: Turn, where: str, rendered: Iterator[str]) -> Ints:
        """The answer's token ids; of messages those of the next text that is `rendered`. ConfigError for what is
        none."""
        if isinstance(answer, str):
            ids = self._tokenised(answer, where)
        elif _is_messages(answer):
            ids = self._tokenised(next(rendered), where)
            if turn.ended and len(ids) and self._is_brought(int(ids[0]), int(turn.ids[-1])):
                ids = ids[1:]
        else:
            ids = _as_ids(answer, where)
        if not len(ids):
            raise ConfigError(f"{where}: gave an answer without tokens; None ends a conversation")
        if int(ids.min()) < 0 or int(ids.max()) >= self._vocabulary:
            raise ConfigError(f"{where}: gave ids outside the tokenizer's vocabulary (0 to {self._vocabulary - 1})")
        return ids.astype(np.int32)

    def _is_brought(self, end: int, last: int) -> bool:
        """True if the response, by its last token, brought the end of a turn that the template writes: that one, or
        another of the model's own ends, which stands for it. Another stop token, such as the end of a tool's call,
        does not."""
        return end in self._end_ids and (last == end or last in self._own_end_ids)

    async def _calls(self, conversation: Conversation) -> tuple[Call, ...]:
        """The calls in the last response."""
        ids = conversation.segments[-1].ids
        if self._read is None or conversation.truncated:
            return ()
        if len(ids) and int(ids[-1]) in self._own_end_ids:
            ids = ids[:-1]
        # Tidied, a text is not what the policy wrote.
        told = {"skip_special_tokens": False, "clean_up_tokenization_spaces": False}
        return await self._read(self._tokenizer.decode(ids, **told))

    def _tokenised(self, text: str, where: str) -> NDArray[np.int64]:
        try:
            return np.asarray(self._tokenizer(text, add_special_tokens=False)["input_ids"], np.int64)
        except Exception as error:  # such as for half of a character
            raise ConfigError(f"{where}: its answer cannot be tokenised: {error}") from None

    def _text(self, ids: Ints) -> str:
        text: str = self._tokenizer.decode(ids, skip_special_tokens=True)
        return text


def _turn(conversation: Conversation, calls: tuple[Call, ...]) -> Turn:
    request = conversation.request
    return Turn(
        number=conversation.turn,
        sample=request.number,
        row=request.prompt.row,
        prompt=request.prompt.text,
        label=request.prompt.label,
        texts=conversation.texts,
        ids=conversation.ids,
        ended=not conversation.truncated,
        calls=calls,
    )


def _reward(given: Any, where: str) -> float:
    """A reward as a number, within the bounds of an agent's. ConfigError if it is none."""
    with contextlib.suppress(TypeError, ValueError, RuntimeError):
        reward = np.asarray(given)
        if reward.ndim == 0 and reward.dtype.kind in "biuf" and abs(float(reward)) <= LARGEST_REWARD:
            return float(reward)
    raise ConfigError(f"{where}: gave the reward {repr(given)[:80]}; should be a number, {LARGEST_REWARD:g} at most")


def _is_messages(answer: Any) -> TypeGuard[Messages]:
    return isinstance(answer, Sequence) and len(answer) > 0 and all(isinstance(each, Mapping) for each in answer)


def _as_ids(answer: Any, where: str) -> NDArray[np.int64]:
    """Token ids, [T]."""
    try:
        ids = np.asarray(answer)
        if ids.ndim != 1 or (ids.size and not np.issubdtype(ids.dtype, np.integer)):
            raise ValueError
        return ids.astype(np.int64)
    except (ValueError, TypeError, OverflowError):
        raise ConfigError(
            f"{where}: gave {str(answer)[:80]!r}; should give text, chat messages, token ids, or None"
        ) from None
