"""Checks that a run's pushes, checkpoints and schedules fit the file's services; each contradiction is a line."""

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path

from orchestrator.algorithms.contract import BANDED
from orchestrator.algorithms.registry import kinds
from orchestrator.clients import unlike_backends
from orchestrator.commands.run_folder import checkpoint_folder, policy_folder
from orchestrator.config.run import OrchestratorConfig
from orchestrator.config.weights import WeightsConfig
from orchestrator.deployment.file import Deployment, ServicesFile
from orchestrator.environments.agent import RESULT
from quartet.config.base import ConfigError
from quartet.config.learner import PolicyConfig
from quartet.folders import unreplaceable
from quartet.models.device import VISIBLE
from quartet.models.distribution import Distribution, end_ids
from quartet.models.loading import load_tokenizer, shape_of_causal
from quartet.security.port import on_loopback
from quartet.weight_transfer.expected import ExpectedWeights
from quartet.weight_transfer.manifest import Manifest
from quartet.wire.errors import InvalidArgument
from quartet.wire.identity import model_hash
from services.critic.config import CriticConfig
from services.reward.config import RewardConfig, field_of, parts_of
from services.reward.names import chosen
from services.rollout.config import RolloutConfig


def misfits_of_rollout(config: OrchestratorConfig, section: RolloutConfig, name: str) -> Iterator[str]:
    """Reasons for which a push to these replicas would fail."""
    yield from _other_weights(config.policy, section, name)
    yield from _other_adapters(config, section, name)
    yield from _other_ends(config, section, name)
    yield from _too_long_phases(config.weights, section, name)
    yield from unlike_backends(config, section.weight_backend, f"applications.{name}.args.weight_backend")
    if config.loop.colocate != section.colocate:
        yield (
            f"applications.{name}.args.colocate: {str(section.colocate).lower()}, but orchestrator.loop.colocate is "
            f"{str(config.loop.colocate).lower()}; both must be the same"
        )


def _other_weights(policy: PolicyConfig, section: RolloutConfig, name: str) -> Iterator[str]:
    """Differences between the policy's weights and the replicas', compared without loading either model."""
    if section.model == policy.model or section.dtype != policy.dtype:
        return
    try:
        pushed = dict(shape_of_causal(policy.model, policy.dtype).named_parameters())
        expected = ExpectedWeights(shape_of_causal(section.model, section.dtype), section.dtype)
        expected.check(Manifest.of(pushed, 1))
    except ConfigError:
        return  # reported by the check of models
    except InvalidArgument as error:
        yield (
            f"applications.{name}.args.model: {section.model} cannot take the weights of orchestrator.policy.model "
            f"({policy.model}); {error}"
        )


def _other_adapters(config: OrchestratorConfig, section: RolloutConfig, name: str) -> Iterator[str]:
    """Adapters that the replicas expect and the run does not push, or the reverse, or those of another model."""
    where, pushed = f"applications.{name}.args", config.pushed_adapters
    ours, theirs = (
        None if lora is None else lora.model_dump(include={"rank", "target_modules"})
        for lora in (pushed, section.adapters)
    )
    if ours != theirs:
        yield (
            f"{where}.adapters: {json.dumps(theirs)}, but the run pushes {json.dumps(ours)} (policy.lora with "
            "orchestrator.weights.adapters true, else null); both must be the same"
        )
    elif (kept := section.adapter_versions) != (needed := config.adapter_versions):
        yield (
            f"{where}.adapter_versions: {kept}, but the run needs {needed} (one more than "
            "loop.max_staleness with orchestrator.weights.in_flight finish, else 1)"
        )
    elif ours and section.model != config.policy.model and _other_files(section.model, config.policy.model):
        yield (
            f"{where}.model: {section.model} has other weights than orchestrator.policy.model "
            f"({config.policy.model}), and orchestrator.weights.adapters pushes the adapters alone; set both the same"
        )


def _other_files(folder: str, other: str) -> bool:
    """True if the weights in two folders differ; False also if one cannot be read, which is reported elsewhere."""
    with contextlib.suppress(OSError):
        return model_hash(folder) != model_hash(other)
    return False


