"""An abandoned past is told apart from mere age, by name."""

import grpc
import pytest

from quartet.serving.runs.timeline import Moment
from quartet.wire.errors import FailedPrecondition, LeaseLost, OffTimeline, from_rpc

NONE = "no timeline, having just started or failed half-way"


class Refusal(grpc.RpcError):
    """A refusal, as a client's call raises it."""

    def __init__(self, details: str) -> None:
        self._details = details

    def code(self) -> grpc.StatusCode:
        return grpc.StatusCode.FAILED_PRECONDITION

    def details(self) -> str:
        return self._details


def test_what_is_of_the_timeline_passes_whatever_its_number() -> None:
    for number in (-1, 0, 7):
        Moment(4, number).check(4, "a", "version")


@pytest.mark.parametrize(
    ("moment", "said"),
    [
        (Moment(3, 7), "timeline: a holds version 7 of an abandoned timeline (3); the run is at timeline 4"),
        (Moment(), f"timeline: a holds version 0 of {NONE}; the run is at timeline 4"),
    ],
)
def test_what_is_of_another_timeline_is_refused_in_plain_words(moment: Moment, said: str) -> None:
    with pytest.raises(OffTimeline) as caught:
        moment.check(4, "a", "version")
    assert str(caught.value) == said


@pytest.mark.parametrize(
    ("details", "kind"),
    [
        ("timeline: a holds version 7 of an abandoned timeline (3)", OffTimeline),
        ("lease: run a no longer holds this service", LeaseLost),
        ("min_version: 8 asked, but a serves 7", FailedPrecondition),
    ],
)
def test_callers_are_told_which_of_the_three_it_was(details: str, kind: type[Exception]) -> None:
    error = from_rpc(Refusal(details), "rollout.Generate")
    assert (type(error), str(error)) == (kind, f"rollout.Generate: {details}")
