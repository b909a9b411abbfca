"""vLLM's side of a push: one transfer engine for all backends.

It stages the weights, then swaps them in: all buckets are kept beside the model until `finish`, so that an
interrupted transfer leaves the serving weights intact. That takes one more copy of the weights, in host memory or on
the GPU, kept from push to push (with ipc and cuda-ipc it is the learner's copy). vLLM's own transfer engines load
weights before they are verified, and have no deadlines.
"""

import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from quartet.models.device import gpu_uuid
from quartet.seams.vllm import forget_update, unname_workers_memory
from quartet.weight_transfer.manifest import Manifest
from quartet.weight_transfer.receiver import Joining, Receiver, make_receiver
from services.rollout.vllm.adapters import Adapters
from services.rollout.vllm.loading import Loading
from services.rollout.vllm.sampling import continue_seeds

log = logging.getLogger("quartet")


@dataclass
class JoiningInfo(Joining, WeightTransferInitInfo):
    """Everything that a replica's workers need to join a push; `rank` is the first worker's."""


@dataclass
class PackedUpdateInfo(WeightTransferUpdateInfo):
    """The fields of a Manifest, and what each worker keeps."""

    names: Sequence[str]
    dtypes: Sequence[str]
    shapes: Sequence[Sequence[int]]
    bucket_bytes: int
    pieces: bool = False
    """True if each worker keeps its own pieces alone, which all of the replica's know (`knows_pieces`)."""


class QuartetWeightTransferEngine(WeightTransferEngine[JoiningInfo, PackedUpdateInfo]):
    """Receives and verifies weights, and loads them at the commit."""

    init_info_cls = JoiningInfo
    update_info_cls = PackedUpdateInfo
    supports_draft_weight_update = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.checksum = ""
        """Checksum of the bytes received last."""
        self.failure = ""
        """Reason for which the last join, receipt or load failed; empty if it did not."""
        self.loading: Loading | Adapters = Loading(self.model, self.model_config, self.device)
        self._backend = ""
        self._receiver: Receiver | None = None
        self._manifest: Manifest | None = None

    @contextmanager
    def _noting_failure(self) -> Iterator[None]:
        """Context whose exceptions become `failure`. vLLM leaves the answers of a replica's other workers unread once
        one has raised, and takes them for those to later calls."""
        self.failure = ""
        try:
            yield
        except Exception as error:
            log.warning("push: %s: %s", type(error).__name__, error)
            self.failure = f"{type(error).__name__}: {error}"

    def init_transfer_engine(self, init_info: JoiningInfo) -> None:
        """Joins the members of a new group, leaving the one before."""
        with self._noting_failure():
            if self._receiver is None or init_info.backend != self._backend:
                self.shutdown()
                self._receiver, self._backend = make_receiver(init_info.backend, self.device), init_info.backend
            own = self.parallel_config
            rank = init_info.rank + own.rank
            self._receiver.join(replace(init_info, rank=rank, worker=own.rank, workers=own.world_size))

    def start_weight_update(self) -> None:
        """Does nothing: the model stays as it is until the finish."""

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Receives the weights, without the base class's synchronisation of an accelerator, which a CPU lacks."""
        with self._noting_failure():
            self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: PackedUpdateInfo) -> None:
        """Receives every bucket and computes the checksum.

        Raises:
            RuntimeError: a sender or another member is gone, or a bucket took too long.
        """
        if self._receiver is None:
            raise RuntimeError("no transfer group: prepare comes before transfer")
        self._manifest = manifest = Manifest.from_fields(vars(update_info))
        try:
            pieces = self.loading.pieces(manifest) if update_info.pieces else None
            self.checksum = self._receiver.receive(manifest, pieces)
        except BaseException:
            self.shutdown()
            raise

    def make_room(self, manifest: Manifest, *, pieces: bool) -> None:
        """Frees memory of earlier pushes that one of such weights does not use; `pieces` as for its update."""
        if self._receiver is not None:
            self._receiver.make_room(manifest, self.loading.pieces(manifest) if pieces else None)

    def finish_weight_update(self) -> None:
        """Loads the received weights. It is a failure if they changed meanwhile: the model can then only receive
        again."""
        with self._noting_failure():
            assert self._receiver is not None
            assert self._manifest is not None
            self.loading.replace(self._manifest, self._receiver)

    def shutdown(self) -> None:
        """Leaves the group."""
        if self._receiver is not None:
            self._receiver.close()


class WorkerExtension:
    """Methods that vLLM adds to its workers, in addition to its own calls for weight transfer."""

    model_runner: Any
    weight_transfer_engine: QuartetWeightTransferEngine

    def prepare_worker(self) -> tuple[int, str]:
        """Lets the memory that this engine's workers share go away with the last of them, and makes this worker
        continue the seeds of responses that it did not begin. Returns the number of its process and the UUID of its
        GPU, empty on a CPU."""
        unname_workers_memory()
        continue_seeds(self.model_runner)
        return os.getpid(), gpu_uuid(self.weight_transfer_engine.device)

    def take_adapters(self, rank: int, shapes: Mapping[str, Sequence[int]], versions: int) -> None:
        """Has pushes bring the model's adapters, and nothing else. Arguments as of Adapters."""
        engine = self.weight_transfer_engine
        engine.loading = Adapters(self.model_runner, rank, shapes, versions, engine.device)

    def put_adapters_at(self, place: int) -> None:
        """Has the next push's adapters put in this place, from 0; `take_adapters` came before."""
        assert isinstance(self.weight_transfer_engine.loading, Adapters)
        self.weight_transfer_engine.loading.place = place

    def knows_pieces(self, fields: Mapping[str, Any]) -> bool:
        """True if pieces of the weights of a manifest with these fields are all that this worker needs of them."""
        return self.weight_transfer_engine.loading.pieces(Manifest.from_fields(fields)) is not None

    def make_room(self, fields: Mapping[str, Any], pieces: bool) -> None:
        """Frees memory of earlier pushes that one with these fields does not use; with `pieces` each worker keeps its
        own alone."""
        self.weight_transfer_engine.make_room(Manifest.from_fields(fields), pieces=pieces)

    def push_outcome(self) -> tuple[str, str]:
        """Reason for which this worker's last act in a push failed, empty if it did not, and the checksum of what it
        received last."""
        return self.weight_transfer_engine.failure, self.weight_transfer_engine.checksum

    def stale_weights(self) -> list[str]:
        """Layers that the last update brought no weights for."""
        return self.weight_transfer_engine.loading.stale

    def close_weight_update(self) -> None:
        """Closes a weight update that was left open, if there is one. The group stays, as it may be the next push's
        already."""
        if forget_update(self):
            self.weight_transfer_engine.loading.discard()

    def abort_weight_update(self) -> bool:
        """Ends a push without its weights; True if the model still has its old weights. vLLM's own flag says no more
        than that an update is open: it clears it when an update fails, with half of the weights loaded."""
        forget_update(self)
        self.weight_transfer_engine.shutdown()
        return self.weight_transfer_engine.loading.discard()
