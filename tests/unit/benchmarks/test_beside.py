"""The windows of benchmarks/beside have whole steps alone or beside clients, and its figures count what was done."""

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import beside
from benchmarks.beside import CHAT, PURPOSES, WARM_UP, Answers, Window, windows_of
from benchmarks.ended import SIDE
from benchmarks.figures import FILES
from benchmarks.vs_trl.cases import CASES
from benchmarks.vs_trl.sides import STAGES
from quartet.wire.callers import Purpose


class Run:
    """A run whose steps end as they are waited for, and clients that note the steps in which they come and go."""

    def __init__(self) -> None:
        self.under_way = 1
        self.came: list[tuple[Purpose, int]] = []
        self.went: list[int] = []

    async def reached(self, _: Path, step: int, __: Any) -> None:
        await asyncio.sleep(0)
        self.under_way = step + 1

    async def ask(self, purpose: Purpose) -> None:
        self.came.append((purpose, self.under_way))
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            self.went.append(self.under_way)


def test_steps_in_which_clients_come_or_go_are_in_no_window(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    run = Run()
    monkeypatch.setattr(beside, "_reached", run.reached)
    windows: list[Window] = asyncio.run(windows_of(tmp_path, None, run, 5, 3))  # type: ignore[arg-type]
    asked = [range(first + 1, last) for (_, first), last in zip(run.came, run.went, strict=True)]
    assert [window.steps for window in windows[1::2]] == asked
    assert [window.purpose for window in windows[1::2]] == [purpose for purpose, _ in run.came] == list(PURPOSES)
    changed = {*(step for _, step in run.came), *run.went}
    alone = [step for window in windows[::2] for step in window.steps]
    # The first window follows a step that is left out too, as all do.
    assert alone == [step for step in range(WARM_UP + 2, run.under_way) if step not in changed.union(*asked)]


def test_the_share_counts_the_tokens_of_responses_as_they_were(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(FILES, str(tmp_path / "figures.jsonl"))
    case = CASES["20M-uneven"]
    line = dict.fromkeys(("step", *STAGES), 2.0) | {"length": 38.0}
    windows = [
        Window(range(step, step + 1), purpose, 1.0, 0.1, 2.0)
        for step, purpose in enumerate((Purpose.TRAINING, PURPOSES[0], Purpose.TRAINING, PURPOSES[1]), 1)
    ]
    windows.append(Window(range(5, 6), Purpose.TRAINING, 1.0, 0.1, 2.0))
    answers = {(purpose, CHAT): Answers(1, 800, [0.1], 0, 1.0) for purpose in PURPOSES}
    clients: Any = SimpleNamespace(answers=answers, named=CHAT)
    beside._tell(case, windows, [line] * 5, clients)
    records = [json.loads(text) for text in (tmp_path / "figures.jsonl").read_text().splitlines()]
    # 800 tokens a second in steps of 2 s, beside 64 responses of 12 + 38 tokens.
    assert [record["share"] for record in records] == [pytest.approx(0.5)] * 2


def test_a_client_that_fails_ends_the_run_at_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """`quartet train` is a process in a session of its own, for which a thread waits."""
    ended: list[tuple[str, str]] = []
    monkeypatch.setattr(beside, "end_marked", lambda *mark: ended.append(mark))

    async def broken(*_: Any) -> list[Window]:
        raise AssertionError("refused")

    monkeypatch.setattr(beside, "windows_of", broken)
    quartet: Any = SimpleNamespace(updates=lambda count: [])
    with pytest.raises(AssertionError, match="refused"):
        asyncio.run(beside._measured(tmp_path, quartet, None, 1, 1))  # type: ignore[arg-type]
    assert ended == [(str(tmp_path), SIDE)]
