"""Checks of a configuration against the run that it resumes, and the way back to an interrupted one."""

from dataclasses import replace
from pathlib import Path

import pytest

from orchestrator.commands.beginning import check_groups, how_to_resume
from quartet.config.base import ConfigError
from tests.gpu_requests import load
from tests.unit.train_states import state


@pytest.mark.parametrize(
    "before", [{"algorithm": {"samples_per_prompt": 4}}, {"algorithm": {}}, {}], ids=["4", "1", "none"]
)
def test_a_prompt_keeps_its_number_of_samples(before: dict[str, dict[str, int]]) -> None:
    actual = before.get("algorithm", {}).get("samples_per_prompt", 1)
    check_groups({"orchestrator": before}, actual)
    said = rf"^orchestrator.algorithm.samples_per_prompt: 2, but the run began with {actual}, and samples of"
    with pytest.raises(ConfigError, match=said):
        check_groups({"orchestrator": before}, 2)


@pytest.mark.parametrize(("name", "written"), [("mine.yaml", "mine.yaml"), ("my run.yaml", "'my run.yaml'")])
def test_who_interrupts_a_run_hears_where_it_stands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, written: str
) -> None:
    shipped = load(Path(__file__).parents[4] / "deploy/ppo.yaml", tmp_path)
    deployment = replace(shipped, path=Path(name))
    monkeypatch.chdir(tmp_path)
    again = f"`quartet train {written} --overwrite` begins again"
    assert how_to_resume(deployment) == f"interrupted before the first checkpoint; {again}"
    folder = tmp_path / "runs/demo/checkpoints/step-20"
    folder.mkdir(parents=True)
    (folder / "state.json").write_text(state(20).model_dump_json())
    assert how_to_resume(deployment) == (
        f"interrupted; the last checkpoint is of step 20 of 40: `quartet train {written} --resume` continues there"
    )
