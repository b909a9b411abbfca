"""Folders of checkpoints: the last is found and read, and an earlier run's are not a new one's."""

from pathlib import Path

import pytest

from orchestrator.algorithms.rewards import RunningNormaliser
from orchestrator.loop.checkpoint_folder import clear, latest
from quartet.config.base import ConfigError
from tests.unit.train_states import state


@pytest.mark.parametrize("text", ["", "{}", '{"format": 2}', "[1]"])
def test_a_broken_state_names_its_file(tmp_path: Path, text: str) -> None:
    (tmp_path / "step-000003").mkdir()
    (tmp_path / "step-000003" / "state.json").write_text(text)
    with pytest.raises(ConfigError, match=r"step-000003/state.json: cannot be read as a checkpoint's state"):
        latest(tmp_path)


def test_a_users_copy_of_a_checkpoint_is_left_alone(tmp_path: Path) -> None:
    for name in ("step-000003", "step-000009.bak"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "state.json").write_text(state(3).model_dump_json())
    actual = latest(tmp_path)
    assert actual is not None
    assert actual.folder.name == "step-000003"
    clear(tmp_path, overwrite=True)
    assert [path.name for path in tmp_path.iterdir()] == ["step-000009.bak"]


def test_an_earlier_runs_checkpoints_are_not_a_new_ones(tmp_path: Path) -> None:
    clear(tmp_path / "none", overwrite=False)
    (tmp_path / "step-000003").mkdir()
    (tmp_path / "step-000003" / "state.json").write_text(state(3).model_dump_json())
    with pytest.raises(ConfigError, match="already holds checkpoints; choose another name, --resume"):
        clear(tmp_path, overwrite=False)
    clear(tmp_path, overwrite=True)
    assert latest(tmp_path) is None


def test_the_state_survives_to_the_bit(tmp_path: Path) -> None:
    kept = state(3).model_copy(
        update={"kl_coef": 0.1 / 3, "normalisers": {"score": RunningNormaliser(7, 1e-17 / 3, 2 / 7)}}
    )
    folder = tmp_path / "step-000003"
    folder.mkdir()
    (folder / "state.json").write_text(kept.model_dump_json(indent=1))
    actual = latest(tmp_path)
    assert actual is not None
    assert actual.state == kept
