"""Description of a push's group for an engine, taken from the prepare phase."""

import time
from typing import Any

from protos import rollout_pb2 as pb


def joining_info(message: pb.Prepare, replica: str, host: str) -> dict[str, Any]:
    """The fields of weight_transfer.receiver.Joining, which is not imported because it needs torch. `host` is the
    replica's own address."""
    return {
        "backend": message.backend,
        "senders": [[sender.address, sender.port] for sender in message.senders],
        "rank": message.ranks[replica],
        "world_size": message.world_size,
        "membership": message.membership,
        "host": host,
        "stall_s": message.stall_s,
        "until": time.time() + message.stall_s,
        "streaming": message.streaming,
    }
