"""Putting a run together: the loop's collaborators, made from the configuration."""

import os
from pathlib import Path

import ray

from orchestrator.admission import admissions
from orchestrator.cluster import running
from orchestrator.config import OrchestratorConfig
from orchestrator.data import PromptStream
from orchestrator.deployment import Deployment
from orchestrator.evaluation import Evaluator
from orchestrator.experience import Collector
from orchestrator.metrics import MetricsLog
from orchestrator.policy_actor import Policy
from orchestrator.preflight import Inputs, evaluation_prompts, preflight
from orchestrator.progress import Progress
from orchestrator.services import Infos, Services, check_compatible
from orchestrator.trainer import Start, Trainer
from orchestrator.weights import WeightPusher
from services.common.config import ConfigError

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


async def train(deployment: Deployment, progress: Progress, *, overwrite: bool = False) -> Path:
    """One PPO run, start to end; the run's folder.

    Everything that can be wrong with the input is found before the policy learner starts.

    Raises:
        ConfigError: the configuration, the data or the services do not fit together.
        ServiceError, PolicyError: a service or the learner failed beyond what is repeated.
    """
    config = deployment.orchestrator
    inputs = preflight(deployment)
    services = Services.connect(config.target)
    run_dir = RUNS / config.name
    try:
        await services.reach(config.target, deployment.path, config.timeouts.info_s)
        infos = await services.infos(config.timeouts.info_s)
        check_compatible(infos, inputs.tokenizer, config)
        _tell(progress, inputs, infos)
        connect_ray()
        with MetricsLog.open(run_dir, config.log, deployment.raw, overwrite=overwrite) as log:
            policy = await Policy.start(config)
            try:
                pusher = WeightPusher(services.rollout, policy, infos.rollout.weight_backend, config.weights)
                prompts = PromptStream(inputs.train.prompts, config.batch_size, config.seed)
                evaluator = _evaluator(config, services, inputs, run_dir)
                trainer = Trainer(config, services, policy, pusher, prompts, evaluator, log, progress)
                start = Start(infos.rollout.policy_version, infos.critic.last_step)
                async with admissions(pusher, services.rollout.application):
                    # The learner's process has a working directory of its own.
                    await trainer.run(start, Path(config.save or run_dir / "policy").resolve())
            finally:
                policy.stop()
                ray.shutdown()
    finally:
        await services.close()
    return run_dir


def _tell(progress: Progress, inputs: Inputs, infos: Infos) -> None:
    """What a user should know before the run, though none of it is an error."""
    for note in inputs.notes:
        progress.note(note)
    if infos.critic.last_step:
        progress.note(
            f"the critic was trained for {infos.critic.last_step} steps before; "
            "for a fresh one, `quartet down` and `quartet up`"
        )


def _evaluator(config: OrchestratorConfig, services: Services, inputs: Inputs, run_dir: Path) -> Evaluator | None:
    if inputs.held_out is None:
        return None
    return Evaluator(
        Collector(services, config),
        evaluation_prompts(inputs.held_out, config),
        inputs.tokenizer,
        inputs.judges,
        run_dir / "evaluations",
        config.evaluation.samples_per_prompt,
    )
