"""Every file in deploy/ is valid, the ones for machines that are not at hand included."""

import re
from pathlib import Path

import pytest
import yaml

from orchestrator.deployment import Deployment

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "deploy").glob("*.yaml"))


def test_the_files_the_readme_names_are_there() -> None:
    assert {"ppo.yaml", "ppo-addition.yaml", "ppo-gpu.yaml"} <= {file.name for file in FILES}


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_a_deploy_file_is_valid(file: Path, tmp_path: Path) -> None:
    """With its model folders replaced by one that exists, since the schemas look for them."""
    (tmp_path / "config.json").write_text("{}")
    text = re.sub(r"(&(?:policy|reward) )\S+", rf"\g<1>{tmp_path}", file.read_text())
    copy = tmp_path / file.name
    copy.write_text(text)
    deployment = Deployment.load(copy, check_services=True)
    assert deployment.applications == ("rollout", "reward", "reference", "critic")


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_serve_accepts_a_deploy_file(file: Path) -> None:
    """Serve's own schema, which knows nothing of the sections that are ours."""
    from ray.serve.schema import ServeDeploySchema

    raw = yaml.safe_load(file.read_text())
    ours = {"shared", "orchestrator"}
    schema = ServeDeploySchema.model_validate({key: value for key, value in raw.items() if key not in ours})
    assert [application.name for application in schema.applications] == ["rollout", "reward", "reference", "critic"]
