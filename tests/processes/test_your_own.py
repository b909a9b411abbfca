"""docs/your-own.md, run as it stands: its files are written, its commands given one after the other."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from orchestrator.deployment.listeners import free_ports
from orchestrator.monitoring.metrics import read_metrics
from tests.cluster import command
from tests.configuration import REPO
from tests.untidy import make_untidy

PAGE = (REPO / "docs" / "your-own.md").read_text()
FILES = dict(re.findall(r"^`([\w.]+)`\n\n```\w+\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL))
COMMANDS = re.findall(r"^\$ (.+)$", PAGE, re.MULTILINE)
STEPS = 2


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    make_untidy(tmp_path / "models" / "mine")
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    yield tmp_path
    command(tmp_path, "down")


def shell(folder: Path, line: str) -> subprocess.CompletedProcess[str]:
    bin_folder = str(Path(sys.executable).parent)
    environment = {"PATH": os.pathsep.join([bin_folder, os.environ["PATH"]]), "PYTHONPATH": str(REPO)}
    return subprocess.run(
        line, shell=True, cwd=folder, env=os.environ | environment, capture_output=True, text=True, timeout=300
    )


def shorten(file: Path) -> None:
    """Two steps, and ports that are free where tests run."""
    text = file.read_text()
    http, grpc_port = free_ports(2)
    for old, new in (
        ("# http_port: 18000", f"http_port: {http}"),
        ("# port: 19000", f"port: {grpc_port}"),
        ("# steps: 100 ", f"steps: {STEPS} "),
    ):
        assert old in text
        text = text.replace(old, new)
    file.write_text(text)


@pytest.mark.exhaustive  # a quartet of its own; what `quartet init` writes: tests/unit/orchestrator/commands/init
def test_the_page_takes_a_model_of_ones_own_to_a_trained_one(folder: Path) -> None:
    assert (len(FILES), len(COMMANDS)) == (2, 8)
    for line in COMMANDS:
        done = shell(folder, line)
        assert done.returncode == 0, f"{line}\n{done.stdout}\n{done.stderr}"
        if line.startswith("quartet init"):
            shorten(folder / "mine.yaml")
    run = folder / "runs" / "mine"
    steps = read_metrics(run / "metrics.jsonl")
    assert [line["step"] for line in steps] == [0, 1, STEPS]
    for measured in ("mismatch/mean_abs", "policy/first_log_ratio_max"):
        assert max(line[measured] for line in steps[1:]) < 1e-4
    trained = AutoModelForCausalLM.from_pretrained(run / "policy").state_dict()
    begun = AutoModelForCausalLM.from_pretrained(folder / "models" / "mine").state_dict()
    assert any(not tensor.equal(begun[name]) for name, tensor in trained.items())
    assert (run / "report.html").is_file()
