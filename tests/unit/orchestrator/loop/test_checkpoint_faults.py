"""A checkpoint whose writer is killed or finds the disk full leaves one to restore, and room for the next."""

from collections import Counter
from pathlib import Path

import pytest

from tests.checkpoint_faults import KINDS, Scene

pytestmark = pytest.mark.processes


@pytest.mark.parametrize("trials", [8, pytest.param(40, marks=pytest.mark.exhaustive)])  # more of the same
def test_a_kill_or_a_full_disk_at_any_point_leaves_a_checkpoint_to_restore(
    tmp_path: Path, policy_folder: Path, reward_folder: Path, trials: int
) -> None:
    scene = Scene(tmp_path, policy_folder, reward_folder, seed=1)
    outcomes = [scene.trial(number, KINDS[number % len(KINDS)]) for number in range(trials)]
    assert [outcome for outcome in outcomes if not outcome.whole] == []
    actual = Counter(outcome.step for outcome in outcomes)
    print(f"\n{actual[1]} times the old one, {actual[2]} times the new one, of {trials}")
    # Every fault was felt: the writer died, or was told, or had just finished.
    killed = {outcome.died for outcome in outcomes if outcome.kind.startswith("killed")}
    told = {outcome.noted for outcome in outcomes if outcome.kind.startswith("full")}
    assert (killed, told) == ({True}, {True})
    assert actual[1] > trials / 4
