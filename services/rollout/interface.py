"""The interface of an engine for a replica. Tests inject a fake; the real one is vllm/engine.py."""

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from protos import rollout_pb2 as pb
from quartet.weight_transfer.place import Place
from quartet.wire.codec import Floats, Ints
from quartet.wire.errors import InvalidArgument
from services.rollout.sample import Sample, Sampling

if TYPE_CHECKING:  # it needs torch, which Serve's building process can do without
    from quartet.weight_transfer.manifest import Manifest

NO_VERSION = -1
"""Version of an engine whose weights are incomplete. It is below every min_version, so the engine gets no
requests."""


class Engine(Protocol):
    """Samples, and takes new weights. All methods run on one event loop."""

    version: int
    """Policy version that serves now; NO_VERSION after a push failed that had taken the model apart."""
    checksum: str
    """Checksum of the last push's bytes; empty before the first push."""
    checksums: dict[int, str]
    """Version -> checksum, for the last few versions."""
    backend: str
    """Backend by which weights may arrive: "gloo", "nccl", "ipc" or "cuda-ipc"; "auto" for any of these."""
    workers: int
    """Number of processes that take part in a push."""
    place: Place
    """Machine and GPUs of these processes."""
    vocab_size: int
    end_ids: tuple[int, ...]
    """Tokens that end a text of the model. A configuration may name some that the model does not have."""
    max_length: int
    longest_manifest: int
    """Largest packed manifest, in bytes, that a push may have."""
    tokenizer: Any

    async def generate(
        self,
        index: int,
        prompt_ids: Ints,
        sampling: Sampling,
        seed: int | None,
        begun: Ints | None = None,
        report: Callable[[Sample], None] = lambda part: None,
    ) -> Sample:
        """Samples one response; cancelling aborts it in the engine. Log-probs are of the distribution that is sampled
        from: at the temperature, without entries of the vocabulary that pad it (`vocabulary_size` of
        quartet.wire.identity), and without the ends of a text before `min_new_tokens`.

        Args:
            index: index for the sample, and for those that are reported.
            prompt_ids: token ids, [P].
            sampling: sampling parameters.
            seed: seed of the response; None for the engine's own.
            begun: tokens that the response has already; the sample holds those that follow.
            report: called now and then with the tokens that have come of the unfinished response since; with all that
                are left before Unavailable is raised because the engine ended the response.
        """

    async def answer(self) -> None:
        """Returns when the engine has answered the simplest request. Raises if it is dead."""

    async def check_health(self) -> None:
        """Raises if the engine is dead, or does not answer."""

    def running(self) -> int:
        """Number of unfinished requests."""

    def check(self, manifest: "Manifest") -> None:
        """Raises InvalidArgument, which names differences, unless the manifest holds exactly the model's weights."""

    async def join(self, init_info: dict[str, Any]) -> None:
        """Joins the push group that joining_info describes; returns when all its members have joined."""

    async def leave(self) -> None:
        """Leaves the push group, if it is in one; the learner's memory is not mapped any more. No push is open."""

    async def rest(self) -> None:
        """Stops generation and releases memory until the next commit or abort."""

    async def pause(self, in_flight: str) -> None:
        """Stops generation and opens a weight update, in place of one that was left open. `in_flight` says what
        becomes of requests that are being sampled, as `weights.in_flight` (docs/weights.md) does. InvalidArgument if
        the engine cannot do that."""

    async def receive(self, manifest: "Manifest") -> str:
        """Receives the weights; returns their checksum."""

    async def score(self, sequences: Sequence[Ints]) -> list[Floats]:
        """Log-probs of all tokens but the first, over the whole vocabulary; [T - 1] for each sequence."""

    async def stale(self) -> list[str]:
        """Names of weights that the last push did not bring, as far as the engine knows."""

    async def commit(self, version: int) -> None:
        """Puts the received weights into service and resumes generation."""

    async def abort(self) -> bool:
        """Drops the received weights and resumes generation. False if the old weights are gone too: the engine then
        stays paused at version NO_VERSION."""

    def shutdown(self) -> None:
        """Ends the engine and its processes."""


def check_least(count: int, engine: Engine, field: str) -> None:
    """Raises InvalidArgument, which names the field, unless responses of this engine may have a least length."""
    # vLLM's mask of early ends would write beyond its logits, which ends the engine.
    outside = [token for token in engine.end_ids if token >= engine.vocab_size]
    if count and outside:
        raise InvalidArgument(
            f"{field}: {count}; must be 0, as the model's folder names an end of texts, {outside[0]}, that is not "
            f"one of its {engine.vocab_size} tokens; correct eos_token_id in its generation_config.json"
        )


def joining_info(message: pb.Prepare, replica: str) -> dict[str, Any]:
    """A push's group for Engine.join, from the prepare phase: the fields of weight_transfer.receiver.Joining, which
    is not imported because it needs torch."""
    return {
        "backend": message.backend,
        "senders": [[sender.address, sender.port] for sender in message.senders],
        "rank": message.ranks[replica],
        "world_size": message.world_size,
        "membership": message.membership,
        "stall_s": message.stall_s,
        "until": time.monotonic() + message.stall_s,
        "on_gpu": message.stage_on_gpu,
    }
