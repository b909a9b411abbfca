"""`quartet evaluate`: evaluates a model on a split, scored by the deployed reward service."""

import asyncio
import itertools
import math
import os
import socket
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Self

from rich.table import Table

from orchestrator.clients import Services, check_models, check_scores
from orchestrator.commands.checks.fitting import ends_without_token
from orchestrator.commands.checks.preflight import environment_of, evaluation_prompts, load_judges
from orchestrator.commands.patience import patience_of, reached
from orchestrator.commands.train import RUNS
from orchestrator.config.data import EVAL
from orchestrator.config.run import OrchestratorConfig
from orchestrator.data.prompts import load_prompts
from orchestrator.deployment.applications import env_vars, mapping
from orchestrator.deployment.file import Deployment
from orchestrator.evaluation.evaluator import evaluate_samples
from orchestrator.evaluation.intervals import Interval, over_prompts
from orchestrator.evaluation.results import EvaluatedSample, write_rows
from orchestrator.experience.answers import Answers
from orchestrator.experience.collector import Collector
from orchestrator.experience.requests import evaluation_requests
from orchestrator.policy.sampled import sampled_from
from protos import rollout_pb2
from quartet.config.base import ConfigError
from quartet.models.loading import load_tokenizer
from quartet.wire.backoff import Deadline
from quartet.wire.callers import Purpose
from quartet.wire.codec import Ints
from quartet.wire.errors import DeadlineExceeded, Internal, Unavailable
from quartet.wire.identity import tokenizer_hash
from services.rollout.client import RolloutClient
from services.rollout.config import RolloutConfig
from services.rollout.offline import pack_call, pack_config, received, samples_of
from services.rollout.sample import Sample, Sampling

CURRENT = "current"
ALIKE_S = 10
"""Longest wait for all rollout replicas to serve the same weights, which they do but for moments of a push."""
LOOK_S = 1
"""Seconds between two looks at that."""
END_S = 10.0
"""Seconds that the process of an offline engine may take to end."""


@dataclass(frozen=True, slots=True)
class Evaluation:
    """A model's responses on a split, with their scores."""

    title: str
    """The model and the split."""
    scorer: str
    """Name of the reward service's scorer."""
    rows: Sequence[EvaluatedSample]
    path: Path
    """The JSONL file that holds the rows."""

    def table(self) -> Table:
        """Means with 95 % confidence intervals, for rich to print."""
        return _table(self.rows, self.title, self.scorer, str(self.path))


_ROLLOUT = "services.rollout.replica:build"


async def evaluate_model(
    deployment: Deployment,
    model: str,
    split: str | None,
    output: Path | None,
    connect: Callable[[OrchestratorConfig, Purpose], Services] = Services.connect,
    note: Callable[[str], None] = lambda text: None,
) -> Evaluation:
    """Generates, scores, and writes the samples as JSONL.

    Args:
        deployment: its services have to be up; its sampling settings and judges are used.
        model: a model folder, or "current" for the rollout service's present weights.
        split: split of the configured data set, such as "eval" or "train[:100]"; None: the file's `data.eval_split`.
        output: the JSONL file; None: runs/<name>/evaluate-<model>-<split>.jsonl.
        connect: makes the clients.
        note: called with messages for the user.

    Raises:
        ConfigError: the model or split does not exist, or a model or service has another tokenizer.
        Unavailable: the services are not up.
        ServiceError: a service fails or takes too long.
    """
    config = deployment.orchestrator
    split = split or config.data.eval_split or EVAL
    with deployment.naming():
        tokenizer = load_tokenizer(config.policy.model)
        prompts = evaluation_prompts(load_prompts(config.data, tokenizer, split), config)
        judges, environment = load_judges(config), environment_of(config)
    sampled = sampled_from(config, tokenizer)
    for problem in ends_without_token(config, sampled):
        raise ConfigError(problem)
    offline = None if model == CURRENT else OfflineRollout.of(model, deployment, tokenizer)
    services = connected = connect(config, Purpose.EVALUATION)
    try:
        patience = patience_of(deployment, note)
        await reached(services, deployment, patience)
        infos = await patience(partial(ask, services, with_rollout=offline is None))
        check_models({name: info.model for name, info in infos.items()}, tokenizer, config)
        check_scores(infos["reward"], config)
        if offline is not None:
            services = replace(services, rollout=offline)  # type: ignore[arg-type]
        oldest = await served(services.rollout, config) if offline is None else 0
        requests = evaluation_requests(config, prompts)
        answers = Answers.of(environment, config, tokenizer, sampled.end_ids)
        collector = Collector(services, config, sampled.end_ids, answers=answers, note=note)
        async with nullcontext() if offline is None else offline.running():
            collected = await collector.collect(requests, version=None, critic_step=None)
        if offline is None and (older := int(collected.columns["versions"].min())) < oldest:
            raise ConfigError(
                f"some samples are of weights of version {older}, though all rollout replicas had {oldest} at first: "
                "one has started meanwhile; evaluate again"
            )
    finally:
        await connected.close()
    # Of weights that change during a run those of its end.
    scored = collected.scored_by(config.algorithm, config.steps)
    rows = await evaluate_samples(scored, tokenizer, judges, config.evaluation.judge_s)
    path = output or RUNS / config.name / f"evaluate-{Path(model).name}-{_plain(split)}.jsonl"
    write_rows(path, rows)
    return Evaluation(f"{model} on {split}", infos["reward"].identity.name, rows, path)


