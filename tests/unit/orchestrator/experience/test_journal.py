"""The journal of experience on disk."""

import mmap
import resource
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest

from orchestrator.data.prompts import Prompt
from orchestrator.experience.experience import SCHEMA, Collected
from orchestrator.experience.journal import ExperienceJournal
from quartet.columns import Columns
from tests.unit import experiences
from tests.unit.experiences import Experience, each
from tests.unit.fakes import make_config, make_prompts, respond

PROMPTS = make_prompts(3)
FIRST = 6
"""The number of the first sample."""


def prompt(number: int) -> Prompt:
    return PROMPTS[number - FIRST]


def changed(number: int, **fields: Any) -> Prompt:
    return replace(prompt(number), **fields)


def collected(version: int = 1) -> Collected:
    draw = np.random.default_rng(version)
    rows = []
    for index, asked in enumerate(PROMPTS):
        sample = respond(index, asked.prompt_ids, version)
        if index == 1:  # begun by a replica of the version before, and gone on with elsewhere
            spans = ((version - 1, 0, 1), (version, 1, len(sample.response_ids)))
            sample = replace(sample, spans=spans, kept=1)
        ref_logprobs, values, old = (draw.normal(size=len(sample.response_ids)).astype(np.float32) for _ in range(3))
        score = float(np.float32(draw.normal()))
        rows.append(Experience(FIRST + index, asked, sample, score, ref_logprobs, values, old_logprobs=old))
    return experiences.collected(rows, 1.25, 0.1, repeated=4, group_s=None if version == 1 else 0.5)


def same(actual: Collected | None, wanted: Collected) -> bool:
    assert actual is not None
    for a, b in zip(each(actual), each(wanted), strict=True):
        assert (a.number, a.prompt) == (b.number, b.prompt)
        assert (a.score, a.sample.spans, a.sample.finish_reason) == (b.score, b.sample.spans, b.sample.finish_reason)
        assert a.sample.kept == b.sample.kept
        for name in ("ref_logprobs", "values", "old_logprobs"):
            assert getattr(a, name).tolist() == getattr(b, name).tolist()
        assert a.sample.response_ids.tolist() == b.sample.response_ids.tolist()
        assert a.sample.logprobs.tolist() == b.sample.logprobs.tolist()
    assert actual.columns.pack() == wanted.columns.pack()
    names = ("generate_s", "score_s", "repeated", "group_s")
    return all(getattr(actual, name) == getattr(wanted, name) for name in names)


def journal(folder: Path, policy: Path, **section: Any) -> ExperienceJournal:
    return ExperienceJournal(folder / "journal", make_config(policy, **section))


def test_what_was_kept_comes_back_bit_for_bit(tmp_path: Path, policy_folder: Path) -> None:
    for step in (1, 2):
        journal(tmp_path, policy_folder).write(step, collected(step))
    for step in (1, 2):
        assert same(journal(tmp_path, policy_folder).read(step, prompt), collected(step))
    assert journal(tmp_path, policy_folder).read(3, prompt) is None


def test_it_forgets_what_a_checkpoint_holds(tmp_path: Path, policy_folder: Path) -> None:
    kept = journal(tmp_path, policy_folder)
    for step in range(1, 12):
        kept.write(step, collected())
    kept.forget(9)
    assert [step for step in range(1, 12) if kept.read(step, prompt)] == [10, 11]


@pytest.mark.parametrize("section", [{"seed": 1}, {"algorithm": {"minibatch_size": 1, "gamma": 0.5}}])
def test_another_configurations_samples_are_left_alone(
    tmp_path: Path, policy_folder: Path, section: dict[str, Any]
) -> None:
    journal(tmp_path, policy_folder).write(1, collected())
    assert journal(tmp_path, policy_folder, **section).read(1, prompt) is None
    # What has nothing to do with the samples may change.
    assert journal(tmp_path, policy_folder, timeouts={"train_s": 5}).read(1, prompt)


def test_a_change_is_told_unless_samples_do_not_depend_on_it(tmp_path: Path, policy_folder: Path) -> None:
    journal(tmp_path, policy_folder).write(1, collected())
    notes: list[str] = []
    for loop, is_kept in (({"mismatch_limit": 1.0}, True), ({"max_staleness": 1}, False)):
        changed = ExperienceJournal(tmp_path / "journal", make_config(policy_folder, loop=loop), notes.append)
        assert (changed.read(1, prompt) is not None) == is_kept
    assert notes == ["journal: step 1 is of another configuration, data or models, and is sampled again"]


def test_other_prompts_samples_are_left_alone(tmp_path: Path, policy_folder: Path) -> None:
    kept = journal(tmp_path, policy_folder)
    kept.write(1, collected())
    assert kept.read(1, lambda number: PROMPTS[::-1][number - FIRST]) is None
    other: dict[str, Any]
    for other in ({"label": "other"}, {"task": "other"}, {"columns": {"unit": "other"}}):
        assert kept.read(1, partial(changed, **other)) is None
    assert kept.read(1, prompt)


@pytest.mark.parametrize("left", [b"", b"\x81", b"\x93\x01\x02\x03", b"no msgpack at all"])
def test_a_broken_step_is_told_and_sampled_again(tmp_path: Path, policy_folder: Path, left: bytes) -> None:
    notes: list[str] = []
    kept = ExperienceJournal(tmp_path / "journal", make_config(policy_folder), notes.append)
    (tmp_path / "journal" / "step-000001.msgpack").write_bytes(left)
    assert kept.read(1, prompt) is None
    assert "step 1 is sampled again" in notes[0]


