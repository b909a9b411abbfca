"""Calls that change rollout replicas: sent once, and under the lease that was claimed."""

import asyncio
from typing import Any

import grpc
import pytest

from protos import common_pb2
from protos import rollout_pb2 as pb
from protos.rollout_pb2_grpc import RolloutServicer, add_RolloutServicer_to_server
from quartet.wire.errors import (
    DeadlineExceeded,
    LeaseLost,
    Unavailable,
)
from services.rollout.client import RolloutClient
from tests.unit.wire import Script, served


async def test_a_push_phase_is_sent_once_and_reported_by_replica() -> None:
    reports = [pb.WeightReport(replica="a", ok=True), pb.WeightReport(replica="b", error="no")]
    script = Script(pb.WeightReports(reports=reports))
    servicer: Any = RolloutServicer()
    servicer.UpdateWeights = script.answer
    async with served(add_RolloutServicer_to_server, servicer) as channel:
        client = RolloutClient(channel)
        client.lease = lease = common_pb2.Lease(run_id="ours", number=4)
        assert await client.update_weights(9, commit=pb.Commit(membership=1, policy_version=2)) == reports
        script.failures.append(grpc.StatusCode.UNAVAILABLE)
        with pytest.raises(Unavailable, match=r"^rollout.UpdateWeights\(abort\): said the script$"):
            await client.update_weights(9, abort=pb.Abort(membership=1))
    assert script.requests == [
        pb.WeightPhase(timeout_s=9, lease=lease, commit=pb.Commit(membership=1, policy_version=2)),
        pb.WeightPhase(timeout_s=9, lease=lease, abort=pb.Abort(membership=1)),
    ]


async def test_a_claim_is_carried_by_every_phase_after_it_and_a_fenced_one_ends_with_both_runs_named() -> None:
    script = Script(pb.WeightReports(reports=[pb.WeightReport(replica="a", ok=True)]))
    servicer: Any = RolloutServicer()
    servicer.UpdateWeights = script.answer
    lease = common_pb2.Lease(run_id="ours", number=4)
    async with served(add_RolloutServicer_to_server, servicer) as channel:
        client = RolloutClient(channel)
        script.reply.reports[0].held.lease.identity = "me"
        await client.claim(lease, 30, 9)
        lease.identity = "me"  # as the replica knows it, for newcomers that the run lets in itself
        assert client.lease == lease
        script.requests[0].lease.identity = "me"
        await client.update_weights(9, abort=pb.Abort(membership=1))
        assert [request.lease for request in script.requests] == [lease, lease]
        assert script.requests[0].claim == common_pb2.Claim(ttl_s=30)
        no = pb.WeightReport(replica="b", fenced=True, error="abort: lease: run ours no longer, run other does")
        script.reply.reports.append(no)
        with pytest.raises(LeaseLost, match="b: abort: lease: run ours no longer, run other does"):
            await client.update_weights(9, abort=pb.Abort(membership=1))
        script.reply.reports[1].fenced = False
        with pytest.raises(Unavailable, match="b: abort: lease"):
            await client.claim(lease, 30, 9)


async def test_a_claim_that_some_replicas_took_is_carried_though_it_fails_and_one_that_none_took_is_not() -> None:
    held = {"lease": {"identity": "me"}}
    taken, refused = pb.WeightReport(replica="a", ok=True, held=held), pb.WeightReport(replica="b", error="stuck")
    script = Script(pb.WeightReports(reports=[refused]))
    servicer: Any = RolloutServicer()
    servicer.UpdateWeights = script.answer
    async with served(add_RolloutServicer_to_server, servicer) as channel:
        client = RolloutClient(channel)
        for reports, number in (([refused], 0), ([taken, refused], 5)):
            script.reply = pb.WeightReports(reports=reports)
            with pytest.raises(Unavailable, match="b: stuck"):
                await client.claim(common_pb2.Lease(run_id="ours", number=5), 30, 9)
            assert client.lease.number == number
        assert client.lease.identity == "me"


async def test_a_discover_is_passed_on_by_another_replica_where_the_first_stands_still() -> None:
    """No other phase is sent twice."""
    reports, asked = pb.WeightReports(reports=[pb.WeightReport(replica="b", ok=True)]), list[str]()

    async def first_is_frozen(request: pb.WeightPhase, context: Any) -> pb.WeightReports:
        asked.append(str(request.WhichOneof("phase")))
        if len(asked) == 1:
            await asyncio.sleep(60)
        return reports

    servicer: Any = RolloutServicer()
    servicer.UpdateWeights = first_is_frozen
    async with served(add_RolloutServicer_to_server, servicer) as channel:
        client = RolloutClient(channel)
        assert await client.update_weights(0.3, discover=pb.Discover()) == [*reports.reports]
        assert asked == ["discover"] * 2
        asked.clear()
        with pytest.raises(DeadlineExceeded):
            await client.update_weights(0.3, abort=pb.Abort(membership=1))
        assert asked == ["abort"]
