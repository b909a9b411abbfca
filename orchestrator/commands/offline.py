"""Generation with a model's folder, by an engine in a process of its own, in the place of the rollout service."""

import asyncio
import itertools
import os
import socket
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any, Self

from orchestrator.deployment.applications import SERVICES, env_vars, mapping
from orchestrator.deployment.file import Deployment
from quartet.config.base import ConfigError
from quartet.models.loading import load_tokenizer
from quartet.wire.codec import Ints
from quartet.wire.errors import DeadlineExceeded, Internal, InvalidArgument
from quartet.wire.identity import tokenizer_hash
from services.rollout.config import RolloutConfig
from services.rollout.offline import pack_call, pack_config, received, samples_of
from services.rollout.sample import Sample, Sampling

END_S = 10.0
"""Seconds that the process may take to end."""


class OfflineRollout:
    """Replaces the rollout client: generates with a model folder, in a process of its own while it is `running`."""

    def __init__(self, config: RolloutConfig, env: Mapping[str, str]) -> None:
        """
        Args:
            config: configuration of the engine.
            env: variables of its process, beside those of this one.
        """
        self._config, self._env = config, env
        self._seeds = itertools.count()
        """Seeds of samples without one, over all calls: no later turn draws the numbers of an earlier one again."""
        self._numbers = itertools.count()
        self._calls: dict[int, asyncio.Future[list[Sample]]] = {}

    @classmethod
    def of(cls, model: str, deployment: Deployment, tokenizer: Any) -> Self:
        """The engine of a file's rollout service, for another model. ConfigError if its tokenizer is another one."""
        config = rollout_config(deployment, model)
        if tokenizer_hash(load_tokenizer(model)) != tokenizer_hash(tokenizer):
            raise ConfigError(
                f"--model {model}: its tokenizer is not that of orchestrator.policy.model "
                f"({deployment.orchestrator.policy.model}), so the reward service would misread its tokens"
            )
        return cls(config, env_vars(_rollout(deployment), "applications.rollout"))

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Context of the process. Does not wait until its engine has loaded the model; ends it in order, or kills it
        if that takes longer than END_S."""
        ours, theirs = socket.socketpair()
        with tempfile.TemporaryFile() as self._log:
            with theirs:
                self._process = await asyncio.create_subprocess_exec(
                    # -P: no module of the current folder hides one of an installed package.
                    *(sys.executable, "-P", "-m", "services.rollout.offline", str(theirs.fileno())),
                    pass_fds=[theirs.fileno()],
                    stdout=asyncio.subprocess.DEVNULL,
                    stderr=self._log,
                    # Otherwise vLLM's process group would listen at the address that the host's name resolves to.
                    env={**os.environ, "GLOO_SOCKET_IFNAME": "lo", **self._env},
                )
            reader, self._writer = await asyncio.open_connection(sock=ours)
            self._writer.write(pack_config(self._config))
            self._receiving = asyncio.create_task(self._receive(reader))
            try:
                yield
            finally:
                self._receiving.cancel()
                self._writer.close()
                try:
                    with suppress(TimeoutError):
                        async with asyncio.timeout(END_S):
                            await self._process.wait()
                finally:
                    if self._process.returncode is None:
                        self._process.kill()
                        await self._process.wait()

    async def generate(
        self,
        prompts: Sequence[Ints],
        sampling: Sampling,
        *,
        seeds: Sequence[int] | None = None,
        timeout_s: float,
        **_of_replicas: Any,
    ) -> AsyncIterator[list[Sample]]:
        """Samples like RolloutClient.generate, but yields all samples at once.

        Raises:
            DeadlineExceeded: they were not there within `timeout_s`, the start of the engine included.
            InvalidArgument: a prompt leaves no room for a response.
            Internal: the process has ended.
        """
        seeds, number = seeds or [next(self._seeds) for _ in prompts], next(self._numbers)
        samples = self._calls[number] = asyncio.get_running_loop().create_future()
        self._writer.write(pack_call(number, prompts, sampling, seeds))
        try:
            await asyncio.wait({samples, self._receiving}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            del self._calls[number]
        if samples.done():
            yield samples.result()
        elif self._receiving.done():
            self._log.seek(0)
            said = self._log.read().decode(errors="replace")[-2000:]
            raise Internal(f"generating with {self._config.model} failed:\n{said}")
        else:
            what = f"generating {len(prompts)} samples with {self._config.model}"
            raise DeadlineExceeded(f"{what}: not done within {timeout_s:g} s (timeouts.generate_s, or --timeout-s)")

    async def _receive(self, reader: asyncio.StreamReader) -> None:
        """Gives each call its samples; returns when the process has ended."""
        with suppress(ConnectionError):
            async for answer in received(reader):
                if (samples := self._calls.get(answer["number"])) is None:
                    continue
                if "problem" in answer:
                    samples.set_exception(InvalidArgument(answer["problem"]))
                else:
                    samples.set_result(samples_of(answer))
        await self._process.wait()


def rollout_config(deployment: Deployment, model: str) -> RolloutConfig:
    """The deployed rollout service's configuration with another model, to which nothing is pushed. ConfigError if the
    model does not exist."""
    args = mapping(_rollout(deployment).get("args"), "applications.rollout.args")
    return RolloutConfig.parse({**args, "model": model, "adapters": None, "adapter_versions": 1}, "--model: rollout")


def _rollout(deployment: Deployment) -> dict[str, Any]:
    """The section of the file's rollout service. ConfigError if there is none."""
    path = SERVICES["rollout"].import_path
    for application in deployment.raw.get("applications") or []:
        if application.get("import_path") == path:
            rollout: dict[str, Any] = application
            return rollout
    raise ConfigError(f"{deployment.path}: applications: none has the import_path {path}, which --model needs")
