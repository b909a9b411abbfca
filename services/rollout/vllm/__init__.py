"""Code that runs inside vLLM or drives it.

May import config, histories, http, interface, openai_fields, quartet, sample, session_holder and sessions.
Nothing imports it; engines names it.
"""

import os
from typing import TYPE_CHECKING

from services.rollout.config import RolloutConfig

if TYPE_CHECKING:
    from services.rollout.http import Completions, Served
    from services.rollout.interface import Engine


async def start(config: RolloutConfig) -> "Engine":
    """Starts vLLM's engine."""
    # vLLM's logging set-up closes all other handlers of the process, Serve's included. Serve's controller, when
    # it recovers from its own death, stops replicas whose log it does not find.
    os.environ.setdefault("VLLM_CONFIGURE_LOGGING", "0")
    os.environ.setdefault("VLLM_CHAT_TEMPLATE_RENDER_TIMEOUT", "10")
    # Imported here because it loads vLLM, and workers of vLLM import other modules of this package.
    from services.rollout.vllm.engine import VLLMEngine

    return await VLLMEngine.start(config)


def completions(config: RolloutConfig, served: "Served") -> "Completions":
    """The answers of vLLM's own serving classes."""
    # Imported here because it loads them, which only replicas with an open HTTP port need.
    from services.rollout.vllm.openai import VLLMCompletions

    return VLLMCompletions(config, served)
