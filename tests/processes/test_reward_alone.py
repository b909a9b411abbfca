"""The reward service alone, as deploy/reward.yaml brings it up: several scorers, and no run."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from orchestrator.deployment.listeners import free_ports
from quartet.security.credentials import VARIABLE, connect
from quartet.wire.errors import InvalidArgument
from services.reward.client import RewardClient
from tests.cluster import command
from tests.configuration import REPO

# A head of its own; the same scorers on the shared one: tests/integration/test_reward.py
pytestmark = pytest.mark.exhaustive


@pytest.fixture
def place(tmp_path: Path) -> Iterator[tuple[Path, str]]:
    """The folder of a head that serves the shipped file, and its port."""
    raw: dict[str, Any] = yaml.safe_load((REPO / "deploy/reward.yaml").read_text())
    raw["http_options"]["port"], raw["grpc_options"]["port"] = free_ports(2)
    (tmp_path / "reward.yaml").write_text(yaml.safe_dump(raw))
    try:
        up = command(tmp_path, "up", "reward.yaml")
        assert up.returncode == 0, up.stderr
        yield tmp_path, f"127.0.0.1:{raw['grpc_options']['port']}"
    finally:
        down = command(tmp_path, "down")
        assert down.returncode == 0, down.stderr


async def test_it_starts_without_a_model_and_scores(place: tuple[Path, str]) -> None:
    folder, target = place
    checked = command(folder, "check", "reward.yaml")
    assert checked.returncode == 0, checked.stderr
    assert "services alone, without a run: reward" in checked.stderr
    assert "after `quartet up` here" not in checked.stderr
    async with RewardClient(connect(target, {VARIABLE: str(folder / ".quartet/access")})) as client:
        assert {each.name for each in await client.scorers(60)} == {"reviews", "sums"}
        asked = ["2 + 2 =", "2 + 3 ="], ["4", "6"]
        scores = await client.named("sums").score_texts(*asked, labels=["4", "5"], timeout_s=60)
        assert scores.values.tolist() == [1, 0]
        with pytest.raises(InvalidArgument, match="scorer: required, as there are several: reviews, sums"):
            await client.score_texts(*asked, timeout_s=60)
