"""The folder of a run: one process at a time, and what changed in its configuration."""

import subprocess
import sys
from pathlib import Path

import pytest

from orchestrator.run_folder import differences, locked
from services.common.config import ConfigError

HOLDER = """
import sys, time
from pathlib import Path
from orchestrator.run_folder import locked
with locked(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""


def test_one_process_at_a_time_trains_a_run_and_a_killed_one_no_longer_does(tmp_path: Path) -> None:
    root = Path(__file__).parents[2]
    command = [sys.executable, "-c", HOLDER, str(tmp_path / "run")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=root) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        with pytest.raises(ConfigError, match="is being trained by another process"), locked(tmp_path / "run"):
            pass
        holder.kill()
        holder.wait()
        with locked(tmp_path / "run"):
            pass


def test_what_a_configuration_says_now_is_told_key_by_key() -> None:
    before = {"steps": 10, "ppo": {"gamma": 1.0, "kl": {"coef": 0.1}}, "gone": True}
    now = {"steps": 20, "ppo": {"gamma": 1.0, "kl": {"coef": 0.2}}, "new": [1]}
    assert differences(before, now) == [
        "gone: true when the run began, null now",
        "new: null when the run began, [1] now",
        "ppo.kl.coef: 0.1 when the run began, 0.2 now",
        "steps: 10 when the run began, 20 now",
    ]
    assert differences(now, now) == []
