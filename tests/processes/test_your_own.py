"""docs/your-own.md, run as it stands: its files are written, its commands given one after the other."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from orchestrator.monitoring.metrics import read_metrics
from tests.cluster import command
from tests.pages import Page, shell, shorten
from tests.untidy import make_untidy

PAGE = Page.at("your-own.md")
STEPS = 2


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    make_untidy(tmp_path / "models" / "mine")
    PAGE.write(tmp_path)
    yield tmp_path
    command(tmp_path, "down")


@pytest.mark.exhaustive  # a quartet of its own; what `quartet init` writes: tests/unit/orchestrator/commands/init
def test_the_page_takes_a_model_of_ones_own_to_a_trained_one(folder: Path) -> None:
    assert (len(PAGE.files), len(PAGE.commands)) == (2, 8)
    for line in PAGE.commands:
        shell(folder, line)
        if line.startswith("quartet init"):
            shorten(folder / "mine.yaml", STEPS)
    run = folder / "runs" / "mine"
    steps = read_metrics(run / "metrics.jsonl")
    assert [line["step"] for line in steps] == [0, 1, STEPS]
    for measured in ("mismatch/mean_abs", "policy/first_log_ratio_max"):
        assert max(line[measured] for line in steps[1:]) < 1e-4
    trained = AutoModelForCausalLM.from_pretrained(run / "policy").state_dict()
    begun = AutoModelForCausalLM.from_pretrained(folder / "models" / "mine").state_dict()
    assert any(not tensor.equal(begun[name]) for name, tensor in trained.items())
    assert (run / "report.html").is_file()
