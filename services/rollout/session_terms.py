"""The terms on which a session is sampled, and how a request to start one states them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from protos import common_pb2
from protos import rollout_pb2 as pb
from quartet.security.identity import Caller
from quartet.wire.callers import Purpose
from quartet.wire.errors import InvalidArgument, PermissionDenied
from services.rollout.sample import check_versions

_OF_A_RUN = ("purpose", "lease", "min_version", "max_version")
"""Fields that only a trainer may give."""
_PLAIN = ("temperature", "seed", "max_tokens", "max_length", "kept_s")
"""Fields that are as they are stated."""
KEPT_S = 3600.0
"""Seconds for which a session is kept after its last call, if nothing else is said."""
LONGEST_KEPT_S = 7 * 24 * 3600.0
"""Most seconds that may be said."""
_LONGEST_ID = 512
"""Most characters of a run's id."""


@dataclass(frozen=True, slots=True)
class Terms:
    """The terms on which a session is sampled. Those of a run are its own, so that its samples are trained on as any
    other."""

    temperature: float = 1.0
    seed: int | None = None
    """Seed of the first response, from which those of the others follow; None for those of the requests, which count
    for nothing in a session of a run."""
    max_tokens: int | None = None
    """Most tokens of a response; None for what fits."""
    max_length: int | None = None
    """Most tokens of a prompt and its response; None for the model's own."""
    kept_s: float = KEPT_S
    """Seconds after its last call for which it is kept."""
    purpose: Purpose = Purpose.FOREIGN
    """The queue that its requests join."""
    bounds: bytes = b""
    """The run's lease and the versions that may serve it, as a GenerateRequest; empty for any."""

    @property
    def versions(self) -> pb.GenerateRequest:
        """The lease and the versions that may serve it."""
        return pb.GenerateRequest.FromString(self.bounds)


def terms_of(given: Mapping[str, Any], caller: Caller) -> dict[str, Any]:
    """The fields of Terms that a request to start a session states.

    Args:
        given: the request's fields; numbers are within their bounds.
        caller: who sends it.

    Raises:
        InvalidArgument: a field is not as it should be.
        PermissionDenied: a field is for trainers alone.
    """
    stated = {name: given[name] for name in _PLAIN if name in given}
    if stated.get("temperature") == 0:
        raise InvalidArgument("temperature: 0; should be above 0 in a session, whose tokens are trained on")
    of_a_run = [name for name in _OF_A_RUN if name in given]
    if of_a_run and caller.role != "trainer":
        raise PermissionDenied(f"{of_a_run[0]}: is for a run, and {caller.name} has the role {caller.role}")
    if stated.get("kept_s", KEPT_S) > KEPT_S and caller.role != "trainer":
        raise PermissionDenied(f"kept_s: more than {KEPT_S:g} is for a run; {caller.name} has the role {caller.role}")
    if "purpose" in given:
        purposes = {each.name.lower(): each for each in Purpose}
        if not isinstance(given["purpose"], str) or given["purpose"] not in purposes:
            raise InvalidArgument(f"purpose: should be one of {', '.join(purposes)}")
        stated["purpose"] = purposes[given["purpose"]]
    if of_a_run and of_a_run != ["purpose"]:
        request = pb.GenerateRequest(min_version=given.get("min_version", 0), max_version=given.get("max_version"))
        check_versions(request)
        request.lease.CopyFrom(_lease(given.get("lease"), caller))
        stated["bounds"] = request.SerializeToString(deterministic=True)
    return stated


def _lease(given: Any, caller: Caller) -> common_pb2.Lease:
    right = (
        isinstance(given, dict)
        and given.keys() == {"run_id", "number"}
        and isinstance(given["run_id"], str)
        and len(given["run_id"]) <= _LONGEST_ID
        and type(given["number"]) is int
        and 0 < given["number"] < 1 << 63
    )
    if not right:
        raise InvalidArgument('lease: should be {"run_id": ..., "number": ...}, that of the run which asks')
    identity = "" if caller.anonymous else caller.name
    return common_pb2.Lease(run_id=given["run_id"], number=int(given["number"]), identity=identity)
