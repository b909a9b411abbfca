"""`make demo` and the commands of docs/demo.md, from the first to the last, with fewer steps."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from orchestrator.deployment.listeners import free_ports
from orchestrator.monitoring.metrics import read_metrics
from tests.cluster import command
from tests.configuration import REPO
from tests.pages import Page, shell

pytestmark = [pytest.mark.exhaustive, pytest.mark.timeout(1800)]  # quartets of their own, and models of full size
STEPS = 2


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    (tmp_path / "deploy").mkdir()
    yield tmp_path
    command(tmp_path, "down")


def shortened(folder: Path, name: str) -> None:
    """Writes the facts of a file of deploy/, with fewer steps and ports that are free where tests run."""
    text = (REPO / "deploy/facts" / name).read_text()
    for old, new in (("steps: 40", f"steps: {STEPS}"), ("every: 10", f"every: {STEPS}")):
        assert old in text
        text = text.replace(old, new)
    http, grpc = free_ports(2)
    (folder / "deploy" / name).write_text(f"{text}\nhttp_port: {http}\nport: {grpc}\n")


def check_run(run: Path) -> None:
    """Looks at what a training left."""
    lines = read_metrics(run / "metrics.jsonl")
    assert [line["step"] for line in lines] == list(range(STEPS + 1))
    assert {"eval/score"} <= lines[0].keys() & lines[-1].keys()
    assert (run / "policy/model.safetensors").is_file()


def test_make_demo_makes_trains_evaluates_and_reports(folder: Path) -> None:
    """All but the installation, which is this one."""
    shortened(folder, "ppo.yaml")
    made = ["make", "-f", str(REPO / "Makefile"), "-o", "install", f"VENV={sys.prefix}", "demo"]
    done = subprocess.run(
        made, cwd=folder, env=os.environ | {"PYTHONPATH": str(REPO)}, capture_output=True, text=True, timeout=1500
    )
    assert done.returncode == 0, done.stdout + done.stderr
    check_run(folder / "runs/demo")
    assert (folder / "runs/demo/report.html").is_file()
    for said in ("before training  gold -0.", "current on eval", "Win rate", "  before  ", "stopped the Ray head"):
        assert said in done.stdout + done.stderr, said


def test_the_page_trains_by_a_rule(folder: Path) -> None:
    shortened(folder, "ppo-addition.yaml")
    for line in Page.at("demo.md").commands:
        shell(folder, line)
    check_run(folder / "runs/addition")
