"""Every file in deploy/ is valid, the ones for machines that are not at hand included."""

from collections import Counter
from pathlib import Path

import pytest
import yaml

from orchestrator.deployment.facts.render import render
from quartet.config.base import read_yaml
from services.rollout.config import RolloutConfig
from tests.gpu_requests import gpu_requests, load

ROOT = Path(__file__).parents[4]
FILES = sorted((ROOT / "deploy").glob("*.yaml"))
RUNS = [file for file in FILES if "\norchestrator:" in file.read_text()]
SERVICES = ["rollout", "reward", "reference", "critic"]


def test_the_files_the_readme_names_are_there() -> None:
    assert {file.name for file in FILES} == {
        "ppo.yaml",
        "ppo-addition.yaml",
        "ppo-gpu.yaml",
        "ppo-1gpu.yaml",
        "ppo-8b-8gpu.yaml",
        "ppo-70b-32gpu.yaml",
        "ppo-open.yaml",
        "reward.yaml",
    }
    assert {*FILES} - {*RUNS} == {ROOT / "deploy/reward.yaml"}


@pytest.mark.parametrize("file", RUNS, ids=lambda file: file.name)
def test_a_deploy_file_is_valid(file: Path, tmp_path: Path) -> None:
    deployment = load(file, tmp_path)
    assert [*deployment.applications] == SERVICES


@pytest.mark.parametrize(
    ("name", "asked", "available"),
    [
        ("ppo.yaml", {}, {}),
        ("ppo-addition.yaml", {}, {}),
        ("ppo-gpu.yaml", {"GPU": 7}, {"GPU": 8}),
        ("ppo-1gpu.yaml", {"GPU": 1}, {"GPU": 1}),
        ("ppo-8b-8gpu.yaml", {"GPU": 7.2}, {"GPU": 8}),
        (
            "ppo-70b-32gpu.yaml",
            {"GPU": 32, "rollout": 16, "policy": 8, "judges": 8},
            {"GPU": 32, "rollout": 16, "policy": 8, "judges": 8},
        ),
    ],
)
def test_what_all_processes_ask_of_ray_is_there(
    name: str, asked: dict[str, float], available: dict[str, float], tmp_path: Path
) -> None:
    requests = gpu_requests(load(ROOT / "deploy" / name, tmp_path))
    actual: Counter[str] = Counter()
    for request in requests:
        actual.update({"GPU": request.gpus} | request.resources)
    assert {kind: amount for kind, amount in actual.items() if amount} == pytest.approx(asked)
    assert all(asked[kind] <= available[kind] for kind in asked)


@pytest.mark.parametrize("file", RUNS, ids=lambda file: file.name)
def test_a_replica_of_rollout_has_a_gpu_for_each_part_of_its_engine(file: Path, tmp_path: Path) -> None:
    deployment = load(file, tmp_path)
    rollout = deployment.services["rollout"]
    assert isinstance(rollout, RolloutConfig)
    asked = {request.gpus for request in gpu_requests(deployment) if request.role == "rollout"}
    # A share of one will do where vLLM is told what its cache may take: by itself it takes most of the GPU.
    alone = rollout.kv_cache_mib is None or rollout.tensor_parallel_size > 1
    assert asked <= {0, rollout.tensor_parallel_size} or (not alone and max(asked) < 1)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_a_deploy_file_is_what_its_facts_render_to(file: Path) -> None:
    """`make deploy-files` after a change."""
    actual = read_yaml(file)
    assert yaml.safe_load(render(file.parent / "facts" / file.name)) == actual
    assert {each.name for each in (file.parent / "facts").iterdir()} == {each.name for each in FILES}


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_serve_accepts_a_deploy_file(file: Path) -> None:
    """Serve's own schema, which knows nothing of the sections that are ours."""
    from ray.serve.schema import ServeDeploySchema

    raw = yaml.safe_load(file.read_text())
    ours = {"orchestrator", "security"}
    schema = ServeDeploySchema.model_validate({key: value for key, value in raw.items() if key not in ours})
    assert [application.name for application in schema.applications] == (SERVICES if file in RUNS else ["reward"])
