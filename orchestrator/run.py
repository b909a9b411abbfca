"""Putting a run together: the loop's collaborators, made from the configuration."""

import os
import time
from pathlib import Path
from typing import Any

import ray

from orchestrator.cluster import running
from orchestrator.config import OrchestratorConfig
from orchestrator.data import PromptSet, PromptStream, check_disjoint, load_prompts
from orchestrator.deployment import Deployment
from orchestrator.evaluation import Evaluator, Judge
from orchestrator.experience import Collector
from orchestrator.metrics import MetricsLog
from orchestrator.policy_actor import Policy
from orchestrator.progress import Progress
from orchestrator.services import Services, check_compatible
from orchestrator.trainer import Start, Trainer
from orchestrator.weights import WeightPusher
from services.common.config import ConfigError
from services.common.functions import load_function
from services.common.models import load_tokenizer

RUNS = Path("runs")


def connect_ray() -> None:
    """Joins the cluster of RAY_ADDRESS, or the one that this folder's `quartet up` started.

    Raises:
        ConfigError: there is neither.
    """
    cluster = running()
    address = os.environ.get("RAY_ADDRESS") or (cluster.address if cluster else None)
    if address is None:
        raise ConfigError("no Ray cluster: run `quartet up` here first, or set RAY_ADDRESS")
    ray.init(address=address, log_to_driver=False, logging_level="ERROR")


def load_judges(config: OrchestratorConfig) -> dict[str, Judge]:
    """The evaluation's judges by name. ConfigError if one cannot be imported."""
    return {name: load_function(path) for name, path in config.evaluation.judges.items()}


def load_splits(config: OrchestratorConfig, tokenizer: Any) -> tuple[PromptSet, PromptSet | None]:
    """Training prompts, and those for evaluation unless it is off. ConfigError on anything wrong with them."""
    train = load_prompts(config.data, tokenizer, config.data.prompt_split)
    if not config.evaluation.every:
        return train, None
    held_out = load_prompts(config.data, tokenizer, config.data.eval_split)
    check_disjoint(train, held_out)
    return train, held_out


def evaluation_prompts(held_out: PromptSet, config: OrchestratorConfig) -> list[Any]:
    """Those of the held-out prompts that are used."""
    return list(held_out.prompts[: config.evaluation.max_prompts])


async def train(deployment: Deployment, progress: Progress, *, overwrite: bool = False) -> Path:
    """One PPO run, start to end; the run's folder.

    Everything that can be wrong with the input is found before the policy learner starts.
    """
    config = deployment.orchestrator
    began = time.monotonic()
    tokenizer = load_tokenizer(config.policy.model)
    train_set, held_out = load_splits(config, tokenizer)
    judges = load_judges(config)
    services = Services.connect(config.target)
    run_dir = RUNS / config.name
    try:
        infos = await services.infos(config.timeouts.info_s)
        check_compatible(infos, tokenizer, config)
        if train_set.too_long:
            progress.note(f"{train_set.too_long} prompts are longer than data.max_prompt_length and left out")
        if infos.critic.last_step:
            progress.note(
                f"the critic was trained for {infos.critic.last_step} steps before; "
                "for a fresh one, `quartet down` and `quartet up`"
            )
        with MetricsLog.open(run_dir, config.log, deployment.raw, overwrite=overwrite) as log:
            connect_ray()
            policy = await Policy.start(config)
            progress.note(f"policy learner ready after {time.monotonic() - began:.0f} s")
            try:
                pusher = WeightPusher(services.rollout, policy, infos.rollout.weight_backend, config.weights)
                trainer = Trainer(
                    config,
                    services,
                    policy,
                    pusher,
                    PromptStream(train_set.prompts, config.batch_size, config.seed),
                    _evaluator(config, services, held_out, tokenizer, judges, run_dir),
                    log,
                    progress,
                )
                start = Start(infos.rollout.policy_version, infos.critic.last_step)
                await trainer.run(start, Path(config.save or run_dir / "policy"))
            finally:
                policy.stop()
                ray.shutdown()
    finally:
        await services.close()
    return run_dir


def _evaluator(
    config: OrchestratorConfig,
    services: Services,
    held_out: PromptSet | None,
    tokenizer: Any,
    judges: dict[str, Judge],
    run_dir: Path,
) -> Evaluator | None:
    if held_out is None:
        return None
    return Evaluator(
        Collector(services, config),
        evaluation_prompts(held_out, config),
        tokenizer,
        judges,
        run_dir / "evaluations",
        config.evaluation.samples_per_prompt,
    )
