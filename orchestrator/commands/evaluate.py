"""`quartet evaluate`: evaluates a model on a split, scored by the deployed reward service."""

import asyncio
import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from rich.table import Table

from orchestrator.clients import Services, check_models, check_scores
from orchestrator.commands.checks.agents import agent_of, await_door, sessions_of
from orchestrator.commands.checks.fitting import ends_without_token
from orchestrator.commands.checks.outdated import behind_files_of_run
from orchestrator.commands.checks.preflight import environment_of, evaluation_prompts, load_judges
from orchestrator.commands.offline import OfflineRollout
from orchestrator.commands.patience import patience_of, reached
from orchestrator.commands.run_folder import RUNS, policy_folder
from orchestrator.config.data import EVAL
from orchestrator.config.run import OrchestratorConfig
from orchestrator.data.prompts import load_prompts
from orchestrator.deployment.file import Deployment
from orchestrator.evaluation.evaluator import evaluate_samples
from orchestrator.evaluation.intervals import over_known
from orchestrator.evaluation.results import EvaluatedSample, write_rows
from orchestrator.experience.agents import Agents
from orchestrator.experience.answers import Answers
from orchestrator.experience.collector import Collector
from orchestrator.experience.requests import evaluation_requests
from orchestrator.policy.sampled import sampled_from
from protos import rollout_pb2
from quartet.config.base import ConfigError
from quartet.folders import unusable
from quartet.models.loading import load_tokenizer
from quartet.wire.backoff import Deadline
from quartet.wire.callers import Purpose
from quartet.wire.errors import Unavailable
from services.rollout.client import RolloutClient

CURRENT = "current"
ALIKE_S = 10
"""Longest wait for all rollout replicas to serve the same weights, which they do but for moments of a push."""
LOOK_S = 1
"""Seconds between two looks at that."""
LONGEST_NAME = 100
"""Most characters of a model's path, the last ones, in the name of a file, which file systems limit."""


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
        rows = self.rows
        caption = f"{len(rows)} samples, written to {self.path}"
        if unscored := sum(math.isnan(row.score) for row in rows):
            caption += f"; {unscored} have no score"
        drawn = Table(title=self.title, caption=caption, title_justify="left")
        drawn.add_column("measure")
        drawn.add_column("mean", justify="right")
        drawn.add_column("95 % interval", justify="right")
        columns = {f"score ({self.scorer})": [row.score for row in rows]}
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
        for name, values in columns.items():
            interval = over_known([(row.row, value) for row, value in zip(rows, values, strict=True)])
            if interval is None:
                drawn.add_row(name, "–", "no sample has one")
                continue
            bounds = "needs two prompts" if math.isnan(interval.low) else f"{interval.low:.3f} to {interval.high:.3f}"
            drawn.add_row(name, f"{interval.mean:.3f}", bounds)
        return drawn


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
        output: the JSONL file; None: that of `default_output`.
        connect: makes the clients.
        note: called with messages for the user.

    Raises:
        ConfigError: the model or split does not exist, a model or service has another tokenizer, or the samples could
            not be written.
        Unavailable: the services are not up.
        ServiceError: a service fails or takes too long.
    """
    config = deployment.orchestrator
    split = split or config.data.eval_split or EVAL
    path = output or default_output(config.name, model, split)
    if path.is_dir():
        raise ConfigError(f"--output: {path} is a folder; name a file in it")
    if problem := unusable(path.parent):
        raise ConfigError(f"--output: {path} cannot be written: {problem}")
    with deployment.naming():
        tokenizer = load_tokenizer(config.policy.model)
        judges, environment, agent = load_judges(config), environment_of(config), agent_of(config)
        tools = () if environment is None else environment.tools
        prompts = evaluation_prompts(load_prompts(config.data, tokenizer, split, tools=tools), config)
    sampled = sampled_from(config, tokenizer)
    for problem in ends_without_token(config, sampled):
        raise ConfigError(problem)
    answers = Answers.of(environment, config, tokenizer, sampled.end_ids)
    if agent is not None and model != CURRENT:
        raise ConfigError(
            f"orchestrator.agent: speaks with the rollout service, which does not serve {model}; give {CURRENT}, or "
            "deploy a file with this model"
        )
    offline = None if model == CURRENT else OfflineRollout.of(model, deployment, tokenizer)
    services = connected = connect(config, Purpose.EVALUATION)
    try:
        patience = patience_of(deployment, note)
        await reached(services, deployment, patience)
        taking_part = {"reward", "reference"} | ({"rollout"} if offline is None else set())
        infos = await patience(partial(services.infos_of, taking_part))
        check_models({name: info.model for name, info in infos.items()}, tokenizer, config)
        check_scores(infos["reward"], config)
        for line in behind_files_of_run(deployment, infos):
            note(deployment.worded(line))
        if offline is not None:
            services = replace(services, rollout=offline)  # type: ignore[arg-type]
        oldest = await served(services.rollout, config) if offline is None else 0
        requests = evaluation_requests(config, prompts)
        async with nullcontext() if offline is None else offline.running(), sessions_of(deployment) as sessions:
            await await_door(sessions)
            agents = Agents.of(agent, config, sessions, services.rollout, Purpose.EVALUATION)
            collector = Collector(services, config, sampled.end_ids, answers=answers, agents=agents, note=note)
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
        f"{policy_folder(config)}, or go on with the run, which pushes its weights to all"
    )


def _weights(report: rollout_pb2.WeightReport) -> str:
    return f"version {report.policy_version}" if report.timeline else "its model's own"


def default_output(run: str, model: str, split: str) -> Path:
    """The file of an evaluation's samples, with the model's whole path in its name: the policies before and after a
    run are folders of the same name."""
    return RUNS / run / f"evaluate-{_plain(model)[-LONGEST_NAME:]}-{_plain(split)}.jsonl"


def _plain(text: str) -> str:
    return "".join(character if character.isalnum() else "_" for character in text)
