"""An abandoned past is told apart from mere age, by name."""

import pytest

from quartet.serving.runs.timeline import Moment
from quartet.wire.errors import OffTimeline

NONE = "no timeline, having just started or failed half-way"


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
