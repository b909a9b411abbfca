"""Two runs that want the same services: one is told, or takes over and the other ends without having changed more."""

import asyncio
import re
from collections.abc import Iterator

import numpy as np
import pytest

from orchestrator.commands.run_folder import RUN_ID
from protos import common_pb2
from protos import rollout_pb2 as pb
from quartet.wire.errors import LeaseLost
from services.critic.client import CriticClient
from services.rollout.client import RolloutClient
from services.rollout.sample import Sampling
from tests.cluster import Quartet
from tests.commands import PATIENCE_S, finished
from tests.runs import Run

PROMPTS = [np.asarray([4, 5], np.int32)]
LONG = 500
"""Steps of a run that is ended long before the last of them."""


def lasting(quartet: Quartet, name: str, steps: int, lease_s: float = 9) -> Run:
    run = Run(quartet, name)
    with run.changing() as raw:
        raw["orchestrator"] |= {"steps": steps, "timeouts": {"lease_s": lease_s}}
    return run


@pytest.fixture
def first(quartet: Quartet) -> Iterator[Run]:
    run = lasting(quartet, "first", LONG)
    yield run
    run.end()


def run_id(run: Run) -> str:
    return (run.folder / RUN_ID).read_text().strip()


async def test_of_two_runs_one_is_told_and_taking_over_ends_the_other(quartet: Quartet, first: Run) -> None:
    process = first.start()
    first.wait(first.reached(1), process)
    second = lasting(quartet, "second", 2)

    code, told = await asyncio.to_thread(finished, quartet.folder, "train", str(second.config))
    assert code == 1
    assert f"run {run_id(first)} is training with these services: stop it first" in " ".join(told.split())
    assert not (second.folder / RUN_ID).exists()
    # The first has not noticed.
    first.wait(first.reached(len(first.steps()) + 1), process)

    code, told = await asyncio.to_thread(finished, quartet.folder, "train", str(second.config), "--take-over")
    assert code == 0, told
    assert await asyncio.to_thread(process.wait, PATIENCE_S) == 1
    log = " ".join(first.log.read_text().split())
    assert re.search(rf"run {run_id(first)} of \w+ \(lease \d", log)
    assert re.search(rf"run {run_id(second)} of \w+ \(lease \d", log)
    assert "Traceback" not in log

    # A late call of the first, as one that was held up in the network.
    rollout, critic = RolloutClient(quartet.channel), CriticClient(quartet.channel)
    critic.lease = rollout.lease = common_pb2.Lease(run_id=run_id(first), number=1)
    last_step = (await critic.info(30)).last_step
    with pytest.raises(LeaseLost, match=f"run {run_id(first)} .* run {run_id(second)} .* nothing was changed"):
        await critic.restore_checkpoint("first/checkpoints/step-000000/critic", 60)
    with pytest.raises(LeaseLost, match=f"run {run_id(first)} .* run {run_id(second)} "):
        await anext(rollout.generate(PROMPTS, Sampling(max_new_tokens=2), max_version=9, timeout_s=60))
    with pytest.raises(LeaseLost, match=f"run {run_id(second)} "):
        await rollout.update_weights(10, commit=pb.Commit(membership=1, policy_version=1))
    info = await critic.info(30)
    assert (info.last_step, info.held.left_s) == (last_step, 0)


@pytest.mark.exhaustive  # leases that end: tests/unit/orchestrator/commands/test_lease.py
async def test_a_crashed_runs_services_are_free_when_its_lease_ends(quartet: Quartet) -> None:
    first = lasting(quartet, "crashing", LONG, lease_s=60)  # longer than it takes to start the next
    first.killed(first.reached(1))
    third = lasting(quartet, "third", 1)
    code, told = await asyncio.to_thread(finished, quartet.folder, "train", str(third.config))
    assert code == 0, told
    assert f"run {run_id(first)} was alive a moment ago" in " ".join(told.split())
