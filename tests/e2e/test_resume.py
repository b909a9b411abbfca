"""Runs that are killed, or that lose a learner: `quartet train` and the services, and processes really killed."""

import asyncio
import contextlib
import shutil
import time
from collections.abc import Iterator
from functools import partial

import psutil
import pytest
from safetensors.torch import load_file

from orchestrator.loop.checkpoint_folder import latest
from protos import rollout_pb2 as pb
from quartet.folders import MARKER
from tests.cluster import Quartet, engine_of, eventually, named, rollouts
from tests.commands import PATIENCE_S, finished
from tests.runs import STEPS, Run, assert_same

CRITIC_ONLY = 3


@pytest.fixture(scope="module")
def straight(quartet: Quartet) -> Run:
    """A run that nothing happened to, whose critic learns alone until past its first checkpoint."""
    run = Run(quartet, "straight", critic_only_steps=CRITIC_ONLY)
    run.finish()
    assert run.steps() == list(range(1, STEPS + 1))
    return run


@pytest.fixture
def again(quartet: Quartet, straight: Run) -> Iterator[Run]:
    """A run that begins as the other did, with the same policy, critic and samples."""
    run = Run(quartet, "again", critic_only_steps=CRITIC_ONLY)
    run.take_samples(straight)
    yield run
    run.end()
    run.log.unlink(missing_ok=True)
    shutil.rmtree(run.folder)


async def versions(quartet: Quartet) -> list[int]:
    reports = await quartet.services.rollout.update_weights(10, discover=pb.Discover())
    return [report.policy_version for report in reports]


def test_a_checkpoint_holds_the_policy_as_it_was_exported(straight: Run) -> None:
    folder = straight.folder / "checkpoints" / f"step-{STEPS:06d}" / "policy" / "model"
    actual, wanted = (load_file(path / "model.safetensors") for path in (folder, straight.folder / "policy"))
    assert actual.keys() == wanted.keys()
    assert all((actual[name] == wanted[name]).all() for name in wanted)
    exported = {path.name for path in (straight.folder / "policy").iterdir()} - {MARKER}
    assert {path.name for path in folder.iterdir()} == exported


async def test_a_run_killed_in_a_checkpoint_and_at_a_step_ends_as_one_that_was_not(
    quartet: Quartet, straight: Run, again: Run
) -> None:
    checkpoints = again.folder / "checkpoints"
    written = checkpoints / "step-000004"
    again.killed(lambda: any(checkpoints.glob(".step-000004.*.writing/policy/*")) or written.exists(), "--resume")
    # Whole, or not there.
    last_whole = latest(checkpoints)
    assert last_whole is not None
    assert last_whole.state.step in (2, 4)
    again.killed(again.reached(7), "--resume")
    began = time.monotonic()
    again.finish("--resume")
    print(f"resumed from step 6 and finished in {time.monotonic() - began:.1f} s")
    assert_same(again, straight)
    last = int(straight.measured()[-1]["policy/version"])
    assert await versions(quartet) == [last, last]
    assert straight.measured()[-1]["samples/used_total"] == STEPS * 16


async def timelines(quartet: Quartet) -> list[int]:
    """The number of the lease that was claimed last, and the timelines of what critic and rollout replicas hold."""
    reports = await quartet.services.rollout.update_weights(10, discover=pb.Discover())
    critic = await quartet.critic.info(30)
    return [critic.held.lease.number, critic.timeline, *(report.timeline for report in reports)]


async def test_a_run_goes_on_when_it_loses_its_learners(quartet: Quartet, straight: Run, again: Run) -> None:
    """A sender in the middle of a push, then the critic's replica: the run restores both learners by itself.

    The push is held up by an engine that stands still. All samples are in the journal: nothing else needs it.
    """
    before = (await timelines(quartet))[0]
    engine = psutil.Process(engine_of(next(iter(rollouts(quartet).values()))))
    process = again.start("--resume")
    again.wait(again.reached(3), process)
    rank = named(quartet, "ray::PolicyRank")
    engine.suspend()
    try:
        await eventually(partial(updated, quartet, again), PATIENCE_S)
        rank.kill()
        again.wait(again.interrupted(1), process)
    finally:
        engine.resume()
    critic = named(quartet, "ray::ServeReplica:critic")
    again.wait(again.reached(5), process)
    critic.kill()
    again.wait(again.interrupted(2), process)
    assert await asyncio.to_thread(process.wait, PATIENCE_S) == 0
    assert_same(again, straight)
    # One for the process, and one for each return to a checkpoint: by --resume, and after each loss.
    assert await timelines(quartet) == [before + 4] * 4
    last = int(straight.measured()[-1]["policy/version"])
    assert await versions(quartet) == [last, last]


