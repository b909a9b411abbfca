"""The ratios that benchmarks/push prints."""

import asyncio
from pathlib import Path

import pytest

from benchmarks.push import Bare, _cells


def test_the_price_of_a_proof_is_that_of_the_push_which_is_proved() -> None:
    seconds = {"bare_s": 1.0, "transfer_s": 1.5, "push_s": 2.0, "layers_s": 6.0, "join_s": 1.0, "proved_s": 2.5}
    assert _cells(seconds)[5:] == ["1.50", "2.00", "3.00", "0.50", "0.25"]


@pytest.mark.processes
def test_a_receiver_may_take_longer_to_start_than_a_group_to_form(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sitecustomize.py").write_text("import time\ntime.sleep(6)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    monkeypatch.setattr("benchmarks.push.STALL_S", 5.0)
    bare = Bare(1, 1)
    assert 0 < asyncio.run(bare.broadcast()) < 5
    bare.end()
