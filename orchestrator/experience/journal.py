"""The journal of experience: the samples of each step, kept on disk until a checkpoint covers the step.

A run that restarts from a checkpoint reads the steps since then from the journal: nothing is sampled again, and
training ends with the same weights, bit for bit. For example a run with a checkpoint of step 20 fails in step 24: it
restarts at 20 and takes the samples of steps 21 to 23, and of 24 if they were complete, from here.
"""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import msgpack

from orchestrator.config.run import OrchestratorConfig
from orchestrator.data.prompts import Prompt
from orchestrator.experience.experience import Collected, Scored, schema_of
from quartet.columns import Columns
from quartet.folders import replace_file
from quartet.wire.errors import InvalidArgument

_SAMPLING_SECTIONS: dict[str, Any] = {
    **dict.fromkeys(("seed", "batch_size", "data", "sampling", "algorithm", "policy"), True),
    "loop": {"max_staleness", "depth"},
}
"""Sections of the configuration on which a step's samples depend, and of `loop` its keys."""
_CONVERSATIONS = {
    "environment": {"kind", "max_turns", "max_tokens"},
    "agent": {"kind", "max_tokens", "sequences"},
}
"""Sections that a run may have besides, and their keys on which they depend; the others decide how many conversations
go on at a time, and when one counts as failed."""
_BYTES = b"\xc6"
"""Type of a msgpack value: bytes, whose number follows in four."""
_MOST_BYTES = (1 << 32) - 1
"""Most bytes of columns that such a value has."""


class ExperienceJournal:
    """One file per step in a folder, with the step's samples by number. Files are never seen half written."""

    def __init__(
        self,
        folder: Path,
        config: OrchestratorConfig,
        note: Callable[[str], None] = lambda text: None,
        *,
        services: Mapping[str, str] | None = None,
    ) -> None:
        """
        Args:
            folder: folder of the files, made if it does not exist.
            config: the run's configuration, on which samples depend.
            note: called with a message if a file cannot be written or read; the run then continues, and samples again
                after a restart.
            services: digests of the services' models, and of the environment; experience from others is not read.
        """
        self._folder = folder
        self._note = note
        self._schema = schema_of(config.algorithm.score_names)
        has = {name: keys for name, keys in _CONVERSATIONS.items() if getattr(config, name) is not None}
        self._settings = config.model_dump_json(include=_SAMPLING_SECTIONS | has).encode()
        self._settings += repr(sorted((services or {}).items())).encode()
        folder.mkdir(parents=True, exist_ok=True)

    def read(self, step: int, prompt: Callable[[int], Prompt]) -> Collected | None:
        """The experience of `step` in its order; None if it is missing, or was collected from other prompts or under
        another configuration.

        Args:
            step: step of the run.
            prompt: returns the prompt of a sample, given its number.
        """
        try:
            raw = msgpack.unpackb(self._path(step).read_bytes())
            columns = Columns.unpack(raw["columns"], self._schema)
            numbers = columns["number"].tolist()
            prompts = [prompt(number) for number in numbers]
            if raw["digest"] != self._digest(list(zip(numbers, prompts, strict=True))):
                self._note(f"journal: step {step} is of another configuration, data or models, and is sampled again")
                return None
            discarded = tuple(Scored(int(n), int(row), float(score)) for n, row, score in raw["discarded"])
            seconds = float(raw["generate_s"]), float(raw["score_s"])
            group_s = None if raw["group_s"] is None else float(raw["group_s"])
            return Collected(columns, prompts, *seconds, int(raw["repeated"]), group_s, discarded)
        except FileNotFoundError:
            return None
        except (OSError, ValueError, LookupError, TypeError, ArithmeticError, InvalidArgument) as error:
            self._note(f"{self._path(step)} cannot be read ({error}); step {step} is sampled again")
            return None

    def write(self, step: int, collected: Collected) -> None:
        """Writes the experience of `step` before it is trained on. Deletes records of later steps; they belong to an
        abandoned timeline."""
        asked = list(zip(collected.trained_numbers, collected.prompts, strict=True))
        raw = {
            "digest": self._digest(asked),
            "generate_s": collected.generate_s,
            "score_s": collected.score_s,
            "repeated": collected.repeated,
            "group_s": collected.group_s,
            "discarded": list(collected.discarded),
        }
        packer, columns = msgpack.Packer(), collected.columns.buffers()
        head = [packer.pack_map_header(len(raw) + 1), *map(packer.pack, chain.from_iterable(raw.items()))]
        size = sum(map(len, columns))
        try:
            self._remove(lambda kept: kept > step)
            if size > _MOST_BYTES:
                raise OSError(f"its columns have {size} bytes, and a record holds {_MOST_BYTES} at most")
            # Last, and written as they lie in memory: msgpack would copy them all.
            head += [packer.pack("columns"), _BYTES + size.to_bytes(4, "big")]
            replace_file(self._path(step), *head, *columns)
        except OSError as error:
            self._note(f"journal: step {step} could not be kept: {error}")

    def forget(self, step: int) -> None:
        """Deletes the records of `step` and of all steps before it."""
        self._remove(lambda kept: kept <= step)

    def _remove(self, superfluous: Callable[[int], bool]) -> None:
        for path in self._folder.glob("step-*.msgpack"):
            number = path.stem.removeprefix("step-")
            if number.isdecimal() and superfluous(int(number)):
                path.unlink()

    def _path(self, step: int) -> Path:
        return self._folder / f"step-{step:06d}.msgpack"

    def _digest(self, asked: Sequence[tuple[int, Prompt]]) -> bytes:
        digest = hashlib.sha256(self._settings)
        for number, prompt in asked:
            digest.update(b"%d\n" % number)
            facts = json.dumps([prompt.label, prompt.task, prompt.columns], sort_keys=True)
            digest.update(prompt.prompt_ids.astype("<i4").tobytes() + b"\n" + facts.encode() + b"\n")
        return digest.digest()