def _other_ends(config: OrchestratorConfig, section: RolloutConfig, name: str) -> Iterator[str]:
    """A difference between the tokens that end a text for the learner and for the replicas, each by its own folder;
    both leave them out of the distribution until min_new_tokens."""
    if section.model == config.policy.model or not config.sampling.min_new_tokens:
        return
    with contextlib.suppress(ConfigError, OSError, ValueError):  # reported by the check of models
        folders = (config.policy.model, section.model)
        ours, theirs = (
            sorted({*end_ids(folder, load_tokenizer(folder)), *config.sampling.stop_token_ids}) for folder in folders
        )
        if ours != theirs:
            yield (
                f"applications.{name}.args.model: texts of {section.model} end with the tokens {theirs}, but "
                f"those of orchestrator.policy.model ({config.policy.model}) with {ours}; correct eos_token_id "
                "in the generation_config.json of one, as orchestrator.sampling.min_new_tokens leaves these out"
            )


def _too_long_phases(weights: WeightsConfig, section: RolloutConfig, name: str) -> Iterator[str]:
    """Deadlines that exceed the replicas' limit."""
    for field, seconds in (
        ("timeout_s", weights.timeout_s),
        ("commit_s", weights.commit_s),
        ("stall_s + control_s", weights.stall_s + weights.control_s),
    ):
        if seconds > section.max_phase_s:
            yield (
                f"orchestrator.weights.{field}: {seconds:g}, but applications.{name}.args.max_phase_s is "
                f"{section.max_phase_s:g}; lower the first or raise the second"
            )


def misfits_of_critic(config: OrchestratorConfig, section: CriticConfig, name: str) -> Iterator[str]:
    """Reasons for which the critic would take no batch, or no checkpoint, of the run."""
    yield from _other_root(config.checkpoint.root, section.root, name)
    if config.batch_size > (most := section.train_limits.max_call_rows):
        yield (
            f"orchestrator.batch_size: {config.batch_size}, but applications.{name}.args.train_limits.max_call_rows "
            f"is {most}; lower the first or raise the second"
        )


def misfits_of_reward(config: OrchestratorConfig, section: RewardConfig, name: str) -> Iterator[str]:
    """Differences between the scores that the run weighs and those of its scorer, if that is of this application."""
    used = config.services.reward
    if used.target not in (None, config.target) or name != (used.application or "reward"):
        return
    try:
        scorer = chosen(used.scorer, section.hosted)
    except InvalidArgument as error:
        yield f"orchestrator.services.reward.{error}"
        return
    hosted, where = section.hosted[scorer], f"applications.{name}.args"
    if hosted.tokenizer is None:
        yield f"{where}.tokenizer: required, as a run sends token ids; set it to {config.policy.model}"
    field = f"{where}.{field_of(scorer)}"
    yield from config.algorithm.misfits(hosted.scorer.names, field)
    for part_field, part in parts_of(hosted.scorer, field):
        if needed := getattr(part, "needed", None):
            yield from _not_sent(config, part_field, *needed)


def _not_sent(config: OrchestratorConfig, field: str, key: str, column: str) -> Iterator[str]:
    """A column that the run does not send, and without which the scorer at `field`, whose `key` names it, scores
    nothing; an empty one is the label."""
    sent = [*config.data.columns, *([RESULT] if config.agent else [])]
    if not column and config.data.label_key is None:
        yield (
            f"{field}.{key}: the label, but orchestrator.data.label_key names none, so that no response would have a "
            "score; set that to the column of the answers"
        )
    elif column and column not in sent:
        yield (
            f"{field}.{key}: {column!r}, which the run does not send, so that no response would have a score; add it "
            "to orchestrator.data.columns"
        )


def _other_root(ours: str, theirs: str, name: str) -> Iterator[str]:
    """A difference between the run's folder for checkpoints and the critic's."""
    if Path(ours).resolve() != Path(theirs).resolve():
        yield (
            f"orchestrator.checkpoint.root: {ours}, but applications.{name}.args.root is {theirs}; the critic writes "
            "its part of each checkpoint under its root, so both must be the same folder"
        )


