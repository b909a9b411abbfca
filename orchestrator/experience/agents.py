"""Conversations that an agent has with the policy: begun, awaited, and read from their sessions as samples."""

import asyncio
import json
import traceback
from collections.abc import Callable
from inspect import isawaitable, iscoroutinefunction
from typing import Any, Self

from orchestrator.config.run import OrchestratorConfig
from orchestrator.environments.agent import Agent, Task
from orchestrator.environments.config import PAUSE_S
from orchestrator.experience.checks import check_row
from orchestrator.experience.conversation import Conversation
from orchestrator.experience.requests import SampleRequest
from quartet.config.base import ConfigError
from quartet.threads import in_thread
from quartet.wire.callers import Purpose
from quartet.wire.errors import InvalidReply, NotFound
from quartet.wire.json_bounds import check_bounds
from services.rollout.client import RolloutClient
from services.rollout.sample import FinishReason
from services.rollout.session_client import Session, SessionClient
from services.rollout.session_trajectory import trajectories_of

LONGEST_RESULT = 1 << 16
"""Most characters of JSON that an agent may return, as a call to the reward service holds those of many samples."""
_SAID = 500
"""Most characters of an error that are repeated."""


class _Failed(Exception):
    """A conversation did not come to its end; the message says why."""


class Agents:
    """Has an agent make samples of prompts."""

    def __init__(
        self,
        agent: Agent,
        config: OrchestratorConfig,
        sessions: SessionClient,
        rollout: RolloutClient,
        purpose: Purpose,
    ) -> None:
        """
        Args:
            agent: the one that the configuration names.
            config: bounds of the conversations and of responses.
            sessions: where they are had.
            rollout: holds the run's lease.
            purpose: that of the conversations, which decides on their place in the queue.
        """
        assert config.agent is not None
        self._agent, self._config, self._run = agent, config.agent, config
        self._sessions, self._rollout, self._purpose = sessions, rollout, purpose
        self._on_loop = iscoroutinefunction(agent.function)
        self._places = asyncio.Semaphore(config.agent.at_once)

    @classmethod
    def of(
        cls,
        agent: Agent | None,
        config: OrchestratorConfig,
        sessions: SessionClient | None,
        rollout: RolloutClient,
        purpose: Purpose,
    ) -> Self | None:
        """Conversations of the run's agent; None if it has none."""
        return None if agent is None or sessions is None else cls(agent, config, sessions, rollout, purpose)

    async def converse(
        self,
        request: SampleRequest,
        *,
        version: int | None,
        newest: int | None,
        on_repeat: Callable[[int], None],
    ) -> Conversation:
        """The conversation about a prompt, from beginning to end.

        Args:
            request: the prompt, and the seed from which those of the responses follow.
            version, newest: the oldest and the newest policy version that may serve it; None for any.
            on_repeat: called with 1 before it is begun again.

        Raises:
            ConfigError: the agent failed or was late, as often as a conversation may be begun.
            ServiceError: the rollout service starts no session in time.
        """
        for attempt in range(1, self._config.attempts + 1):
            if attempt > 1:
                await asyncio.sleep((attempt - 1) * PAUSE_S)
                on_repeat(1)
            try:
                async with self._places:
                    return await self._begun(request, version, newest)
            except (_Failed, NotFound) as error:
                reason = str(error)
        raise ConfigError(
            f"agent {self._agent.name}: sample {request.number}, prompt row {request.prompt.row}: {reason}, the last "
            f"of {attempt} attempts (orchestrator.agent.conversation_s, attempts); mend it, and go on with --resume, "
            "after a change of the agent's file with --accept-changed-services"
        )

    async def _begun(self, request: SampleRequest, version: int | None, newest: int | None) -> Conversation:
        """A conversation in a session of its own. NotFound: its tokens are lost."""
        own = {"task_id": f"sample {request.number}"} | ({} if request.seed is None else {"seed": request.seed})
        session = await self._sessions.start(self._terms(version, newest), **own)
        try:
            result, failure = await self._had(self._task(request, session))
            told = await self._sessions.trajectory(session)
        finally:
            self._sessions.remove(session)
        # An agent may fail where another response would not fit: that is the end of its conversation.
        if failure and not told["full"]:
            raise _Failed(failure)
        return _read(told, request, result)

    def _terms(self, version: int | None, newest: int | None) -> dict[str, Any]:
        """Terms that are not those of one session alone."""
        run = self._run
        terms: dict[str, Any] = {"purpose": self._purpose.name.lower(), "temperature": run.sampling.temperature}
        terms |= {"max_tokens": run.sampling.max_new_tokens, "max_length": run.longest_sequence[0]}
        terms["kept_s"] = self._config.conversation_s + run.timeouts.generate_s
        if version is not None:
            lease = self._rollout.lease
            terms |= {"min_version": version, "lease": {"run_id": lease.run_id, "number": lease.number}}
            terms |= {} if newest is None else {"max_version": newest}
        return terms

    def _task(self, request: SampleRequest, session: Session) -> Task:
        prompt = request.prompt
        return Task(
            base_url=f"{self._sessions.address}/v1",
            api_key=session.api_key,
            model=session.model,
            sample=request.number,
            row=prompt.row,
            prompt=prompt.text,
            label=prompt.label,
            columns=prompt.columns,
            seed=request.seed,
        )

    async def _had(self, task: Task) -> tuple[Any, str]:
        """The agent's result at the end of a conversation; and the reason why it did not come to that, empty if it
        did."""
        seconds = self._config.conversation_s
        try:
            async with asyncio.timeout(seconds) as limit:
                result = await self._returned(task)
            return _as_json(result), ""
        except (Exception, asyncio.CancelledError) as error:  # the user's own code, which may raise anything
            # Its own awaits may have been cancelled; a task group would take that for the end of this one.
            task_ = asyncio.current_task()
            if isinstance(error, asyncio.CancelledError) and task_ is not None and task_.cancelling():
                raise
            late = isinstance(error, TimeoutError) and limit.expired()
            if late:  # the cancellation was raised where it waited
                return None, f"did not end within {seconds:g} s{self._line(error.__cause__)}"
            return None, f"failed with {repr(error)[:_SAID]}{self._line(error)}"

    def _line(self, error: BaseException | None) -> str:
        """The line of the agent's module that led to an error; empty if it is not known."""
        module = getattr(self._agent.function, "__module__", "")
        frames = traceback.walk_tb(None if error is None else error.__traceback__)
        lines = [line for frame, line in frames if frame.f_globals.get("__name__") == module]
        return f" at line {lines[-1]} of {module}" if lines else ""

    async def _returned(self, task: Task) -> Any:
        function = self._agent.function
        try:
            if self._on_loop:
                return await function(task)
            given = await in_thread(lambda: function(task), f"agent, sample {task.sample}")
            # A plain function may give one too, such as a coroutine function that is wrapped in another.
            return await given if isawaitable(given) else given
        except SystemExit as error:  # which would end the run as if it were the run's own
            raise RuntimeError(repr(error)) from error


