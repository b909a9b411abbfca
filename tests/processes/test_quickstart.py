"""docs/quickstart.md, run as it stands: a hub on loopback has a tiny model and few rows under the published names."""

import io
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import pyarrow.parquet  # type: ignore[import-untyped]
import pytest
import yaml

from orchestrator.monitoring.metrics import read_metrics
from tests import hub
from tests.cluster import command
from tests.pages import Page, shell, shorten
from tests.untidy import make_untidy

PAGE = Page.at("quickstart.md")
MODEL, DATA = "Qwen/Qwen2.5-0.5B-Instruct", "openai/gsm8k"
STEPS = 2


def parquet(numbers: Sequence[int]) -> bytes:
    """Rows like those of GSM8K, whose answers are of one digit, so that a model of random weights has some right."""
    rows = [{"question": f"{n} + 1?", "answer": f"{n} + 1 = <<{n}+1={n + 1}>>{n + 1}\n#### {n + 1}"} for n in numbers]
    file = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), file)
    return file.getvalue()


@pytest.fixture
def published(tmp_path: Path) -> Iterator[tuple[str, list[str]]]:
    """The hub's address, and the paths that are asked for."""
    model = make_untidy(tmp_path / "published")
    weights = {path.name: path.read_bytes() for path in model.iterdir()}
    splits = {"main/train": range(9), "main/test": range(4), "socratic/train": range(1)}
    rows = {f"{name}-00000-of-00001.parquet": parquet(numbers) for name, numbers in splits.items()}
    rows |= {"README.md": b"#"}
    with hub.serving({f"models/{MODEL}": weights | {"README.md": b"#"}, f"datasets/{DATA}": rows}) as served:
        yield served


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    mine = tmp_path / "mine"
    mine.mkdir()
    PAGE.write(mine)
    yield mine
    command(mine, "down")


@pytest.mark.exhaustive  # a quartet of its own; hub ids: tests/unit/orchestrator/deployment/facts/test_hub.py
def test_the_page_takes_a_published_model_to_a_trained_one(
    folder: Path, published: tuple[str, list[str]], tmp_path: Path
) -> None:
    assert [line.split()[1] for line in PAGE.commands] == [
        *("init", "check", "up", "train", "evaluate", "report", "down")
    ]
    endpoint, asked = published
    there = {"HF_ENDPOINT": endpoint, "HF_HOME": str(tmp_path / "home"), "HF_HUB_DISABLE_XET": "1"}
    for number, line in enumerate(PAGE.commands):
        # Later commands need no hub: what they ask for is there.
        shell(folder, line, HF_HUB_OFFLINE="1" if number else "0", **there)
        if not number:
            facts = yaml.safe_load((folder / "gsm8k.yaml").read_text())
            shorten(folder / "gsm8k.yaml", STEPS)
    revisions = dict(re.findall(r"(\S+/\S+)@([0-9a-f]{40})", PAGE.commands[0]))
    assert facts["model"] == f"{MODEL}@{revisions[MODEL]}"
    assert facts["prompts"] == {
        "path": f"{DATA}@{revisions[DATA]}/main",
        **{"input_key": "question", "label_key": "answer", "chat_template": True, "eval_split": "test"},
        "max_prompt_length": facts["prompts"]["max_prompt_length"],
    }
    assert not [path for path in asked if path.endswith(".md") or "socratic" in path]
    run = folder / "runs" / "gsm8k"
    steps = read_metrics(run / "metrics.jsonl")
    assert [line["step"] for line in steps] == [0, 1, STEPS]
    assert all(0 <= line["score/mean"] < 1 for line in steps[1:])
    assert (run / "policy" / "model.safetensors").is_file()
    assert (run / "report.html").is_file()
