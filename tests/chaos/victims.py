"""The processes of a quartet and its run, by kind."""

import contextlib
from collections.abc import Collection

import psutil

from orchestrator.deployment import cluster as ray_cluster
from tests.cluster import Quartet, titled
from tests.preloaded import all_of

SERVED = {"rollout": "Rollout", "reward": "Reward", "reference": "Reference", "critic": "Critic"}
"""Application -> deployment."""
_TITLES = {
    "proxy": "ray::ProxyActor",
    "controller": "ray::ServeController",
    "registry": "ray::Registry",
    "policy rank": "ray::PolicyRank",
    "critic rank": "ray::CriticRank",
}


def application_of(kind: str) -> str | None:
    """The application whose replica a fault of this kind takes away; None if none."""
    name = {"engine": "rollout", "rollout and engine": "rollout", "critic rank": "critic"}.get(kind, kind)
    return name if name in SERVED else None


def serving(quartet: Quartet) -> dict[str, list[int]]:
    """Application -> process ids of the replicas that Serve calls RUNNING and that live. OSError or KeyError while
    Serve does not say."""
    described = ray_cluster.applications(quartet.cluster)
    return {
        application: [
            int(replica["pid"])
            for replica in described[application]["deployments"][deployment]["replicas"]
            if replica["state"] == "RUNNING" and _lives(int(replica["pid"]))
        ]
        for application, deployment in SERVED.items()
    }


def starting(quartet: Quartet, application: str, running: Collection[int]) -> list[int]:
    """Replicas of the application that are not among the `running` ones."""
    return [pid for pid in titled(quartet, f"ray::ServeReplica:{application}:") if pid not in running]


def victims(quartet: Quartet, kind: str, replica: int | None) -> list[int]:
    """Process ids of what a fault of this kind strikes; empty if nothing is there. `replica` is the one chosen of a
    service."""
    if kind in _TITLES:
        return titled(quartet, _TITLES[kind])[:1]
    assert replica is not None
    with contextlib.suppress(psutil.NoSuchProcess):
        if kind == "engine":
            return _child(replica, "spawn_main")
        if kind == "rollout and engine":
            return [*_child(replica, "spawn_main"), replica]
        return [replica]
    return []


def _child(pid: int, word: str) -> list[int]:
    """Process ids of the first child with this word in its command; two where it was preloaded."""
    children = psutil.Process(pid).children(recursive=True)
    found = [child for child in children if word in " ".join(child.cmdline())]
    return [process.pid for child in found[:1] for process in all_of(child)]


def _lives(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_STOPPED)
    except psutil.NoSuchProcess:
        return False
