import asyncio
import contextlib
import io
import logging
from datetime import UTC, datetime
from pathlib import Path

import pytest

from orchestrator.monitoring.metrics import RUN_LOG
from orchestrator.monitoring.progress import PlainProgress
from orchestrator.monitoring.run_log import RunLog

logger = logging.getLogger("quartet")
AT = "2026-11-28 09:05:07  "


def clock() -> datetime:
    return datetime(2026, 11, 28, 9, 5, 7, tzinfo=UTC)


def test_what_was_told_and_logged_is_in_the_file_in_its_order(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = io.StringIO()
    with RunLog.of(PlainProgress(shown), clock) as log:
        log.note("starting")
        logger.info("weights travel by %s", "ipc")
        assert not list(tmp_path.iterdir())
        log.keep_in(tmp_path)
        log.keep_in(tmp_path)  # as after a restart
        logger.warning("push of version %d, attempt 1", 2)
        log.note("a\x1b]0;title\x07")
        log.step(1, {"score/mean": 0.5}, 3.0)
        whole = (tmp_path / RUN_LOG).read_text()
    logger.info("after the run")
    lines = ["starting", "weights travel by ipc", "push of version 2, attempt 1", r"a\x1b]0;title\x07"]
    assert whole == "".join(f"{AT}{line}\n" for line in lines)
    assert (tmp_path / RUN_LOG).read_text() == f"{whole}{AT}finished\n"
    # Steps and notes are shown as before, and warnings are no less than without a log.
    assert [line.split("  ")[0] for line in shown.getvalue().splitlines()] == ["starting", lines[3], "step 1/0"]
    assert capsys.readouterr().err == "push of version 2, attempt 1\n"
    assert (logger.level, logger.filters) == (logging.NOTSET, [])


@pytest.mark.parametrize(
    ("error", "last"),
    [
        (ExceptionGroup("both", [ValueError("this"), ValueError("that")]), "ended by an error: this; that"),
        (asyncio.CancelledError(), "interrupted, by Ctrl-C, SIGTERM or the script that runs it"),
        (KeyboardInterrupt(), "interrupted, by Ctrl-C, SIGTERM or the script that runs it"),
    ],
)
def test_the_file_says_how_a_run_ended(tmp_path: Path, error: BaseException, last: str) -> None:
    (tmp_path / RUN_LOG).write_text("of the run before\n")
    with contextlib.suppress(type(error)), RunLog.of(PlainProgress(io.StringIO()), clock) as log:
        log.keep_in(tmp_path)
        raise error
    assert (tmp_path / RUN_LOG).read_text() == f"of the run before\n{AT}{last}\n"


def test_a_run_that_has_no_folder_yet_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with RunLog.of(PlainProgress(io.StringIO())) as log:
        log.note("a note")
    assert not list(tmp_path.iterdir())


def test_a_log_that_cannot_be_opened_is_told_and_ends_no_run(tmp_path: Path) -> None:
    (tmp_path / RUN_LOG).symlink_to("no/such/place")
    shown = io.StringIO()
    with RunLog.of(PlainProgress(shown)) as log:
        log.keep_in(tmp_path)
        log.note("starting")
    assert shown.getvalue() == f"{tmp_path / RUN_LOG} cannot be written: No such file or directory\nstarting\n"


def test_a_full_disk_ends_no_run(tmp_path: Path) -> None:
    (tmp_path / RUN_LOG).symlink_to("/dev/full")
    shown = io.StringIO()
    with RunLog.of(PlainProgress(shown)) as log:
        log.keep_in(tmp_path)
        log.note("checkpoint of step 3: no space left")
    assert shown.getvalue() == "checkpoint of step 3: no space left\n"
