"""What a replica needs of an engine. Tests inject a fake; the real one is engine.py."""

from typing import TYPE_CHECKING, Any, Protocol

from services.common.arrays import Ints
from services.rollout.sample import Sample, Sampling

if TYPE_CHECKING:  # it needs torch, which Serve's building process can do without
    from services.common.weight_transfer.manifest import Manifest

LOST = -1
"""Version of an engine without whole weights: below every min_version, so it serves nobody."""


class Engine(Protocol):
    """Samples, and takes new weights. Everything runs on one event loop."""

    version: int
    """Policy version that serves now; LOST when a push broke off that had taken the model apart."""
    checksum: str
    """Of the bytes that the last push brought; empty before the first."""
    checksums: dict[int, str]
    """The same for the last few versions."""
    backend: str
    """How weights arrive: "gloo" or "nccl"."""
    workers: int
    """Processes that take part in a push."""
    vocab_size: int
    max_length: int
    tokenizer: Any

    async def generate(self, index: int, prompt_ids: Ints, sampling: Sampling, seed: int | None) -> Sample:
        """Samples one response; cancelling aborts it in the engine."""

    async def check_health(self) -> None:
        """Raises when the engine is dead."""

    def running(self) -> int:
        """Requests that are not finished."""

    async def join(self, init_info: dict[str, Any]) -> None:
        """Joins a push group; returns when all its members have."""

    async def pause(self, in_flight: str) -> None:
        """Stops generation and opens a weight update."""

    async def receive(self, manifest: "Manifest") -> str:
        """Receives the weights; returns their checksum."""

    async def commit(self, version: int) -> None:
        """Swaps them in and resumes generation."""

    async def abort(self) -> bool:
        """Drops them and resumes generation; False, and paused at version LOST, if the old ones are gone too."""

    def shutdown(self) -> None:
        """Ends the engine and its processes."""
