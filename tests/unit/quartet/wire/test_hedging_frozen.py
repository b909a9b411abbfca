"""Serve's own router goes on sending to a replica that stands still: the reason for `attempt_s` and for the second
that `quartet up` lets it remember queue lengths. Should this fail, read "What clients do" in docs/services.md."""

import asyncio
from typing import Any

import pytest
from ray.serve._private.common import DeploymentHandleSource, DeploymentID, ReplicaID
from ray.serve._private.request_router.common import ReplicaQueueLengthCache
from ray.serve._private.request_router.pow_2_router import PowerOfTwoChoicesRequestRouter

from orchestrator.deployment.head import _environment
from tests.unit.waiting import until

REMEMBERED_S = float(_environment()["RAY_SERVE_QUEUE_LENGTH_CACHE_TIMEOUT_S"])
DEPLOYMENT = DeploymentID("Reward", "judge")


class Replica:
    """A replica as the router sees it; a frozen one answers nothing."""

    node_id, availability_zone = "node", None
    multiplexed_model_ids: frozenset[str] = frozenset()
    max_ongoing_requests = 256

    def __init__(self, name: str) -> None:
        self.replica_id = ReplicaID(name, DEPLOYMENT)
        self.frozen = False

    async def get_queue_len(self, *, deadline_s: float) -> int:
        if self.frozen:
            await asyncio.sleep(60)
        return 0


class Fleet:
    """Two replicas behind Serve's router, on a clock of its own that stands still."""

    def __init__(self) -> None:
        self.now = 0.0
        self.router: Any = PowerOfTwoChoicesRequestRouter(
            deployment_id=DEPLOYMENT,
            handle_source=DeploymentHandleSource.REPLICA,
            use_replica_queue_len_cache=True,
            get_curr_time_s=lambda: self.now,
        )
        self.router._replica_queue_len_cache = ReplicaQueueLengthCache(
            staleness_timeout_s=REMEMBERED_S, get_curr_time_s=lambda: self.now
        )
        self.replicas = [Replica("a"), Replica("b")]

    async def start(self) -> None:
        """Tells the router of the replicas; returns when it has asked them for the lengths of their queues."""
        self.router.update_replicas(self.replicas)
        known = self.router._replica_queue_len_cache
        await until(lambda: all(known.get(replica.replica_id) is not None for replica in self.replicas))

    async def send(self) -> Replica:
        """Sends a call; where it went."""
        while True:
            [candidates] = await self.router.choose_replicas(self.replicas)
            chosen = await self.router._select_from_candidate_replicas(candidates, 0)
            if chosen is not None:
                self.router.on_send_request(chosen.replica_id)
                return chosen  # type: ignore[no-any-return]

    def answered(self, replica: Replica) -> None:
        self.router.decrement_queue_len_cache(replica.replica_id)


@pytest.fixture
async def fleet() -> Fleet:
    fleet = Fleet()
    await fleet.start()
    return fleet


async def test_the_second_attempt_goes_elsewhere_while_the_first_is_pending(fleet: Fleet) -> None:
    for _ in range(20):
        stalled = await fleet.send()
        stalled.frozen = True
        # Answers of the other one in the meantime keep nothing from being remembered for long.
        other = await fleet.send()
        assert other is not stalled
        fleet.answered(other)
        fleet.now += 5
        assert await fleet.send() is not stalled
        stalled.frozen = False
        fleet.now += 5
        for replica in fleet.replicas:
            fleet.router.on_new_queue_len_info(replica.replica_id, 0)


async def test_a_replica_that_answers_nothing_gets_no_calls_once_its_queue_is_forgotten(fleet: Fleet) -> None:
    frozen, well = fleet.replicas
    frozen.frozen = True
    fleet.now += REMEMBERED_S + 0.1
    assert [await fleet.send() for _ in range(30)] == [well] * 30
    fleet.now += 600
    assert [await fleet.send() for _ in range(30)] == [well] * 30


async def test_until_then_it_gets_some(fleet: Fleet) -> None:
    frozen, _ = fleet.replicas
    frozen.frozen = True
    assert frozen in [await fleet.send() for _ in range(30)]
