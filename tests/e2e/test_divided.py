"""A run whose rollout replicas have two workers each, one of which is killed while the run trains."""

import signal
from copy import deepcopy

import psutil
import pytest

from orchestrator.deployment import serving
from orchestrator.deployment.redeployment import fixed
from orchestrator.monitoring.metrics import read_metrics
from protos import rollout_pb2
from services.rollout.client import RolloutClient
from tests.cluster import START_S, Quartet, engine_of, eventually, titled
from tests.preloaded import all_of
from tests.runs import Run

REPLICA = "ray::ServeReplica:divided:Rollout"
STEPS = 1000
"""More than there are until the replica has been replaced."""


@pytest.mark.exhaustive
async def test_a_replica_that_loses_one_of_its_workers_is_replaced_while_the_run_goes_on(quartet: Quartet) -> None:
    divided = deepcopy(quartet.raw["applications"][0]) | {"name": "divided", "route_prefix": "/divided"}
    divided["args"]["tensor_parallel_size"] = 2
    divided["deployments"][0] |= fixed(2)
    run = Run(quartet, "divided", without=["rollout"])
    with run.changing() as raw:
        raw["orchestrator"] |= {"steps": STEPS, "services": {"rollout": {"application": "divided"}}}
        raw["applications"] = [divided, *raw["applications"]]
    rollout = RolloutClient(quartet.channel, "divided")
    quartet.deploy([divided], "with-divided")
    try:
        serving.await_running(quartet.cluster, ("divided",), print, START_S)
        process = run.start()
        run.wait(run.reached(2), process)
        first, second = titled(quartet, REPLICA)
        *_, worker = psutil.Process(engine_of(first)).children(recursive=True)
        for each in all_of(worker):
            each.send_signal(signal.SIGKILL)

        async def replaced() -> bool:
            """True if another replica serves pushed weights in its place."""
            assert process.poll() is None, run.log.read_text()
            pids = titled(quartet, REPLICA)
            if first in pids or len(pids) != 2:
                return False
            reports = await rollout.update_weights(5, discover=rollout_pb2.Discover())
            return len([report for report in reports if report.ok and report.policy_version > 0]) == 2

        await eventually(replaced, START_S)
        assert second in titled(quartet, REPLICA)
        run.wait(run.reached(max(run.steps()) + 3), process)
        lines = read_metrics(run.folder / "metrics.jsonl")
        assert [line["step"] for line in lines] == [*range(1, len(lines) + 1)]
        # Sampled by the weights that are trained, whichever worker has them.
        assert max(line["mismatch/max_abs"] for line in lines) < 1e-4
    finally:
        run.end()
