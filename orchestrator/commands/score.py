"""`quartet score`: rows of a file or of standard input with their scores, in order, in memory that does not grow."""

import asyncio
import io
import os
import sys
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

from orchestrator.evaluation.hub import OUTCOMES, REASONS, SCORERS, SCORES, Hub, Scorer, Verdict, check_free
from orchestrator.evaluation.rows import LONGEST, Row, dumped, hold, rows
from orchestrator.monitoring.bar import Bar
from orchestrator.monitoring.jsonl import parse_object
from quartet.config.base import MIB, ConfigError
from quartet.folders import naming, opened
from quartet.threads import in_thread
from quartet.wire.outcomes import Outcome

AT_ONCE = 8
"""Batches that are being scored at the same time."""
MOST_ROWS, MOST_BYTES = 64, MIB
"""Rows and bytes of responses of a batch: it is sent once it has so many."""
_SCORED = Outcome.SCORED.name.lower()


@dataclass(slots=True)
class Tally:
    """Numbers of rows by their outcome."""

    rows: int = 0
    """All that were written."""
    outcomes: Counter[tuple[str, str]] = field(default_factory=Counter)
    """(scorer, outcome) -> number of rows."""
    first: dict[str, str] = field(default_factory=dict)
    """Scorer -> the reason and the line of its first row without a score."""

    def add(self, row: Row, verdict: Verdict) -> None:
        """Counts a row."""
        self.rows += 1
        self.outcomes.update(verdict.outcomes.items())
        for scorer, reason in verdict.reasons.items():
            self.first.setdefault(scorer, f"line {row.line}: {reason}")

    @property
    def unscored(self) -> int:
        """Number of rows without a score, for each scorer once."""
        return sum(count for (_, outcome), count in self.outcomes.items() if outcome != _SCORED)

    def lines(self, scorers: Mapping[str, Scorer]) -> Iterator[str]:
        """A line for each scorer, for people."""
        for name, scorer in scorers.items():
            counted = {outcome: count for (its, outcome), count in self.outcomes.items() if its == name}
            scored = counted.pop(_SCORED, 0)
            others = "".join(f", {count} {outcome.replace('_', ' ')}" for outcome, count in sorted(counted.items()))
            why = f" ({self.first[name]})" if name in self.first else ""
            yield f"{name} ({scorer.name} {scorer.hash[:12]}): {scored} scored{others}{why}"


async def score_file(
    file: Path | None,
    output: Path | None,
    connect: Callable[[], Awaitable[Hub]],
    note: Callable[[str], None],
    *,
    overwrite: bool = False,
) -> None:
    """Scores a file or standard input, into a file or to standard output. A bar on standard error, if that is a
    terminal, shows how far it is.

    Args:
        file: the rows; None: standard input.
        output: where the scored rows go. If it exists, it is continued. None: standard output.
        connect: makes the hub.
        note: called with messages for the user.
        overwrite: replace the output if it exists.

    Raises:
        ConfigError, ServiceError, ExceptionGroup: as `score` does.
    """
    name = str(file or "standard input")
    if file is not None and (file.is_dir() or not file.exists()):
        raise ConfigError(f"{file}: no such file")
    if file is not None and output is not None and output.exists() and output.samefile(file):
        raise ConfigError(f"--output: {output} is the input; name another file")
    goes_on = output is not None and output.exists() and not overwrite
    async with await connect() as hub:
        with ExitStack() as stack:
            source = await in_thread(lambda: _standard_input() if file is None else file.open("rb"), "rows")
            if file is not None:
                stack.enter_context(source)
            to: BinaryIO = sys.stdout.buffer
            if output is not None:
                output.parent.mkdir(parents=True, exist_ok=True)
                to = stack.enter_context(opened(output, "ab", output))
                hold(to, output)
                if not goes_on:
                    to.truncate(0)
            # A pipe, such as that of `<(zcat rows.jsonl.gz)`, can be read once.
            counted = file if file is not None and file.is_file() else None
            total = None if counted is None else await in_thread(lambda: _count_rows(counted), "number of rows")
            bar = stack.enter_context(Bar(sys.stderr, "scoring", total))

            def write(written: bytes) -> None:
                with nullcontext() if output is None else naming(output):
                    to.write(written)
                    to.flush()

            def advance(count: int, tally: Tally) -> None:
                bar.advance(count, f"{tally.unscored} without a score" if tally.unscored else "")

            done = output if goes_on else None
            tally = await score(source, name, hub, write, done=done, advance=advance)
        for line in tally.lines(hub.scorers):
            note(line)
    if output is not None:
        note(f"{tally.rows} rows are in {output}")


def _standard_input() -> BinaryIO:
    """A reader of its own, never closed: at the end of a program that is interrupted a thread may still wait in it,
    and Python could close neither it nor `sys.stdin` then."""
    try:
        return os.fdopen(os.dup(sys.stdin.fileno()), "rb")
    except io.UnsupportedOperation:  # a program gives this one its input
        return sys.stdin.buffer