def wrong_folders(config: OrchestratorConfig) -> Iterator[str]:
    """Folders that the run could not write: its policy's, at its end; or its critic's in a checkpoint."""
    if problem := unreplaceable(policy_folder(config).resolve(), "policy"):
        yield f"orchestrator.save: {problem}"
    folder, root = checkpoint_folder(config), Path(config.checkpoint.root).resolve()
    if config.services.critic is not None and config.checkpoint.every and not folder.is_relative_to(root):
        yield (
            f"orchestrator.checkpoint.folder: {folder} is not under orchestrator.checkpoint.root, {root}; the critic "
            "writes nowhere else"
        )


def wrong_backend(deployment: Deployment) -> Iterator[str]:
    """A reason for which the configured backend could not work with the GPUs that policy and replicas ask for. What
    only their places can tell is checked before the first push (orchestrator/push/transport.py)."""
    backend, policy = deployment.orchestrator.weights.backend, deployment.orchestrator.policy
    replicas = gpus_of_replicas(deployment)
    if backend not in ("nccl", "cuda-ipc") or replicas is None or VISIBLE in policy.env_vars:
        return
    shared = policy.num_gpus + replicas
    problem = ""
    if not policy.num_gpus:
        problem = "orchestrator.policy.num_gpus is 0, so the learner is on a CPU"
    elif not replicas:
        problem = "the replicas' ray_actor_options have no num_gpus, so they are on a CPU"
    elif backend == "nccl" and shared <= 1:
        problem = (
            f"the policy's num_gpus and a replica's are {shared:g} together: they may share a GPU, which NCCL refuses"
        )
    elif backend == "cuda-ipc" and shared > 1:
        problem = f"the policy's num_gpus and a replica's are {shared:g} together: they never share a GPU"
    if problem:
        yield f"orchestrator.weights.backend: {backend}, but {problem}; set it to auto"


def gpus_of_replicas(deployment: ServicesFile) -> float | None:
    """The share of a GPU that each worker of the rollout asks Ray for. None if the service is not in the file, or its
    GPUs are chosen by hand."""
    for placed in deployment.placed():
        if isinstance(placed.section, RolloutConfig) and VISIBLE not in placed.variables:
            return placed.gpus / placed.section.tensor_parallel_size
    return None


def idle_critics(deployment: Deployment) -> Iterator[str]:
    """Critics in the file of a run that trains none."""
    algorithm = deployment.orchestrator.algorithm
    for name, section in deployment.services.items():
        if isinstance(section, CriticConfig) and not algorithm.needs_critic:
            yield (
                f"applications.{name}: a critic that the run does not use, as orchestrator.algorithm.kind is "
                f"{algorithm.kind}; leave it out to free its memory, or set algorithm.kind to {kinds(critic=True)}"
            )


def other_critics(deployment: Deployment) -> Iterator[str]:
    """Keys of a critic that differ from what the algorithm's kind has for them."""
    algorithm = deployment.orchestrator.algorithm
    for name, section in deployment.services.items():
        if not isinstance(section, CriticConfig) or not algorithm.needs_critic or section.lora:
            continue  # adapters leave all other weights as they are
        for key, published in algorithm.critic_keys.items():
            if (value := getattr(section, key)) != published:
                said, wanted = (json.dumps(each) for each in (value, published))
                yield (
                    f"applications.{name}.args.{key}: {said}, but {wanted} belongs to orchestrator.algorithm.kind "
                    f"{algorithm.kind}; set it, unless the run is to differ"
                )


def ends_without_token(config: OrchestratorConfig, distribution: Distribution) -> Iterator[str]:
    """End ids outside the tokenizer's vocabulary: stop tokens that are never sampled, and ends that min_new_tokens
    could not mask."""
    size = distribution.vocabulary
    if size is None:
        return
    stops = config.sampling.stop_token_ids
    if outside := [str(token) for token in stops if token >= size]:
        yield (
            f"orchestrator.sampling.stop_token_ids: {', '.join(outside)}, but the tokenizer's ids end at {size - 1}, "
            "and no other is sampled"
        )
    outside = [str(token) for token in distribution.end_ids if token >= size and token not in stops]
    if config.sampling.min_new_tokens and outside:
        yield (
            f"orchestrator.sampling.min_new_tokens: {config.sampling.min_new_tokens}, but of the tokens that end a "
            f"text {', '.join(outside)} is not one of the tokenizer's {size}; correct eos_token_id in "
            f"{config.policy.model}/generation_config.json"
        )