@pytest.mark.parametrize("field", ["score", "ref_logprobs", "values", "logprobs"])
def test_a_number_that_is_not_finite_is_told_and_sampled_again(
    tmp_path: Path, policy_folder: Path, field: str
) -> None:
    notes: list[str] = []
    kept = ExperienceJournal(tmp_path / "journal", make_config(policy_folder), notes.append)
    step = collected()
    wrong = step.columns[field].copy()
    wrong[1] = np.nan
    with_it = step.columns.with_rows if field == "score" else step.columns.with_sampled
    step = replace(step, columns=with_it(**{field: wrong}))
    kept.write(1, step)
    assert kept.read(1, prompt) is None
    assert f"columns.{field}[1] is nan" in notes[0]
    assert "step 1 is sampled again" in notes[0]


@pytest.mark.parametrize("number", [-1, 9, 1 << 62])
def test_a_number_without_a_prompt_is_told_and_sampled_again(
    tmp_path: Path, policy_folder: Path, number: Any
) -> None:
    notes: list[str] = []
    kept = ExperienceJournal(tmp_path / "journal", make_config(policy_folder), notes.append)
    kept.write(1, collected())
    path = tmp_path / "journal" / "step-000001.msgpack"
    raw = msgpack.unpackb(path.read_bytes())
    columns = Columns.unpack(raw["columns"], SCHEMA)
    numbers = columns["number"].copy()
    numbers[1] = number
    raw["columns"] = columns.with_rows(number=numbers).pack()
    path.write_bytes(msgpack.packb(raw))
    assert kept.read(1, prompt) is None
    assert "step 1" in notes[0]
    assert "sampled again" in notes[0]


def test_a_file_that_cannot_be_written_is_told_and_costs_nothing_else(tmp_path: Path, policy_folder: Path) -> None:
    notes: list[str] = []
    kept = ExperienceJournal(tmp_path / "journal", make_config(policy_folder), notes.append)
    allowed, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, most))
    try:
        kept.write(1, collected())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (allowed, most))
    assert "File too large" in notes[0]
    kept.write(1, collected())
    assert len(notes) == 1


def test_a_batch_that_no_record_holds_is_told_and_costs_nothing_else(
    tmp_path: Path, policy_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    notes: list[str] = []
    kept = ExperienceJournal(tmp_path / "journal", make_config(policy_folder), notes.append)
    # Takes no memory, as nothing is written into it.
    with mmap.mmap(-1, 1 << 32) as large, memoryview(large) as piece, monkeypatch.context() as patched:
        patched.setattr(Columns, "buffers", lambda columns: [piece])
        kept.write(1, collected())
    assert kept.read(1, prompt) is None
    assert notes == [
        "journal: step 1 could not be kept: its columns have 4294967296 bytes, and a record holds 4294967295 at most"
    ]
    kept.write(1, collected())
    assert same(kept.read(1, prompt), collected())


def test_what_follows_a_step_that_is_kept_again_is_of_another_past(tmp_path: Path, policy_folder: Path) -> None:
    kept = journal(tmp_path, policy_folder)
    for step in (1, 2, 3):
        kept.write(step, collected(step))
    kept.write(2, collected(5))
    assert kept.read(1, prompt)
    assert same(kept.read(2, prompt), collected(5))
    assert kept.read(3, prompt) is None


def test_bytes_that_are_not_experience_are_told_and_sampled_again(tmp_path: Path, policy_folder: Path) -> None:
    notes: list[str] = []
    kept = ExperienceJournal(tmp_path / "journal", make_config(policy_folder), notes.append)
    kept.write(1, collected())
    path = tmp_path / "journal" / "step-000001.msgpack"
    raw = msgpack.unpackb(path.read_bytes())
    for columns in (b"", raw["columns"][:-1], Columns.unpack(raw["columns"], SCHEMA).without("score").pack()):
        path.write_bytes(msgpack.packb(raw | {"columns": columns}))
        assert kept.read(1, prompt) is None
        assert "step 1 is sampled again" in notes.pop()


def test_the_patience_with_an_environment_decides_on_no_sample(tmp_path: Path, policy_folder: Path) -> None:
    first = {"kind": "a:B", "max_turns": 2, "max_tokens": 600}
    journal(tmp_path, policy_folder, environment=first).write(1, collected())
    for other in ({"kind": "a:C"}, {"max_turns": 3}, {"max_tokens": 601}):
        assert journal(tmp_path, policy_folder, environment=first | other).read(1, prompt) is None
    patient = first | {"answer_s": 7, "attempts": 9}
    assert same(journal(tmp_path, policy_folder, environment=patient).read(1, prompt), collected())


def test_the_patience_with_an_agent_decides_on_no_sample(tmp_path: Path, policy_folder: Path) -> None:
    first = {"kind": "a:b", "max_tokens": 600, "sequences": 2}
    journal(tmp_path, policy_folder, agent=first).write(1, collected())
    for other in ({"kind": "a:c"}, {"max_tokens": 601}, {"sequences": 3}):
        assert journal(tmp_path, policy_folder, agent=first | other).read(1, prompt) is None
    patient = first | {"conversation_s": 7, "at_once": 9, "attempts": 9}
    assert same(journal(tmp_path, policy_folder, agent=patient).read(1, prompt), collected())
