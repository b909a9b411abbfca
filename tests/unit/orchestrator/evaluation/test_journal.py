"""The journal of an evaluation of rows."""

from pathlib import Path
from typing import Any

import pytest

from orchestrator.evaluation.hub import Verdict
from orchestrator.evaluation.journal import Answer, Journal
from quartet.config.base import ConfigError

SETTINGS: dict[str, Any] = {"--samples": 2, "--scorer math": {"name": "n", "hash": "h"}}
VERDICT = Verdict({"math": 1.0, "b": None}, {"math": "scored", "b": "failed"}, {"b": "why"})


def test_answers_and_verdicts_are_there_when_it_is_opened_again(tmp_path: Path) -> None:
    path = tmp_path / "sub/journal.jsonl"
    with Journal(path, SETTINGS) as journal:
        journal.add_answer((3, 1), Answer("é\n", ended=True, policy_version=7))
        journal.add_answer((0, 0), Answer(None, problem="busy", may_pass=True))
        journal.add_verdict((3, 1), VERDICT)
        assert journal.verdict((3, 1)) == VERDICT
    with Journal(path, SETTINGS) as journal:
        assert journal.answer((3, 1)) == Answer("é\n", ended=True, policy_version=7)
        assert journal.answer((0, 0)) == Answer(None, problem="busy", may_pass=True)
        assert journal.answer((0, 1)) is None
        assert journal.verdict((3, 1)) == VERDICT
        assert journal.verdict((0, 0)) is None
        journal.add_answer((0, 0), Answer("now"))
    with Journal(path, SETTINGS) as journal:
        assert journal.answer((0, 0)) == Answer("now")
        assert journal.answer((3, 1)) is not None


def test_every_line_is_keyed_by_prompt_sample_and_settings(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    with Journal(path, SETTINGS) as journal:
        journal.add_answer((3, 1), Answer("a"))
        journal.add_verdict((3, 1), VERDICT)
    first, *others = path.read_text().splitlines()
    assert journal.hash in first
    assert all(line.startswith(f'{{"prompt": 3, "sample": 1, "settings": "{journal.hash}"') for line in others)


@pytest.mark.parametrize("cut", [1, 20, 60])
def test_a_line_that_was_cut_off_is_written_again(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "journal.jsonl"
    with Journal(path, SETTINGS) as journal:
        journal.add_answer((0, 0), Answer("kept"))
        journal.add_answer((0, 1), Answer("lost"))
    path.write_bytes(path.read_bytes()[:-cut])
    with Journal(path, SETTINGS) as journal:
        assert journal.answer((0, 1)) is None
        journal.add_answer((0, 1), Answer("anew"))
    with Journal(path, SETTINGS) as journal:
        assert [journal.answer((0, sample)) for sample in (0, 1)] == [Answer("kept"), Answer("anew")]


@pytest.mark.parametrize(
    ("now", "said"),
    [
        ({"--samples": 3}, "--samples: was 2 in the evaluation that .* is of, and is 3 now"),
        ({"--scorer math": {"name": "n", "hash": "k"}}, "--scorer math: was .*'h'.* and is .*'k'.* now"),
        ({"--scorer code": {"name": "m", "hash": "h"}}, "--scorer code: was null .* now"),
        ({"--scorer math": None}, "--scorer math: was .* and is null now"),
    ],
)
def test_a_changed_setting_is_refused_and_named(tmp_path: Path, now: dict[str, Any], said: str) -> None:
    path = tmp_path / "journal.jsonl"
    Journal(path, SETTINGS).__exit__()
    before = path.read_bytes()
    changed = {name: value for name, value in (SETTINGS | now).items() if value is not None}
    with pytest.raises(ConfigError, match=said):
        Journal(path, changed)
    assert path.read_bytes() == before
    with Journal(path, changed, overwrite=True) as journal:
        assert journal.answer((0, 0)) is None


def test_two_evaluations_do_not_write_one_journal(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    with Journal(path, SETTINGS) as journal:
        journal.add_answer((0, 0), Answer("kept"))
        for overwrite in (False, True):
            with pytest.raises(ConfigError, match="another command is writing it"):
                Journal(path, SETTINGS, overwrite=overwrite)
        assert journal.answer((0, 0)) == Answer("kept")


def test_a_file_that_is_no_journal_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    path.write_text('{"prompt": "p"}\n')
    with pytest.raises(ConfigError, match="is no journal of an evaluation"):
        Journal(path, SETTINGS)
    Journal(path, SETTINGS, overwrite=True).__exit__()
    with path.open("a") as file:
        file.write('{"prompt": 0, "sample": 0, "settings": "other"}\n')
    with pytest.raises(ConfigError, match="line 2: is not of this journal"):
        Journal(path, SETTINGS)
