"""Errors of Serve itself, replaced for the caller by a status and a plain line without Ray's text."""

import re

import grpc

from quartet.serving.door.call import CallContext
from quartet.wire.errors import REPLICA_DIED, REPLICA_LOST

_OWN_ERROR = re.compile(r"[\w./ -]+: internal error \(\w+\); see the log")


def presentable(call: CallContext) -> None:
    """Replaces Ray's text about a failure, which holds addresses, process ids, paths and traces.

    The death of a replica becomes UNAVAILABLE, since another replica can answer the same call.
    """
    if call.code() not in (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN):
        return
    details = str(call.details() or "")
    if REPLICA_LOST.search(details):
        call.set_code(grpc.StatusCode.UNAVAILABLE)
        call.set_details(REPLICA_DIED)
    elif not _OWN_ERROR.fullmatch(details):
        call.set_code(grpc.StatusCode.INTERNAL)
        call.set_details("the call failed inside the service; see the log")
