"""Conversations that an agent has with the policy: begun, awaited, and read from their sessions as samples."""

import asyncio
import json
from collections.abc import Callable
from typing import Any, Self

from orchestrator.config.run import OrchestratorConfig
from orchestrator.environments.agent import Agent, Task
from orchestrator.experience.checks import check_row
from orchestrator.experience.conversation import Conversation
from orchestrator.experience.requests import SampleRequest
from orchestrator.experience.user_function import Failed, UserFunction
from quartet.trajectory import as_one
from quartet.wire.callers import Purpose
from quartet.wire.errors import InvalidReply, NotFound
from quartet.wire.json_bounds import check_bounds
from services.rollout.client import RolloutClient
from services.rollout.sample import FinishReason
from services.rollout.session_client import Session, SessionClient
from services.rollout.session_trajectory import trajectories_of

LONGEST_RESULT = 1 << 16
"""Most characters of JSON that an agent may return, as a call to the reward service holds those of many samples."""


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
        seconds, attempts = config.agent.conversation_s, config.agent.attempts
        self._solve = UserFunction(agent.function, "agent", "conversation_s", seconds, attempts, _as_json)
        self._sessions, self._rollout, self._purpose = sessions, rollout, purpose
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

        async def begun() -> Conversation:
            async with self._places:
                try:
                    return await self._begun(request, version, newest)
                except NotFound as error:  # its tokens are lost
                    raise Failed(str(error)) from error

        where = f"agent {self._agent.name}: sample {request.number}, prompt row {request.prompt.row}"
        return await self._solve.attempted(begun, where, on_repeat)

    async def _begun(self, request: SampleRequest, version: int | None, newest: int | None) -> Conversation:
        """A conversation in a session of its own. Failed: by the agent. NotFound: its tokens are lost."""
        own = {"task_id": f"sample {request.number}"} | ({} if request.seed is None else {"seed": request.seed})
        session = await self._sessions.start(self._terms(version, newest), **own)
        result = failure = None
        try:
            try:
                result = await self._solve(self._task(request, session))
            except Failed as error:
                failure = error
            told = await self._sessions.trajectory(session)
        finally:
            # A function that was late may go on, and would be sampled for beside the next attempt.
            self._sessions.remove(session, at_once=failure is not None)
        # An agent may fail where another response would not fit: that is the end of its conversation.
        if failure and not told["full"]:
            raise failure
        return _read(told, request, result, self._config.sequences)

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


def _as_json(result: Any) -> Any:
    """A copy of what an agent returned, as JSON has it. ValueError or TypeError if JSON has no such thing, or it is
    more than the reward service takes."""
    text = json.dumps(result, allow_nan=False)
    if len(text) > LONGEST_RESULT:
        raise ValueError(f"returned {len(text)} characters of JSON, and {LONGEST_RESULT} is the most")
    check_bounds(text.encode())
    return json.loads(text)


def _read(told: dict[str, Any], request: SampleRequest, result: Any, most: int) -> Conversation:
    """The conversation that a session holds.

    Raises:
        Failed: it has no response, or is more than so many sequences.
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
        raise Failed(full if told["full"] else "asked the model for nothing")
    segments = as_one(found)
    for segment in segments:
        if (logprobs := segment.logprobs) is not None:
            check_row(f"/rl/trajectory: prompt row {request.prompt.row}: logprobs", logprobs)
    if len(found) > most:
        raise Failed(
            f"had {len(found)} sequences, and {most} is the most (agent.sequences): a request goes on with one that "
            "is there if it has all messages and answers before it, as they were"
        )
    conversation = Conversation(
        request,
        tuple(segments),
        turn=len(ends),
        truncated=bool(told["full"]) or ends[-1] is FinishReason.LENGTH,
        result=result,
    )
    return conversation if told["reward"] is None else conversation.rewarded(told["reward"])
