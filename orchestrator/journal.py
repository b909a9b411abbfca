"""The journal of experience: what each step was trained on, on disk until a checkpoint makes it superfluous.

A run that goes back to a checkpoint takes the steps since then from here: nothing that was sampled is sampled again,
and training ends with the same weights, bit for bit.
"""

import hashlib
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
from google.protobuf.message import DecodeError

from orchestrator.config import OrchestratorConfig
from orchestrator.data import Prompt
from orchestrator.experience import Collected, Experience
from protos import rollout_pb2 as pb
from services.common.arrays import Floats
from services.rollout.sample import Sample

_DECIDES = {"seed", "batch_size", "data", "sampling", "ppo", "policy"}
"""Sections of the configuration by which a step's samples are what they are."""


class ExperienceJournal:
    """One file per step in a folder. None of them is ever seen half written."""

    def __init__(
        self, folder: Path, config: OrchestratorConfig, note: Callable[[str], None] = lambda text: None
    ) -> None:
        """`note` is told what could not be kept or read: the run goes on, and samples again if it goes back."""
        self._folder = folder
        self._note = note
        self._settings = config.model_dump_json(include=_DECIDES).encode()
        folder.mkdir(parents=True, exist_ok=True)

    def read(self, step: int, prompts: Sequence[Prompt]) -> Collected | None:
        """What `step` was trained on; None if it is not here, or was collected from other prompts or under another
        configuration."""
        try:
            raw = msgpack.unpackb(self._path(step).read_bytes())
            if raw["digest"] != self._digest(prompts):
                return None
            experiences = [_experience(row, prompt) for row, prompt in zip(raw["rows"], prompts, strict=True)]
            return Collected(experiences, raw["generate_s"], raw["score_s"], raw["repeated"])
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError, DecodeError) as error:
            self._note(f"{self._path(step)} cannot be read ({error}); step {step} is sampled again")
            return None

    def write(self, step: int, collected: Collected) -> None:
        """Keeps what `step` is about to be trained on. What was kept of later steps is of another past: it goes."""
        try:
            self._remove(lambda kept: kept > step)
            self._write(step, collected)
        except OSError as error:
            self._note(f"journal: step {step} could not be kept: {error}")

    def _write(self, step: int, collected: Collected) -> None:
        raw = {
            "digest": self._digest([experience.prompt for experience in collected.experiences]),
            "rows": [_row(experience) for experience in collected.experiences],
            "generate_s": collected.generate_s,
            "score_s": collected.score_s,
            "repeated": collected.repeated,
        }
        aside = self._folder / ".writing"
        with aside.open("wb") as file:
            file.write(msgpack.packb(raw))
            file.flush()
            os.fsync(file.fileno())
        aside.rename(self._path(step))

    def forget(self, step: int) -> None:
        """Removes `step` and all before it."""
        self._remove(lambda kept: kept <= step)

    def _remove(self, superfluous: Callable[[int], bool]) -> None:
        for path in self._folder.glob("step-*.msgpack"):
            number = path.stem.removeprefix("step-")
            if number.isdecimal() and superfluous(int(number)):
                path.unlink()

    def _path(self, step: int) -> Path:
        return self._folder / f"step-{step:06d}.msgpack"

    def _digest(self, prompts: Sequence[Prompt]) -> bytes:
        digest = hashlib.sha256(self._settings)
        for prompt in prompts:
            digest.update(prompt.prompt_ids.astype("<i4").tobytes() + b"\n" + prompt.label.encode() + b"\n")
        return digest.digest()


def _row(experience: Experience) -> dict[str, Any]:
    return {
        "sample": experience.sample.to_wire().SerializeToString(),
        "score": experience.score,
        "ref_logprobs": experience.ref_logprobs.astype("<f4").tobytes(),
        "values": experience.values.astype("<f4").tobytes(),
    }


def _experience(row: dict[str, Any], prompt: Prompt) -> Experience:
    return Experience(
        prompt=prompt,
        sample=Sample.from_wire(pb.Sample.FromString(row["sample"])),
        score=row["score"],
        ref_logprobs=_floats(row["ref_logprobs"]),
        values=_floats(row["values"]),
    )


def _floats(data: bytes) -> Floats:
    return np.frombuffer(data, "<f4").astype(np.float32)
