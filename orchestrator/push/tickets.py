"""Tickets, with which a newcomer carries out the last push by itself."""

from typing import Protocol

from orchestrator.push.group import PushGroup
from protos import rollout_pb2 as pb
from quartet.weight_transfer.probe import Probe
from quartet.weight_transfer.registry import Ticket


class Delivery(Protocol):
    """Hands tickets to the applicants."""

    async def __call__(self, tickets: dict[str, Ticket | None]) -> None: ...


def make_ticket(
    group: PushGroup, prepare: pb.Prepare, version: int, checksum: str, timeout_s: float, proof: Probe | None
) -> Ticket:
    """The phases of a push to the newcomers of `prepare`.

    Args:
        group: the group of the last push.
        prepare: the prepare phase for the newcomers.
        version: version that was pushed last.
        checksum: checksum of its weights.
        timeout_s: deadline of the transfer.
        proof: log-probs that a newcomer should compute afterwards; None for no proof.
    """
    commit = pb.Commit(membership=prepare.membership, policy_version=version)
    transfer = group.transfer(prepare.membership).SerializeToString()
    return Ticket(prepare.SerializeToString(), transfer, commit.SerializeToString(), checksum, timeout_s, proof)