def _count_rows(file: Path) -> int:
    """Number of lines, at the speed of the disk; empty ones count too."""
    with file.open("rb") as opened:
        return sum(block.count(b"\n") for block in iter(lambda: opened.read(MIB), b""))


async def score(
    file: BinaryIO,
    name: str,
    hub: Hub,
    write: Callable[[bytes], object],
    *,
    done: Path | None = None,
    advance: Callable[[int, Tally], None] = lambda rows, tally: None,
) -> Tally:
    """Scores the rows that are not done, and writes them in their order.

    Args:
        file: the rows, as JSONL.
        name: its name, for errors.
        hub: gives the scores.
        write: takes the lines of a batch that is scored.
        done: the output of an earlier command whose rows are passed over; None: there is none.
        advance: called with the number of rows that were just written or passed over.

    Returns:
        The rows by their outcome.

    Raises:
        ConfigError: a row is wrong, which the message names by line and field, and all rows before it are written; or
            what is done is of other rows or other scorers.
        ServiceError, ExceptionGroup of these: the hub does not answer.
    """
    tally, waiting = Tally(), deque[tuple[list[Row], asyncio.Task[list[Verdict]]]]()
    source = rows(file, name)
    if done is not None:
        await in_thread(lambda: _pass_over(source, name, done, hub.scorers, tally), "rows that are done")
        advance(tally.rows, tally)

    async def finish() -> None:
        batch, task = waiting.popleft()
        verdicts = await task
        pairs = list(zip(batch, verdicts, strict=True))
        write(b"".join(dumped(verdict.on(row.values, hub.scorers)) for row, verdict in pairs))
        for row, verdict in pairs:
            tally.add(row, verdict)
        advance(len(batch), tally)

    wrong: ConfigError | None = None
    try:
        while wrong is None:
            # In a thread, as standard input may keep it waiting, and one that Ctrl-C need not wait for.
            batch, wrong = await in_thread(lambda: _batch(source, name, hub.scorers), "rows")
            if not batch and wrong is None:
                break
            if batch:
                task = asyncio.create_task(hub.score(batch, [row.response or "" for row in batch]))
                waiting.append((batch, task))
            if len(waiting) >= AT_ONCE:
                await finish()
        while waiting:
            await finish()
    finally:
        left = [task for _, task in waiting]
        for task in left:
            task.cancel()
        # They end before the hub's connection does, and what they have failed with meanwhile is known already.
        await asyncio.gather(*left, return_exceptions=True)
    if wrong is not None:
        raise wrong
    return tally


def _batch(source: Iterator[Row], name: str, scorers: Mapping[str, Scorer]) -> tuple[list[Row], ConfigError | None]:
    """The next rows, and the error of the row behind them, if it is wrong."""
    batch: list[Row] = []
    size = 0
    try:
        for row in islice(source, MOST_ROWS):
            if row.response is None:
                raise ConfigError(f"{name}, line {row.line}: response: required")
            check_free(row, scorers, name)
            batch.append(row)
            size += len(row.response)
            if size >= MOST_BYTES:
                break
    except ConfigError as error:
        return batch, error
    return batch, None


def _pass_over(source: Iterator[Row], name: str, done: Path, scorers: Mapping[str, Scorer], tally: Tally) -> None:
    """Takes the rows that `done` holds from the source and counts them; cuts off a last line that is not whole."""
    with done.open("r+b") as file:
        while line := file.readline(LONGEST << 1):
            if not line.endswith(b"\n"):
                file.seek(-len(line), os.SEEK_CUR)
                file.truncate()
                break
            where = f"{done}, line {tally.rows + 1}"
            _count(parse_object(line, where), next(source, None), where, name, scorers, tally)


def _count(
    written: Mapping[str, Any],
    row: Row | None,
    where: str,
    name: str,
    scorers: Mapping[str, Scorer],
    tally: Tally,
) -> None:
    """Counts a row that is done. ConfigError unless it is this row with verdicts of these scorers."""
    advice = "continue with the same input and scorers, give another --output, or --overwrite"
    ours = {SCORES, OUTCOMES, REASONS, SCORERS}
    if row is None or any(written.get(key) != value for key, value in row.values.items() if key not in ours):
        raise ConfigError(f"{where}: is not of {name}{f', line {row.line}' if row else ''}; {advice}")
    by = written.get(SCORERS) or {}
    for scorer, its in scorers.items():
        if by.get(scorer) != its.written():
            was = by.get(scorer)
            told = f"{was['name']} {was['hash'][:12]}" if was else "not asked"
            raise ConfigError(f"{where}: scorer {scorer} was {told} and is {its.name} {its.hash[:12]} now; {advice}")
    outcomes, reasons = written.get(OUTCOMES) or {}, written.get(REASONS) or {}
    verdict = Verdict({}, {name: outcomes[name] for name in scorers})
    verdict.reasons |= {name: reasons[name] for name in scorers if name in reasons}
    tally.add(row, verdict)