async def served(rollout: RolloutClient, config: OrchestratorConfig, alike_s: float = ALIKE_S) -> int:
    """The version that all rollout replicas serve, once none of them is behind in a push.

    Raises:
        ConfigError: they serve different weights for `alike_s`, as one does that has started since the last run.
        Unavailable: none answers.
    """
    deadline = Deadline(alike_s)
    while True:
        reports = await rollout.update_weights(config.timeouts.info_s, discover=rollout_pb2.Discover())
        # One whose engine does not answer gets no requests either.
        held = {(report.timeline, report.policy_version) for report in reports if report.ok}
        if len(held) == 1:
            return held.pop()[1]
        if deadline.passes_within(LOOK_S):
            break
        await asyncio.sleep(LOOK_S)
    told = "; ".join(f"{report.replica}: {_weights(report)}" for report in reports if report.ok)
    if not told:
        raise Unavailable("no rollout replica answers")
    raise ConfigError(
        f"the rollout replicas serve different weights ({told}), as a replica that starts while no run trains has "
        f"those of its model. Evaluate a model's folder, such as --model "
        f"{config.save or RUNS / config.name / 'policy'}, or go on with the run, which pushes its weights to all"
    )


def _weights(report: rollout_pb2.WeightReport) -> str:
    return f"version {report.policy_version}" if report.timeline else "its model's own"


async def ask(services: Services, timeout_s: float, *, with_rollout: bool) -> dict[str, Any]:
    """The Info of each service that takes part, by name; the critic does not.

    Raises:
        ExceptionGroup: the ServiceErrors of services that do not answer within `timeout_s`.
    """
    clients: dict[str, Any] = {"reward": services.reward}
    if services.reference is not None:
        clients["reference"] = services.reference
    if with_rollout:
        clients["rollout"] = services.rollout
    async with asyncio.TaskGroup() as group:
        asked = {name: group.create_task(client.info(timeout_s)) for name, client in clients.items()}
    return {name: task.result() for name, task in asked.items()}


def _plain(split: str) -> str:
    return "".join(character if character.isalnum() else "_" for character in split)


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
        min_version: int = 0,
        timeout_s: float,
        **_of_replicas: Any,
    ) -> AsyncIterator[list[Sample]]:
        """Samples like RolloutClient.generate, but yields all samples at once.

        Raises:
            DeadlineExceeded: they were not there within `timeout_s`, the start of the engine included.
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
                if (samples := self._calls.get(answer["number"])) is not None:
                    samples.set_result(samples_of(answer))
        await self._process.wait()


def rollout_config(deployment: Deployment, model: str) -> RolloutConfig:
    """The deployed rollout service's configuration with another model. ConfigError if the model does not exist."""
    args = mapping(_rollout(deployment).get("args"), "applications.rollout.args")
    return RolloutConfig.parse({**args, "model": model}, "--model: rollout")


def _rollout(deployment: Deployment) -> dict[str, Any]:
    for application in deployment.raw.get("applications") or []:
        if application.get("import_path") == _ROLLOUT:
            rollout: dict[str, Any] = application
            return rollout
    raise ConfigError(f"{deployment.path}: applications: none has the import_path {_ROLLOUT}, which --model needs")


def _table(rows: Sequence[EvaluatedSample], title: str, scorer: str, path: str) -> Table:
    """A table of means with 95 % confidence intervals."""
    drawn = Table(title=title, caption=f"{len(rows)} samples, written to {path}", title_justify="left")
    drawn.add_column("measure")
    drawn.add_column("mean", justify="right")
    drawn.add_column("95 % interval", justify="right")
    columns = {f"score ({scorer})": [row.score for row in rows]}
    for name in rows[0].scores:
        columns[f"score {name}"] = [row.scores[name] for row in rows]
    for name in rows[0].judges:
        columns[name] = [row.judges[name] for row in rows]
    if not any(math.isnan(row.kl) for row in rows):
        columns["KL to reference, nats"] = [row.kl for row in rows]
    columns |= {
        "response length, tokens": [float(row.length) for row in rows],
        "cut off by the limit": [float(not row.ended) for row in rows],
    }
    if unscored := sum(math.isnan(row.score) for row in rows):
        drawn.caption = f"{drawn.caption}; {unscored} have no score"
    for name, values in columns.items():
        known = [(row.row, value) for row, value in zip(rows, values, strict=True) if not math.isnan(value)]
        if not known:
            drawn.add_row(name, "–", "no sample has one")
            continue
        interval: Interval = over_prompts(known)
        bounds = "needs two prompts" if math.isnan(interval.low) else f"{interval.low:.3f} to {interval.high:.3f}"
        drawn.add_row(name, f"{interval.mean:.3f}", bounds)
    return drawn
