"""Runs under faults, one after the other on one quartet."""

import itertools
import math
import time
from collections.abc import AsyncIterator
from typing import Any

from orchestrator.deployment.redeployment import fixed
from tests.chaos.driver import Driver, Outcome, Say
from tests.chaos.plan import LED, faults
from tests.chaos.run import ChaosRun
from tests.cluster import Quartet

TWICE = ("rollout", "reward", "reference")
"""Services that have two replicas; the critic has one."""


def doubled(raw: dict[str, Any]) -> None:
    """Gives each service that may have two replicas two, in a deployment file."""
    for application in raw["applications"]:
        if application["name"] in TWICE:
            application["deployments"][0] |= fixed(2)


async def campaign(
    quartet: Quartet,
    seed: int,
    count: int,
    each: int,
    staleness: int,
    say: Say,
    *,
    first: int = 0,
    until: float = math.inf,
) -> AsyncIterator[Outcome]:
    """The outcome of each run from number `first` on; all runs together have `count` faults. None begins, and
    no fault comes, after the moment `until`."""
    hit: set[int] = set()
    for number, planned in enumerate(faults(seed, count, each)):
        if number < first or time.monotonic() > until:
            continue
        driver = Driver(ChaosRun(quartet, f"chaos-{seed}-{staleness}-{number}", staleness), say, hit)
        driver.leading = frozenset(
            before.number for before, after in itertools.pairwise(planned) if after.moment in (*LED, "new")
        )
        outcome = await driver.drive(planned, staleness, until)
        say(f"run {number}: {len(outcome.struck)} faults, {outcome.steps} steps, {len(outcome.problems)} problems")
        yield outcome
