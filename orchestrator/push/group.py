"""The group that a push goes to: its members, the number of this membership, and the backend of its weights."""

import logging
from collections.abc import Mapping, Sequence
from itertools import accumulate

from orchestrator.config.weights import WeightsConfig
from orchestrator.push.source import WeightSource
from orchestrator.push.transport import choose, problem
from protos import rollout_pb2 as pb
from quartet.weight_transfer.place import Place

log = logging.getLogger("quartet")


class PushGroup:
    """The learner's senders and the replicas that joined them. A change of members is a new
    membership, which has a number of its own."""

    def __init__(self, source: WeightSource, backend: str, config: WeightsConfig) -> None:
        """`backend` is weights.backend; auto chooses by the members' places, again for each membership."""
        self._source = source
        self._asked = backend
        self._config = config
        self._senders: Sequence[Place] = ()
        self._rendezvous: list[pb.Rendezvous] = []
        self.backend = ""
        """Backend of the weights."""
        self.manifest = b""
        """Packed manifest of the weights."""
        self.membership = 0
        """Number of the membership; 0 before the first."""
        self.members: dict[str, int] = {}
        """Replica -> number of its workers."""
        self.formed = False
        """True if the group of this membership has formed."""

    async def learn(self) -> None:
        """Asks the source, the first time, for its places and its manifest."""
        if not self.manifest:
            self._senders, self.manifest = await self._source.places(), await self._source.manifest()

    async def settle(self, answers: Sequence[pb.WeightReport]) -> None:
        """Chooses the backend; a change of backend needs a new group.

        Raises:
            ConfigError: the configured backend does not reach every replica.
        """
        backend = choose(self._asked, self._senders, {report.replica: _place(report) for report in answers})
        if backend != self.backend:
            log.info("weights travel by %s", backend)
            meetings = await self._source.rendezvous(backend)
            self._rendezvous = [pb.Rendezvous(address=address, port=port) for address, port in meetings]
            self.backend, self.members = backend, {}

    def reached(self, answers: Sequence[pb.WeightReport]) -> list[pb.WeightReport]:
        """The replicas that the chosen backend reaches; others, which have come since, take part in the next push."""
        return [report for report in answers if not self.hindered(report.replica, _place(report))]

    def hindered(self, replica: str, place: Place) -> bool:
        """True if the chosen backend does not reach a replica at this place."""
        return bool(problem(self.backend, self._senders, {replica: place}))

    def meet(self, answers: Sequence[pb.WeightReport]) -> None:
        """Makes these replicas the members. If they are others than before, or some are not in this membership yet, a
        new one starts."""
        members = {report.replica: report.workers for report in sorted(answers, key=lambda r: r.replica)}
        together = all(report.membership == self.membership for report in answers)
        if members != self.members or not together:
            # Higher than every replica's number, since replicas may still be in a membership of an earlier run.
            self.membership = self._new_membership(*(report.membership for report in answers))
            self.members, self.formed = members, False

    def newcomers(self, members: Mapping[str, int]) -> pb.Prepare:
        """The prepare phase for newcomers, which meet the senders in a membership of their own."""
        return self._prepare(self._new_membership(), members)

    def prepare(self) -> pb.Prepare:
        """The prepare phase for the members."""
        return self._prepare(self.membership, self.members)

    def transfer(self, membership: int) -> pb.Transfer:
        """The transfer phase for the group of a membership."""
        return pb.Transfer(membership=membership, manifest=self.manifest)

    def _new_membership(self, *others: int) -> int:
        self._source.memberships = 1 + max(self._source.memberships, *others, 0)
        return self._source.memberships

    def _prepare(self, membership: int, members: Mapping[str, int]) -> pb.Prepare:
        return pb.Prepare(
            membership=membership,
            senders=self._rendezvous,
            world_size=1 + sum(members.values()),
            ranks=_ranks(members),
            in_flight=self._config.in_flight,
            bucket_bytes=self._config.bucket_mib << 20,
            stall_s=self._config.stall_s,
            stage_on_gpu=self._config.stage == "gpu",
            manifest=self.manifest,
            backend=self.backend,
        )


def _place(report: pb.WeightReport) -> Place:
    return Place(report.place.machine, tuple(report.place.gpus))


def _ranks(members: Mapping[str, int]) -> dict[str, int]:
    """The first rank of each replica: the sender is 0, every worker one more."""
    return dict(zip(members, accumulate(members.values(), initial=1), strict=False))
