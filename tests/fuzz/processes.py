"""The processes that a fuzzer must leave alone."""

from orchestrator.deployment import cluster
from tests.cluster import Quartet, named


def replica_processes(quartet: Quartet) -> dict[str, int]:
    """Process ids of every replica of every service, and of Serve's proxy, by name."""
    applications = cluster.applications(quartet.cluster)
    watched = {
        replica["replica_id"]: int(replica["pid"])
        for application in applications.values()
        for deployment in application["deployments"].values()
        for replica in deployment["replicas"]
        if replica["state"] == "RUNNING"  # an earlier test may have scaled down
    }
    return watched | {"proxy": named(quartet, "ray::ProxyActor").pid}