def old_tokens(deployment: Deployment) -> Iterator[str]:
    """Settings for tokens of older versions that do nothing, or more than is wanted."""
    config = deployment.orchestrator
    algorithm, loop, mask = config.algorithm, config.loop, "orchestrator.algorithm.max_token_staleness"
    masked = algorithm.max_token_staleness
    if masked is not None and masked >= loop.max_staleness:
        yield f"{mask}: {masked} leaves no token out, as orchestrator.loop.max_staleness is {loop.max_staleness}"
    elif masked is not None and masked < loop.ahead:
        yield (
            f"{mask}: {masked} leaves most tokens out, as batches are sampled {loop.ahead} ahead; give a larger one"
            + (f", or orchestrator.loop.depth {masked}" if masked else "")
        )
    if config.weights.in_flight == "keep-cache" and loop.max_staleness and not algorithm.leaves_out_far_tokens:
        banded = f"correction {' or '.join(BANDED)}, " if algorithm.old_logprobs == "learner" else ""
        yield (
            "orchestrator.weights.in_flight: keep-cache samples tokens under mixed weights, and algorithm.correction "
            f"{algorithm.correction} leaves none out; choose {banded}clip dis or in_flight keep"
        )


def schedules(deployment: Deployment) -> Iterator[str]:
    """Learning-rate schedules that end before or after the run."""
    config = deployment.orchestrator
    learners = {"orchestrator.policy": (config.policy.optimizer, config.optimizer_steps, config.optimizer_steps_said)}
    passes = "epochs" if config.algorithm.epochs_of_critic == config.algorithm.epochs else "critic_epochs"
    of_critic = config.critic_optimizer_steps, f"steps * algorithm.{passes} * minibatches"
    for name, section in deployment.services.items():
        if isinstance(section, CriticConfig):
            learners[f"applications.{name}.args"] = section.optimizer, *of_critic
    for where, (optimizer, steps, said) in learners.items():
        ends = optimizer.total_steps
        if optimizer.schedule == "cosine" and ends not in (None, steps):
            yield f"{where}.optimizer.total_steps: {ends}, but the run has {steps} optimizer steps ({said})"


def rests(deployment: Deployment) -> Iterator[str]:
    """Minibatches that are smaller than the others."""
    run = deployment.orchestrator
    if rest := run.batch_size % run.algorithm.minibatch_size:
        yield (
            f"orchestrator.algorithm.minibatch_size: {run.algorithm.minibatch_size} does not divide batch_size "
            f"{run.batch_size}; the last minibatch of each epoch has {rest} samples"
        )


def rounded_adapters(deployment: Deployment) -> Iterator[str]:
    """Adapters whose small movements are rounded away when they are merged."""
    policy = deployment.orchestrator.policy
    if policy.lora is not None and policy.dtype == "bfloat16" and not deployment.orchestrator.weights.adapters:
        yield (
            "orchestrator.policy.lora: merged into bfloat16 weights for each push, which rounds a part of the "
            "movement away (docs/learner.md); orchestrator.weights.adapters and dtype float32 lose nothing"
        )


def open_pushes(deployment: Deployment) -> Iterator[str]:
    """A push that other machines can reach, by libraries that check no caller."""
    weights = deployment.orchestrator.weights
    host = weights.host or "the policy's node"
    if weights.backend not in ("ipc", "cuda-ipc") and not on_loopback(host):
        yield (
            f"orchestrator.weights.host: every machine and user that reaches {host} can read the weights of "
            "a push and disturb it, as gloo and NCCL encrypt nothing and check no caller; keep it in a network that "
            "you trust, behind a firewall"
        )


def rounded_ratios(deployment: Deployment) -> Iterator[str]:
    """Ratios in which the engine's rounding is not small."""
    run = deployment.orchestrator
    if run.algorithm.old_logprobs == "rollout" and run.policy.dtype != "float32":
        yield (
            "orchestrator.algorithm.old_logprobs: rollout counts the engine's rounding, about 0.01 nats per token in "
            f"{run.policy.dtype}, as a move of the policy; learner leaves it out, for one more pass per step"
        )
