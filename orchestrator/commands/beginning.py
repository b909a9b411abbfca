"""The checkpoint that a run resumes from, and the state that it starts with."""

import asyncio
import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from orchestrator.algorithms.registry import parse
from orchestrator.clients import Infos
from orchestrator.commands.run_folder import check_untrained, checkpoint_folder, differences
from orchestrator.config.run import OrchestratorConfig
from orchestrator.deployment.file import Deployment
from orchestrator.deployment.record import record
from orchestrator.learners import Learner
from orchestrator.loop.checkpoint_folder import Checkpoint, latest
from orchestrator.loop.identities import PartIdentity, changes
from orchestrator.loop.state import TrainState
from orchestrator.policy.ranks import Policy
from quartet.config.base import ConfigError, read_yaml
from quartet.config.learner import PolicyConfig
from quartet.learner.layout import LAYOUT, Layout
from quartet.wire.errors import InvalidArgument, leaves

CRITIC = "critic.model"
"""Place of the critic's model among the services' identities."""


def to_resume(run_dir: Path, deployment: Deployment, note: Callable[[str], None]) -> Checkpoint[TrainState] | None:
    """The last checkpoint, if there is one; tells the user where the run resumes.

    Raises:
        ConfigError: the run cannot resume from it, or was trained and has none.
    """
    config, folder = deployment.orchestrator, checkpoint_folder(deployment.orchestrator)
    checkpoint = latest(folder)
    if checkpoint is None:
        check_untrained(run_dir, folder)
        note(f"{run_dir} has no checkpoint yet: beginning at step 1")
        return None
    step, steps = checkpoint.state.step, config.steps
    if step > steps:
        raise ConfigError(
            f"orchestrator.steps: {steps}, but the last checkpoint is of step {step}; give {step} or more"
        )
    check_layout(checkpoint.folder / Policy.name, config.policy)
    if step == steps:
        note(f"{run_dir} is finished, at step {step}; its policy is written again, and more steps go on")
    else:
        note(f"resuming {run_dir} after step {step} of {steps}")
    kept = run_dir / "config.yaml"
    if kept.exists():
        before = record(read_yaml(kept))
        check_groups(before, config.algorithm.samples_per_prompt)
        for line in differences(before, deployment.record):
            note(deployment.worded(line))
    return checkpoint


def how_to_resume(deployment: Deployment) -> str:
    """A line for a user who has interrupted a run: where it stands, and the command that continues it."""
    config, path = deployment.orchestrator, shlex.quote(str(deployment.path))
    try:
        checkpoint = latest(checkpoint_folder(config))
    except ConfigError:
        checkpoint = None
    if checkpoint is None:
        return f"interrupted before the first checkpoint; `quartet train {path} --overwrite` begins again"
    return (
        f"interrupted; the last checkpoint is of step {checkpoint.state.step} of {config.steps}: "
        f"`quartet train {path} --resume` continues there"
    )


def check_groups(before: Mapping[str, Any], wanted: int) -> None:
    """Raises ConfigError if samples_per_prompt changed: it decides which prompt a sample's number belongs to."""
    actual = parse(before["orchestrator"].get("algorithm")).samples_per_prompt
    if actual != wanted:
        raise ConfigError(
            f"orchestrator.algorithm.samples_per_prompt: {wanted}, but the run began with {actual}, and samples of "
            "different prompts would share a group: resume with the same number, or begin another run"
        )


def first_state(
    config: OrchestratorConfig, infos: Infos, parts: Mapping[str, PartIdentity], note: Callable[[str], None]
) -> TrainState:
    """The state of a new run, with the services in their present state, and the identities of all parts."""
    critic_step = infos.critic.last_step if infos.critic else None
    if critic_step:
        note(
            f"the critic has been trained for {critic_step} steps already; for a fresh one, start it again: "
            "`quartet down` and `quartet up`, or on a cluster of your own `serve deploy` a file without it, and then "
            "this one"
        )
    return TrainState(
        step=0,
        first_version=infos.rollout.policy_version + 1,
        first_critic_step=critic_step,
        services=dict(parts),
    )


def resumed_state(
    state: TrainState, services: Mapping[str, PartIdentity], *, accept: bool, note: Callable[[str], None]
) -> TrainState:
    """A checkpoint's state with the present identities of the services.

    Raises:
        ConfigError: the services or the environment have changed since the checkpoint, and `accept` is False; or the
            run has a critic and the checkpoint holds none.
    """
    changed = changes(state.services, services)
    if changed and not accept:
        raise ConfigError(
            "\n".join(changed)
            + "\nthe run would continue with other services or another environment: bring the old ones back, or "
            "give --accept-changed-services; then the steps since the checkpoint are sampled and scored again"
        )
    for line in changed:
        note(f"accepted: {line}")
    if CRITIC not in services:
        return state.model_copy(update={"services": dict(services), "first_critic_step": None})
    if state.first_critic_step is None:
        raise ConfigError(
            "orchestrator.algorithm.kind: this one takes a critic's values, and the checkpoint is of a run without; "
            "set it to what it was, or begin again with --overwrite"
        )
    return state.model_copy(update={"services": dict(services)})


def check_layout(folder: Path, config: PolicyConfig) -> None:
    """Raises ConfigError unless a policy of this configuration can resume from the snapshot in `folder`.

    Comes before the critic restores, since a failure after that would have cost the critic its training.
    """
    try:
        saved = Layout.read(folder / LAYOUT)
        saved.check(Layout.of(config, saved.parameters, saved.step))
    except InvalidArgument as error:
        raise ConfigError(
            f"{folder.parent} cannot be restored: orchestrator.policy: {error}. "
            "If it is broken, remove it to resume from the one before"
        ) from None


async def restore(learners: Sequence[Learner], checkpoint: Checkpoint[TrainState]) -> None:
    """Brings all learners back to the checkpoint.

    Raises:
        ConfigError: it does not hold the state of one of them.
    """
    try:
        async with asyncio.TaskGroup() as group:
            for learner in learners:
                group.create_task(learner.restore(checkpoint.folder))
    except* InvalidArgument as group_:
        reason = "; ".join(str(leaf) for leaf in leaves(group_))
        raise ConfigError(
            f"{checkpoint.folder} cannot be restored: {reason}. "
            "If it is broken, remove it to resume from the one before"
        ) from None
