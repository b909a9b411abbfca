"""The agent of a run, and the address at which it reaches the rollout service."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import httpx

from orchestrator.config.run import OrchestratorConfig
from orchestrator.deployment.file import Deployment
from orchestrator.environments.agent import Agent, load_agent
from quartet.config.base import ConfigError
from quartet.security.credentials import token_for
from quartet.wire.backoff import Backoff, Deadline
from services.rollout.client import RolloutClient
from services.rollout.config import RolloutConfig
from services.rollout.session_client import SessionClient

OPEN_S = 30.0
"""Longest wait for the address, in seconds; Serve has replaced a proxy that it lost by then."""


def agent_of(config: OrchestratorConfig) -> Agent | None:
    """The run's agent; None if it has none. ConfigError if it cannot be imported."""
    section = config.agent
    return None if section is None else load_agent(section.kind)


def door_of_agents(deployment: Deployment) -> str:
    """The address at which the run's agents reach the rollout service. ConfigError if it is closed, or not known."""
    if not deployment.port.http:
        raise ConfigError(
            "security.http: should be true, as the agent speaks OpenAI's protocol with the rollout service (docs/"
            "openai.md); then `quartet down` and `quartet up`"
        )
    name = deployment.orchestrator.services.rollout.application or RolloutClient.SERVICE
    address = deployment.http_addresses(RolloutConfig).get(name)
    if address is None:
        raise ConfigError(
            f"orchestrator.services.rollout: {name} is not deployed by this file, so the address at which the agent "
            "would reach it is not known; put the application in this file"
        )
    return address


def without_template(config: OrchestratorConfig, tokenizer: Any) -> Iterator[str]:
    """A remark where the model cannot be sent messages."""
    if config.agent is not None and not tokenizer.chat_template:
        yield (
            f"orchestrator.agent: {config.policy.model} has no chat template, so that messages of the agent will be "
            "refused (/v1/chat/completions); put a chat_template.jinja into its folder"
        )


async def await_door(sessions: SessionClient | None) -> None:
    """Returns when the address of the run's agent can be connected to. ConfigError if it cannot for OPEN_S: calls
    would be repeated for minutes, as for a replica that is lost."""
    if sessions is None:
        return
    url, backoff = httpx.URL(sessions.address), Backoff(Deadline(OPEN_S))
    while True:
        try:
            _, writer = await asyncio.open_connection(url.host, url.port)
            writer.close()
            return
        except OSError as error:
            await backoff.wait(
                ConfigError(
                    f"security.http: the port of {sessions.address} is closed ({error}); it is opened when the head "
                    "starts: `quartet down`, then `quartet up` with this file"
                )
            )


@asynccontextmanager
async def sessions_of(deployment: Deployment) -> AsyncIterator[SessionClient | None]:
    """Context with a client for the sessions of the run's agent; None if it has none. ConfigError as
    `door_of_agents`."""
    if deployment.orchestrator.agent is None:
        yield None
        return
    config = deployment.orchestrator
    address, token = door_of_agents(deployment), token_for(config.target)
    async with SessionClient(address, token, config.timeouts.generate_s) as sessions:
        yield sessions
