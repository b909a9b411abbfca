"""The journal of an evaluation of rows: a JSONL file that says what has been answered and scored, as it comes.

Its first line has the settings. Each other one is keyed by the number of the prompt's row, the number of the sample
and the hash of the settings, and holds an answer or the verdict on it; of two of a kind with the same key the later
one counts.
"""

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Self

from orchestrator.evaluation.hub import Verdict
from orchestrator.evaluation.rows import dumped, hold, lines
from orchestrator.monitoring.jsonl import parse_object
from quartet.config.base import ConfigError
from quartet.config.explain import shown
from quartet.folders import naming

Key = tuple[int, int]
"""Numbers of a row and of a sample, both from 0."""


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer to a prompt, or the reason why there is none."""

    response: str | None
    ended: bool | None = None
    """True if it came to its end, and was not cut off by a limit; None if that is not known."""
    policy_version: int | None = None
    """Version of the weights, if the endpoint says it."""
    problem: str = ""
    """The reason why a response is missing; empty if there is one."""
    may_pass: bool = False
    """True if another try may have a response."""


class Journal:
    """A context, which closes the file."""

    def __init__(self, path: Path, settings: Mapping[str, Any], *, overwrite: bool = False) -> None:
        """Opens the journal, or begins one.

        Args:
            path: the file.
            settings: whatever decides on answers and scores, by the name that the user knows it under.
            overwrite: begin again.

        Raises:
            ConfigError: the journal there is of other settings, the first of which is named; or is damaged.
        """
        self.path = path
        self.hash = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:16]
        self._answers: dict[Key, int] = {}
        self._verdicts: dict[Key, int] = {}
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
        self._file = path.open("r+b")
        try:
            hold(self._file, path)
            if overwrite:
                self._file.truncate(0)
            self._end = self._read(settings)
            if not self._end:
                self._add({"settings": settings, "hash": self.hash})
        except BaseException:
            with naming(path):
                self._file.close()
            raise

    def _read(self, settings: Mapping[str, Any]) -> int:
        """Finds all lines, cuts off a last one that was not finished, and returns where the next one belongs."""
        end = 0
        for number, offset, line in lines(self._file, str(self.path)):
            if not line.endswith(b"\n"):
                self._file.truncate(offset)
                return offset
            where = f"{self.path}, line {number}"
            entry = parse_object(line, where)
            end = offset + len(line)
            if number == 1:
                self._check(entry.get("settings"), settings)
                continue
            key = entry.get("prompt"), entry.get("sample")
            if entry.get("settings") != self.hash or not isinstance(key[0], int) or not isinstance(key[1], int):
                raise ConfigError(f"{where}: is not of this journal; --overwrite begins again")
            (self._verdicts if "outcomes" in entry else self._answers)[key] = offset  # type: ignore[index]
        return end

    def _check(self, before: Any, now: Mapping[str, Any]) -> None:
        if not isinstance(before, dict):
            raise ConfigError(f"{self.path}: is no journal of an evaluation; give another --output")
        for name in dict.fromkeys([*now, *before]):
            if before.get(name) != now.get(name):
                raise ConfigError(
                    f"{name}: was {shown(before.get(name))} in the evaluation that {self.path} is of, and is "
                    f"{shown(now.get(name))} now; give another --output, or --overwrite to begin again"
                )

    def answer(self, key: Key) -> Answer | None:
        """The last answer, if there is one."""
        entry = self._entry(self._answers.get(key))
        return None if entry is None else Answer(**{each.name: entry[each.name] for each in fields(Answer)})

    def verdict(self, key: Key) -> Verdict | None:
        """The verdict on the answer, if there is one."""
        entry = self._entry(self._verdicts.get(key))
        return None if entry is None else Verdict(entry["scores"], entry["outcomes"], entry["reasons"])

    def add_answer(self, key: Key, answer: Answer) -> None:
        """Writes an answer."""
        self._answers[key] = self._add(self._key(key) | asdict(answer))

    def add_verdict(self, key: Key, verdict: Verdict) -> None:
        """Writes a verdict."""
        self._verdicts[key] = self._add(self._key(key) | asdict(verdict))

    def _key(self, key: Key) -> dict[str, Any]:
        return {"prompt": key[0], "sample": key[1], "settings": self.hash}

    def _entry(self, offset: int | None) -> dict[str, Any] | None:
        if offset is None:
            return None
        self._file.seek(offset)
        return parse_object(self._file.readline(), str(self.path))

    def _add(self, values: Mapping[str, Any]) -> int:
        """Writes a line and returns its place. A process that is killed afterwards does not lose it."""
        offset, line = self._end, dumped(values)
        with naming(self.path):
            self._file.seek(offset)
            self._file.write(line)
            self._file.flush()
        self._end += len(line)
        return offset

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with naming(self.path):
            os.fsync(self._file.fileno())
            self._file.close()
