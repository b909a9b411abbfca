"""An environment that OpenEnv serves, by its own classes: `python openenv_server.py PORT`, where these are installed.

Its tool adds numbers. A sum is right if it is `wanted` of the reset: it has the reward 1, and ends the session; the
reward of all else is -0.25.
"""

import sys
from typing import Any

import uvicorn
from fastmcp import FastMCP
from openenv.core.env_server.http_server import create_app
from openenv.core.env_server.mcp_environment import MCPEnvironment
from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation
from openenv.core.env_server.types import Observation, State


class Sums(MCPEnvironment):
    """Adds, and knows which sum is wanted."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        server = FastMCP("sums")
        self._sum: int | None = None
        self._wanted = 0

        @server.tool
        def add(a: int, b: int) -> int:
            """Adds two numbers."""
            self._sum = total = a + b
            return total

        super().__init__(server)

    def reset(self, seed: int | None = None, episode_id: str | None = None, **given: Any) -> Observation:
        self._wanted = given["wanted"]
        return Observation(done=False, reward=0.0)

    def _step_impl(self, action: Any, timeout_s: float | None = None, **given: Any) -> Observation:
        raise ValueError("has tools alone")

    async def step_async(self, action: Any, timeout_s: float | None = None, **given: Any) -> Observation:
        observation = await super().step_async(action, timeout_s=timeout_s, **given)
        if isinstance(action, CallToolAction):
            right = self._sum == self._wanted
            observation.reward, observation.done = (1.0 if right else -0.25), right
        return observation  # type: ignore[no-any-return]

    @property
    def state(self) -> State:
        return State(episode_id="one", step_count=0)


if __name__ == "__main__":
    app = create_app(Sums, CallToolAction, CallToolObservation, env_name="sums", max_concurrent_envs=4)
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