def _as_json(result: Any) -> Any:
    """A copy of what an agent returned, as JSON has it. ValueError or TypeError if JSON has no such thing, or it is
    more than the reward service takes."""
    text = json.dumps(result, allow_nan=False)
    if len(text) > LONGEST_RESULT:
        raise ValueError(f"returned {len(text)} characters of JSON, and {LONGEST_RESULT} is the most")
    check_bounds(text.encode())
    return json.loads(text)


def _read(told: dict[str, Any], request: SampleRequest, result: Any) -> Conversation:
    """The conversation that a session holds.

    Raises:
        _Failed: it has no response, or its history was changed in between.
        InvalidReply: the session is not as it should be.
    """
    try:
        found = trajectories_of(told, request.number, request.group, request.prompt.row)
        turns = [turn for turn in told["interactions"] if not turn["superseded"]]
        ends = [FinishReason(turn["finish_reason"]) for turn in turns]
    except (KeyError, ValueError) as error:
        raise InvalidReply(f"/rl/trajectory: {error!r}") from None
    if not found or not ends:
        full = "sent a first request that leaves no room for a response (data.max_prompt_length + agent.max_tokens)"
        raise _Failed(full if told["full"] else "asked the model for nothing")
    for segment in found[0].segments:
        if (logprobs := segment.logprobs) is not None:
            check_row(f"/rl/trajectory: prompt row {request.prompt.row}: logprobs", logprobs, len(segment.ids))
    if len(found) > 1:
        raise _Failed(
            f"changed the history of its messages ({len(found) - 1} times): each request should have all messages "
            "and answers before it, as they were"
        )
    return Conversation(
        request,
        tuple(found[0].segments),
        turn=len(ends),
        truncated=bool(told["full"]) or ends[-1] is FinishReason.LENGTH,
        result=result,
    )
