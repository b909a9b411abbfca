"""Ray places processes as docs/placement.md says: the same ones share a GPU, in whatever order they start."""

import json
import os
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from tests.gpu_requests import gpu_requests, load

# What Ray itself does changes with its version only.
pytestmark = pytest.mark.exhaustive

ROOT = Path(__file__).parents[2]
Order = list[tuple[str, float]]

HALVES: Order = [("rank", 0.5), ("rank", 0.5)]
REPLACED = ("policy", "critic", "reward", "rollout", "reference")
"""Learners first, as when services are replaced while a run goes on."""
SMALL_FIRST = ("reward", "reference", "critic", "rollout", "policy")


@pytest.fixture(scope="module")
def orders(tmp_path_factory: pytest.TempPathFactory) -> list[Order]:
    deployment = load(ROOT / "deploy" / "ppo-8b-8gpu.yaml", tmp_path_factory.mktemp("models"))
    wanted = [(request.role, request.gpus) for request in gpu_requests(deployment) if request.gpus]
    return [wanted, *(sorted(wanted, key=lambda one: roles.index(one[0])) for roles in (REPLACED, SMALL_FIRST))]


@pytest.fixture(scope="module")
def told(orders: list[Order], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The output of tests.placement for these orders and the halves."""
    # ray.init leaves a token in the home folder, and from then on every `ray start` of this user asks for it.
    environment = os.environ | {"PYTHONPATH": str(ROOT), "HOME": str(tmp_path_factory.mktemp("home"))}
    environment.pop("RAY_ADDRESS", None)
    done = subprocess.run(
        [sys.executable, "-m", "tests.placement", json.dumps({"orders": [*orders, HALVES]})],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    printed: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return printed


def test_the_8b_file_fits_in_any_order_and_no_two_ranks_share_a_gpu(
    told: dict[str, Any], orders: list[Order]
) -> None:
    for order, placed in zip(orders, told["orders"], strict=False):
        roles: defaultdict[int, list[str]] = defaultdict(list)
        assert [role for role, _ in placed] == [role for role, _ in order]
        for role, (gpu,) in placed:
            roles[gpu].append(role)
        for together in roles.values():
            assert "rollout" not in together or together == ["rollout"]
            assert together.count("policy") + together.count("critic") <= 1
            assert not {"critic", "reference"} <= set(together)


def test_ray_packs_two_halves_onto_one_gpu(told: dict[str, Any]) -> None:
    """Ranks must ask for more for this reason."""
    (_, first), (_, second) = told["orders"][-1]
    assert first == second


def test_a_process_without_gpus_sees_them_all_and_takes_none(told: dict[str, Any]) -> None:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    assert told["seen"]["none"] == [visible, False]
    assert told["seen"]["pinned"] == ["6", True]
    (gpu, may) = told["seen"]["share"]
    assert gpu.isdigit()
    assert may
