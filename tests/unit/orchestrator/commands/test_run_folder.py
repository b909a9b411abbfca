"""The folder of a run: one process at a time, and what changed in its configuration."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from orchestrator.commands.run_folder import differences, keep_run_id, locked, run_id
from quartet.config.base import ConfigError

HOLDER = """
import sys, time
from pathlib import Path
from orchestrator.commands.run_folder import locked
with locked(Path(sys.argv[1]), Path(sys.argv[2])):
    print("held", flush=True)
    time.sleep(60)
"""


@pytest.mark.processes
def test_one_process_at_a_time_trains_a_run_and_a_killed_one_no_longer_does(tmp_path: Path) -> None:
    root = Path(__file__).parents[4]
    run, checkpoints = tmp_path / "run", tmp_path / "shared" / "checkpoints"
    command = [sys.executable, "-c", HOLDER, str(run), str(checkpoints)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=root) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        for folder, mine in ((run, (run, tmp_path / "a")), (checkpoints, (tmp_path / "b", checkpoints))):
            with pytest.raises(ConfigError, match=f"{folder} is in use by another training process"), locked(*mine):
                pass
        holder.kill()
        holder.wait()
        with locked(run, checkpoints):
            # Nor does it make what would be taken for a run's.
            assert not checkpoints.exists()


def test_what_a_configuration_says_now_is_told_key_by_key() -> None:
    before = {"steps": 10, "algorithm": {"gamma": 1.0, "kl": {"coef": 0.1}}, "gone": True}
    now = {"steps": 20, "algorithm": {"gamma": 1.0, "kl": {"coef": 0.2}}, "new": [1]}
    assert differences(before, now) == [
        "algorithm.kl.coef: 0.1 before, 0.2 now",
        "gone: true before, null now",
        "new: null before, [1] now",
        "steps: 10 before, 20 now",
    ]
    assert differences(now, now) == []


def test_of_sections_in_a_list_only_what_changed_is_told() -> None:
    def file(count: int, *others: str) -> dict[str, Any]:
        rollout = {"name": "rollout", "args": {"model": "a"}, "deployments": [{"name": "Rollout", "count": count}]}
        return {"applications": [rollout, *({"name": name} for name in others)], "ends": [{"id": 1}]}

    assert differences(file(1, "critic"), file(2, "critic")) == [
        "applications.rollout.deployments.Rollout.count: 1 before, 2 now"
    ]
    assert differences(file(1), file(1, "critic")) == ["applications.critic: null before, {'name': 'critic'} now"]
    assert differences(file(1, "a", "a"), file(1, "a")) != []  # two of one name
    assert differences({"ends": []}, {"ends": [{"id": 1}]}) == ["ends: [] before, [{'id': 1}] now"]


def test_a_run_keeps_its_id_when_it_is_resumed_and_a_new_one_in_its_folder_is_another(tmp_path: Path) -> None:
    first = run_id(tmp_path, resume=False)
    assert first.startswith(f"{tmp_path.name}-")
    keep_run_id(tmp_path, first)
    assert run_id(tmp_path, resume=True) == first
    assert run_id(tmp_path, resume=False) != first
    # One from before ids were kept.
    (tmp_path / "run_id").unlink()
    assert run_id(tmp_path, resume=True) not in ("", first)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda runs: runs.symlink_to("/no/such/disk"), "is a link to /no/such/disk, which does not exist"),
        (lambda runs: runs.touch(), "is a file and should be a folder"),
    ],
)
def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path, make: Callable[[Path], None], reason: str) -> None:
    runs, fine = tmp_path / "runs", tmp_path / "fine"
    make(runs)
    for mine in ((runs / "a", fine), (fine, runs / "a" / "checkpoints")):
        folder = next(each for each in mine if each != fine)
        with pytest.raises(ConfigError) as caught, locked(*mine):
            pass
        assert str(caught.value) == f"{folder} cannot be made: {runs} {reason}; remove it, or choose another place"
