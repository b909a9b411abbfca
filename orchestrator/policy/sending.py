"""Sends the policy's weights, on the ranks of its learner."""

from collections.abc import Iterator, Mapping

from torch import Tensor

from quartet.config.learner import LoraConfig
from quartet.learner.learner import RankLearner
from quartet.learner.lora import scaled
from quartet.models.device import gpu_uuid
from quartet.ranks.rendezvous import node_address
from quartet.weight_transfer.manifest import Manifest
from quartet.weight_transfer.place import Place, has_room, machine
from quartet.weight_transfer.sender import Sender, make_sender


class WeightSending:
    """A rank's part in sending the learner's weights to the rollout replicas. Sending ranks are 0 to senders - 1."""

    def __init__(self, learner: RankLearner, *, adapters: LoraConfig | None = None) -> None:
        """`adapters` sends the learner's adapters, which these are, alone: replicas compute with them beside weights
        of their own."""
        self._learner = learner
        self._adapters = adapters
        self._sender: Sender | None = None
        self._backend = ""
        self._place: Place | None = None
        self._manifest: Manifest | None = None

    def place(self) -> Place:
        """The place of this sending rank. Its machine has no name if the weights do not fit into shared memory."""
        if self._place is None:
            size = sum(tensor.nbytes for tensor in self._shapes().values())
            uuid = gpu_uuid(self._learner.device)
            self._place = Place(machine() if has_room(size) else "", (uuid,) if uuid else ())
        return self._place

    def rendezvous(
        self,
        backend: str,
        *,
        host: str | None,
        bucket_bytes: int,
        stall_s: float,
        senders: int = 1,
        on_gpu: bool = False,
    ) -> tuple[str, int]:
        """Makes the backend's sender on first use, on a sending rank; returns the address and the port at which all
        its groups meet. `host` is that address; None: Ray's address of this node."""
        if self._sender is not None and backend != self._backend:
            self._sender.close()
            self._sender = None  # frees its memory before the new sender allocates
        host = host or node_address()
        if self._sender is None:
            manifest, rank = self._made_manifest(bucket_bytes), self._learner.ranks.rank
            self._sender = make_sender(
                backend, manifest, host=host, stall_s=stall_s, sender=rank, senders=senders, on_gpu=on_gpu
            )
            self._backend = backend
        return host, self._sender.rendezvous()

    def manifest(self, bucket_bytes: int) -> bytes:
        """On the sending ranks: what is sent, packed."""
        return self._made_manifest(bucket_bytes).pack()

    def _made_manifest(self, bucket_bytes: int) -> Manifest:
        self._manifest = self._manifest or Manifest.of(self._shapes(), bucket_bytes)
        return self._manifest

    def _shapes(self) -> Mapping[str, Tensor]:
        return self._learner.shapes(adapters=self._adapters is not None)

    def _weights(self) -> Iterator[tuple[str, Tensor]]:
        if self._adapters is None:
            return self._learner.full_weights()
        return scaled(self._learner.full_weights(adapters=True), self._adapters)

    def join(self, membership: int, world_size: int) -> None:
        """On the sending ranks: forms the push group together with the replicas."""
        self._ready().join(membership, world_size)

    def gather(self, push: int) -> None:
        """On all ranks: brings the weights of this push to the sending ranks. Those send without the others: a push
        that fails leaves no rank waiting.

        Raises:
            NotFinite: a weight is not finite; nothing is sent.
        """
        self._learner.check_weights()
        if self._sender is not None:
            self._sender.load(self._weights(), push)
        else:
            for _ in self._weights():
                pass

    def send(self, push: int) -> dict[int, bytes]:
        """On the sending ranks: sends the weights that `gather` brings; returns bucket -> digest. May run during
        `gather`."""
        return self._ready().send(push)

    def abandon(self, membership: int) -> None:
        """On the sending ranks: ends the transfer to a membership. May overlap any other call."""
        self._ready().abandon(membership)

    def add_newcomers(self, membership: int, world_size: int) -> None:
        """On the sending ranks: sends the weights of the last push to a group of newcomers. May overlap any other
        call."""
        self._ready().add_newcomers(membership, world_size)

    def leave(self) -> None:
        """On the sending ranks: closes the sender and frees the memory that it shares."""
        if self._sender is not None:
            self._sender.close()

    def _ready(self) -> Sender:
        if self._sender is None:
            raise RuntimeError("rendezvous comes before join and send")
        return self._sender
