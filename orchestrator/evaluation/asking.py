"""The work of an evaluation of rows: answers are asked for, several at a time, and scored as they come."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

from orchestrator.evaluation.hub import Hub
from orchestrator.evaluation.journal import Answer, Journal, Key
from orchestrator.evaluation.rows import Row, RowFile
from quartet.wire.errors import Unavailable
from quartet.wire.outcomes import MAY_PASS

TOGETHER = 32
"""Most answers that are scored in one call: so many verdicts may be lost where a command ends amid it."""
SCORING = 4
"""Calls at a time."""
FAILURES = 32
"""Answers in a row that fail for a reason which may pass, or twice as many as are asked for at a time where that is
more: the evaluation then ends, since the endpoint seems to be down."""
_MAY_PASS = frozenset(outcome.name.lower() for outcome in MAY_PASS)


class Source(Protocol):
    """Gives responses to prompts."""

    async def respond(self, index: int, row: Row, sample: int) -> Answer:
        """A response to the row with this number. ServiceError where asking for another one is of no use."""


async def ask(
    file: RowFile,
    samples: int,
    source: Source | None,
    hub: Hub,
    journal: Journal,
    *,
    at_once: int,
    advance: Callable[[str], None] = lambda remark: None,
) -> None:
    """Fills the journal with an answer to each row and sample, and with the verdict on it; what is there stays.
    Answers and scores that are missing for a reason that may pass are asked for again.

    Args:
        file: the rows.
        samples: number of responses to each row.
        source: gives the responses; None: the rows hold them.
        hub: gives the verdicts.
        journal: says what is done.
        at_once: answers that are asked for at the same time.
        advance: called after each answer that is done, with a remark for people.

    Raises:
        ExceptionGroup: of ServiceErrors, of the source or the hub.
    """
    answered: asyncio.Queue[tuple[Key, Row, str] | None] = asyncio.Queue(TOGETHER * SCORING)
    keys = ((index, sample) for index in range(len(file)) for sample in range(samples))
    waiting = (key for key in keys if not is_done(journal, key))
    failed = lost = 0

    async def respond() -> None:
        nonlocal failed, lost
        for index, sample in waiting:
            key, row = (index, sample), file[index]
            answer = Answer(row.response) if source is None else journal.answer(key)
            if answer is None or answer.may_pass:
                assert source is not None
                answer = await source.respond(index, row, sample)
                journal.add_answer(key, answer)
            if answer.response is not None:
                failed = 0
                # For scorers that ask, as a text alone does not show it.
                known = {} if answer.ended is None else {"ended": answer.ended}
                await answered.put((key, replace(row, values={**row.values, **known}), answer.response))
                continue
            failed, lost = failed + 1 if answer.may_pass else 0, lost + 1
            if failed >= max(FAILURES, 2 * at_once):
                raise Unavailable(f"{failed} answers in a row have failed; the last: {answer.problem}")
            advance(f"{lost} without an answer")

    async def score() -> None:
        while (first := await answered.get()) is not None:
            batch = [first]
            while len(batch) < TOGETHER and not answered.empty():
                if (another := answered.get_nowait()) is None:
                    answered.put_nowait(None)  # for this worker's next look
                    break
                batch.append(another)
            verdicts = await hub.score([row for _, row, _ in batch], [response for _, _, response in batch])
            for (key, _, _), verdict in zip(batch, verdicts, strict=True):
                journal.add_verdict(key, verdict)
                advance(f"{lost} without an answer" if lost else "")

    async with asyncio.TaskGroup() as scoring:
        for _ in range(SCORING):
            scoring.create_task(score())
        async with asyncio.TaskGroup() as asking:
            for _ in range(at_once):
                asking.create_task(respond())
        for _ in range(SCORING):
            await answered.put(None)


def is_done(journal: Journal, key: Key) -> bool:
    """True if the journal has a verdict that lacks no score for a reason that may pass, or an answer that can never
    have one."""
    answer, verdict = journal.answer(key), journal.verdict(key)
    refused = answer is not None and answer.response is None and not answer.may_pass
    return refused or (verdict is not None and _MAY_PASS.isdisjoint(verdict.outcomes.values()))