async def updated(quartet: Quartet, run: Run) -> bool:
    """True once the run has trained a step that is not measured, as its weights have to be pushed first."""
    begun = latest(run.folder / "checkpoints")
    assert begun is not None
    assert begun.state.first_critic_step is not None
    return (await quartet.critic.info(30)).last_step > begun.state.first_critic_step + run.steps()[-1]


async def ended(process: psutil.Process) -> bool:
    """True once the process is gone; Ray ends a frozen one 5 s after it asked it to end, so a run can be faster."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.status() == psutil.STATUS_ZOMBIE
    return True


@pytest.mark.exhaustive  # which processes are ended: tests/unit/orchestrator/commands/test_halted.py
@pytest.mark.parametrize("title", ["ray::ServeReplica:critic", "ray::ProxyActor"])
async def test_a_process_of_serves_that_stands_still_is_replaced(
    quartet: Quartet, straight: Run, again: Run, title: str
) -> None:
    """SIGSTOP. The run ends it, as there is only one of its kind. The test prints what that cost."""
    process = again.start("--resume")
    again.wait(again.reached(3), process)
    frozen = named(quartet, title)
    frozen.suspend()
    began = time.monotonic()
    await eventually(partial(ended, frozen), PATIENCE_S)
    ended_s = time.monotonic() - began
    again.wait(again.reached(5), process)
    print(f"{title} was ended after {ended_s:.1f} s, two more steps were done after {time.monotonic() - began:.1f} s")
    assert ended_s < 30  # before Serve would have, with the time that a busy machine may take
    assert await asyncio.to_thread(process.wait, PATIENCE_S) == 0
    assert_same(again, straight)


@pytest.mark.exhaustive  # in `make test` it dies there
async def test_a_learner_frozen_in_a_push_is_given_up(quartet: Quartet, straight: Run, again: Run) -> None:
    """The replicas' connections to it stay open, and a bucket may take a minute to come."""
    with again.changing() as raw:
        raw["orchestrator"]["weights"] = {"timeout_s": 60, "stall_s": 60, "attempts": 2}
    engine = psutil.Process(engine_of(next(iter(rollouts(quartet).values()))))
    process = again.start("--resume")
    again.wait(again.reached(3), process)
    frozen = named(quartet, "ray::PolicyRank")
    engine.suspend()
    try:
        await eventually(partial(updated, quartet, again), PATIENCE_S)
        frozen.suspend()
    finally:
        engine.resume()
    again.wait(again.interrupted(1), process)
    assert await asyncio.to_thread(process.wait, PATIENCE_S) == 0
    await eventually(partial(ended, frozen), PATIENCE_S)
    assert_same(again, straight)


async def test_what_cannot_be_resumed_is_said(quartet: Quartet, straight: Run, again: Run) -> None:
    """The critic stays as it was: it is asked to restore only what the policy can restore too."""
    code, told = finished(quartet.folder, "train", str(straight.config))
    assert code == 1
    assert "already holds checkpoints; choose another name, --resume them, or --overwrite" in told.replace("\n", " ")
    with again.changing() as raw:
        raw["orchestrator"]["policy"] |= {"zero_stage": 1}
    trained = (await quartet.critic.info(30)).last_step
    assert trained > 0
    code, told = finished(quartet.folder, "train", str(again.config), "--resume")
    assert code == 1
    message = "orchestrator.policy: a checkpoint of another layout: zero_stage: 0 in the checkpoint, 1 here"
    assert message in told.replace("\n", " ")
    with again.changing() as raw:
        raw["orchestrator"]["policy"] |= {"zero_stage": 0}
        raw["orchestrator"]["algorithm"] |= {"samples_per_prompt": 2}
    (again.folder / "config.yaml").write_text(straight.config.read_text())
    code, told = finished(quartet.folder, "train", str(again.config), "--resume")
    assert code == 1
    assert "orchestrator.algorithm.samples_per_prompt: 2, but the run began with 1" in told.replace("\n", " ")
    assert (await quartet.critic.info(30)).last_step == trained
