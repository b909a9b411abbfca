"""A critic's only rank as a Ray actor in its replica's place: what it is given, its errors and its end."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
SOON_S = 10.0
"""Seconds within which a process that is not needed any more has to have ended."""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The output of tests.critic_ranks."""
    # ray.init leaves a token in the home folder, and from then on every `ray start` of this user asks for it.
    environment = os.environ | {"PYTHONPATH": str(ROOT), "HOME": str(tmp_path_factory.mktemp("home"))}
    for name in ("RAY_ADDRESS", "OMP_NUM_THREADS"):
        environment.pop(name, None)
    done = subprocess.run(
        [sys.executable, "-m", "tests.critic_ranks"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    told: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    print(json.dumps(told, indent=2))
    return told


def test_it_has_its_replicas_node_threads_environment_and_gpu(found: dict[str, Any]) -> None:
    given, node = found["described"]
    assert (given["node"], given["OMP_NUM_THREADS"], given["QUARTET_TEST"]) == (node, "2", "7")
    assert not given["gpus"]  # its replica has none
    assert given["title"].startswith("ray::CriticRank")
    assert (found["on a GPU"]["CUDA_VISIBLE_DEVICES"], found["on a GPU"]["gpus"]) == ("5", True)


def test_calls_take_turns_or_run_beside_and_errors_arrive(found: dict[str, Any]) -> None:
    calls = found["calls"]
    assert (calls["turns"], calls["beside"], calls["slow"]) == ([1, 2, 3], [1, 2, 3, 5], [1, 2, 3, 5, 4])
    path, odd = calls["errors"]
    assert path == "InvalidArgument: path"
    assert odd == "RankFailed: critic.fail: rank 0 of 1: RuntimeError: Odd: odd"


@pytest.mark.parametrize("fault", ["killed", "frozen", "frozen in its start"])
def test_a_rank_that_is_lost_costs_seconds_and_leaves_no_process(found: dict[str, Any], fault: str) -> None:
    (seconds, told), ended_s = found[fault]
    assert "rank 0 of 1 died: " in told
    assert seconds < SOON_S
    assert ended_s < SOON_S


@pytest.mark.parametrize("what", ["a start", "an end"])
def test_the_event_loop_goes_on_while_rays_gcs_stands_still(found: dict[str, Any], what: str) -> None:
    assert found[f"GCS stopped, {what}"]


def test_the_event_loop_goes_on_while_the_raylet_stands_still(found: dict[str, Any]) -> None:
    assert found["raylet stopped, a batch"] == [True, 64 << 20]


@pytest.mark.parametrize("end", ["restored", "replica killed", "replica killed, rank frozen"])
def test_no_process_stays_behind(found: dict[str, Any], end: str) -> None:
    assert found[end] < SOON_S
