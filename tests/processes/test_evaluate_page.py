"""docs/evaluate.md, run as it stands: from the rows on the page to a scored file, with the hub alone."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from orchestrator.deployment.listeners import free_ports
from tests.cluster import command
from tests.configuration import REPO
from tests.pages import Page, shell
from tests.unit.scoring import read

PAGE = Page.at("evaluate.md")


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A folder with the page's files, and the hub's, with ports that are free where tests run."""
    PAGE.write(tmp_path)
    (tmp_path / "deploy").mkdir()
    raw = yaml.safe_load((REPO / "deploy/reward.yaml").read_text())
    raw["http_options"]["port"], raw["grpc_options"]["port"] = free_ports(2)
    (tmp_path / "deploy/reward.yaml").write_text(yaml.safe_dump(raw))
    yield tmp_path
    command(tmp_path, "down")


@pytest.mark.exhaustive  # a head of its own; the commands: tests/e2e/test_score.py
def test_the_page_leads_from_rows_to_scores(folder: Path) -> None:
    port = yaml.safe_load((folder / "deploy/reward.yaml").read_text())["grpc_options"]["port"]
    assert (len(PAGE.files), len(PAGE.commands)) == (1, 4)
    for line in PAGE.commands:
        assert "--hub" not in line or "127.0.0.1:19000" in line
        shell(folder, line.replace("127.0.0.1:19000", f"127.0.0.1:{port}"))
    scored = read(folder / "scored.jsonl")
    assert [row["scores"]["sums"] for row in scored] == [1.0, 0.0, 1.0]
    assert all(len(row["scorers"]["sums"]["hash"]) == 64 for row in scored)
    page = (folder / "evaluations/rows/evaluation.html").read_text()
    assert "source=two digits" in page
